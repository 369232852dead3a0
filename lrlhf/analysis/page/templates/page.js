"use strict";
// Charts in the colours of the page, and tables that a click on a heading sorts.
(() => {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const axis = () => ({ gridcolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true });
  const draw = () => {
    for (const chart of document.querySelectorAll(".chart")) {
      const { traces, layout } = JSON.parse(chart.querySelector("script").textContent);
      const whole = {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { color: colour("--ink"), family: "system-ui, sans-serif", size: 12 },
        margin: { l: 50, r: 15, t: 10, b: 40 }, hovermode: "closest", ...layout,
      };
      for (const name of ["xaxis", "yaxis"]) whole[name] = { ...axis(), ...(layout[name] || {}) };
      let place = chart.querySelector(".plot");
      if (!place) {
        place = document.createElement("div");
        place.className = "plot";
        place.style.height = "100%";
        chart.append(place);
      }
      Plotly.react(place, traces, whole, { displaylogo: false, responsive: true });
    }
  };
  if (window.Plotly) {
    draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  }
  const value = (row, column) => {
    const cell = row.cells[column];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  for (const button of document.querySelectorAll("table.data th button")) {
    button.addEventListener("click", () => {
      const heading = button.closest("th"), table = heading.closest("table");
      const ascending = heading.getAttribute("aria-sort") !== "ascending";
      for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => compare(value(a, heading.cellIndex), value(b, heading.cellIndex)) * (ascending ? 1 : -1));
      table.tBodies[0].append(...rows);
    });
  }
})();
