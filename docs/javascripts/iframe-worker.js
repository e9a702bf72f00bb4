// Browsers start no worker on a page that was opened as a file. The search, which wants one, gets a hidden frame instead.
// The name keeps mkdocs-material's offline plugin from loading such a script from elsewhere.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentDocument;
      inside.open(); // or else the frame's empty page, which comes later, would take the script's place
      inside.write("<body>");
      inside.close();
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.createElement("script");
      this.ready = new Promise((done) => (script.onload = done));
      script.src = new URL(url, document.baseURI);
      inside.body.append(script);
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
