"use strict";
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // ---- figures: plotly draws them in the page's colours

  const narrow = matchMedia("(max-width: 600px)");
  const figures = [];

  function dressed(figure) {
    const ink = colour("--ink"), quiet = colour("--quiet"), line = colour("--line");
    const { data, layout } = structuredClone(figure);
    for (const trace of data) {
      if (!trace.meta || !trace.meta.ink) continue;
      if (trace.marker) trace.marker = { ...trace.marker, color: ink };
      if (trace.line) trace.line = { ...trace.line, color: ink };
    }
    for (const shape of layout.shapes || []) shape.line = { ...shape.line, color: quiet };
    for (const note of layout.annotations || []) note.font = { color: quiet, size: 11 };
    for (const axis of ["xaxis", "yaxis"]) {
      Object.assign(layout[axis], { gridcolor: line, linecolor: quiet, tickcolor: quiet, showline: true });
      layout[axis].title = { ...layout[axis].title, font: { size: narrow.matches ? 10 : 13 } };
    }
    Object.assign(layout, {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: quiet, activecolor: ink },
      font: { family: getComputedStyle(document.body).fontFamily, color: ink, size: narrow.matches ? 10 : 12 },
      hoverlabel: { bgcolor: colour("--raised"), bordercolor: quiet, font: { color: ink }, align: "left" },
    });
    return { data, layout };
  }

  function draw() {
    for (const { place, figure } of figures) {
      const { data, layout } = dressed(figure);
      const buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];  // none that sends a figure anywhere
      const shown = { responsive: true, displaylogo: false, modeBarButtons: buttons };
      Plotly.react(place, data, layout, shown);
    }
  }

  for (const place of document.querySelectorAll(".plot")) {
    figures.push({ place, figure: JSON.parse(place.querySelector("script").textContent) });
    place.replaceChildren();
  }
  draw();
  for (const place of document.querySelectorAll("details .plot")) {
    const fold = place.closest("details");  // what is folded has no width to fit into
    fold.addEventListener("toggle", () => { if (fold.open) Plotly.Plots.resize(place); });
  }
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);

  // ---- light and dark

  const button = document.querySelector(".theme");
  const label = () => { button.textContent = theme() === "dark" ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    label();
    draw();
  });
  dark.addEventListener("change", label);
  label();
  button.hidden = false;

  // ---- tables: sorted by the number with which a cell begins, or by its text; what has no number comes last

  const text = (row, column) => row.cells[column].textContent.trim();

  function number(row, column) {
    const said = text(row, column).replaceAll(",", "");
    return said === "infinite" ? Infinity : parseFloat(said);
  }

  function sort(table, column, numeric, sign) {
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      if (!numeric) return sign * text(a, column).localeCompare(text(b, column));
      const x = number(a, column), y = number(b, column);
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
      return x === y ? 0 : sign * (x < y ? -1 : 1);
    });
    table.tBodies[0].append(...rows);
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const press = document.createElement("button");
      press.type = "button";
      press.textContent = head.textContent;
      head.replaceChildren(press);
      head.setAttribute("aria-sort", "none");
      press.addEventListener("click", () => {
        const numeric = head.classList.contains("n");
        const before = head.getAttribute("aria-sort");
        const up = before === "none" ? !numeric : before === "descending";
        for (const other of heads) other.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        sort(table, column, numeric, up ? 1 : -1);
      });
    });
  }

  // ---- filters: words anywhere in a row, and a choice for some columns

  for (const form of document.querySelectorAll(".filters")) {
    const table = document.getElementById(form.dataset.table);
    const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent.trim());
    const rows = [...table.tBodies[0].rows];
    const words = form.querySelector("input");
    const count = form.querySelector("output");
    const choices = [...form.querySelectorAll("select")].map((select) => ({ select, column: heads.indexOf(select.name) }));
    for (const { select, column } of choices) {
      const values = [...new Set(rows.map((row) => text(row, column)))].sort();
      for (const value of values) select.append(new Option(value, value));
    }
    const filter = () => {
      const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const said = row.textContent.toLowerCase();
        const fits = wanted.every((word) => said.includes(word)) &&
          choices.every(({ select, column }) => !select.value || text(row, column) === select.value);
        row.hidden = !fits;
        shown += fits;
      }
      count.textContent = `${shown} of ${rows.length} rows`;
    };
    form.addEventListener("input", filter);
    form.addEventListener("submit", (event) => event.preventDefault());
    filter();
    form.hidden = false;
  }

  // ---- on paper everything is light
  addEventListener("beforeprint", () => { root.dataset.theme = "light"; draw(); label(); });
})();
