"""A page in a real browser: chromium without a window, spoken to over its debugging pipe."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
SILENCE = 90.0
"""Seconds without a word after which the browser is taken for dead."""


class Page:
    """A page at one width, light or dark. `complaints`: errors and warnings; `requests`: all that it asked for, itself first."""

    def __init__(self, browser: "Browser", session: str):
        self._browser, self._session = browser, session
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol for this page."""
        return self._browser.call(method, self._session, **parameters)

    def run(self, script: str) -> Any:
        """Return the value of an expression; a promise is waited for. Raises AssertionError when it throws."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press and release keys, such as Tab and Enter."""
        codes = {"Enter": ("\r", 13), "Tab": ("", 9), " ": (" ", 32)}
        for key in keys:
            text, code = codes[key]
            common: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code}
            self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
            self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def picture(self, path: Path, whole: bool = True) -> None:
        """Write a PNG of the page."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def heard(self, event: dict[str, Any]) -> None:
        """Take note of an event."""
        about = event["params"]
        match event["method"]:
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(about["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(about["args"]))
            case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                self.complaints.append(about["entry"]["text"])
            case "Network.requestWillBeSent" if not about["request"]["url"].startswith(("data:", "blob:")):
                self.requests.append(about["request"]["url"])


class Browser:
    """A running browser."""

    def __init__(self, to: int, back: int):
        self._to, self._back, self._rest, self._number = to, back, b"", 0
        self._pages: dict[str, Page] = {}
        self._events: list[dict[str, Any]] = []

    def open(self, path: Path, width: int, height: int = 900, scheme: str = "light") -> Page:
        """Return a page after it has loaded, in a window of this size, for a user who prefers light or dark."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.send("Page.navigate", url=path.resolve().as_uri())
        while not any(e["method"] == "Page.loadEventFired" and e.get("sessionId") == session for e in self._events):
            self._read()
        page.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")
        return page

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result. Raises AssertionError where it refuses."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._to, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        """Return the next message; events are noted where they belong."""
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], SILENCE)
            part = os.read(self._back, 1 << 20) if ready else b""
            assert part, "the browser has ended, or says nothing"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self._events.append(message)
            if page := self._pages.get(message.get("sessionId", "")):
                page.heard(message)
        return message


@contextmanager
def browser() -> Iterator[Browser]:
    """Run a browser with a profile of its own, and end it."""
    assert FOUND
    (theirs_in, to), (back, theirs_out) = os.pipe(), os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_in, theirs_out)]

    def connect() -> None:
        """The browser reads file 3 and writes file 4."""
        for end, number in zip(high, (3, 4), strict=True):
            os.dup2(end, number)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [FOUND, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        process = subprocess.Popen(command, close_fds=False, preexec_fn=connect, **silent)  # noqa: PLW1509
        for end in (theirs_in, theirs_out, *high):
            os.close(end)
        try:
            one = Browser(to, back)
            yield one
            one.call("Browser.close")
        finally:
            os.close(to)
            os.close(back)
            process.terminate()
            process.wait()
