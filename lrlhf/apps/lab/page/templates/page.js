"use strict";
// Charts, and tables that are sorted by a click on a heading, searched, and shown in pages.
(() => {
  const PAGE = 50, SEARCHED = 15;

  const draw = (chart) => {
    const { traces, layout } = JSON.parse(chart.querySelector("script").textContent);
    let place = chart.querySelector(".plot");
    if (!place) {
      place = document.createElement("div");
      place.className = "plot";
      chart.append(place);
    }
    drawChart(place, traces, layout);
  };
  const charts = [...document.querySelectorAll(".chart")];
  charts.forEach(draw);
  onSchemeChange(() => charts.forEach(draw));

  const value = (row, column) => {
    const cell = row.cells[column];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
  };
  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return a.localeCompare(b);
  };

  const button = (text, act) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.addEventListener("click", act);
    return made;
  };

  for (const table of document.querySelectorAll("table.data")) {
    const body = table.tBodies[0], all = [...body.rows];
    let rows = all, page = 0;
    const told = document.createElement("span");
    const turn = (by) => { page += by; show(); };
    const back = button("‹ Back", () => turn(-1)), next = button("Next ›", () => turn(1));
    const show = () => {
      const last = Math.max(0, Math.ceil(rows.length / PAGE) - 1);
      page = Math.min(Math.max(page, 0), last);
      body.replaceChildren(...rows.slice(page * PAGE, (page + 1) * PAGE));
      const from = rows.length ? page * PAGE + 1 : 0, to = Math.min(rows.length, (page + 1) * PAGE);
      told.textContent = rows.length > PAGE || rows.length < all.length ? `${from}–${to} of ${rows.length} rows` : `${rows.length} rows`;
      back.disabled = page === 0;
      next.disabled = page === last;
      back.hidden = next.hidden = last === 0;
    };
    if (all.length > SEARCHED) {
      const search = document.createElement("input");
      search.type = "search";
      search.placeholder = "Search";
      search.setAttribute("aria-label", "Search this table");
      const texts = all.map((row) => row.textContent.toLowerCase());
      search.addEventListener("input", () => {
        const wanted = search.value.toLowerCase();
        const found = new Set(all.filter((_, index) => texts[index].includes(wanted)));
        rows = sorted(all.filter((row) => found.has(row)));
        page = 0;
        show();
      });
      const tools = document.createElement("div");
      tools.className = "tools";
      tools.append(search, told, back, next);
      table.parentElement.before(tools);
    }
    const sorted = (some) => {
      const heading = table.querySelector("th[aria-sort]");
      if (!heading) return some;
      const way = heading.getAttribute("aria-sort") === "ascending" ? 1 : -1;
      const column = heading.cellIndex, empty = (row) => value(row, column) === "";
      return [...some].sort((a, b) => empty(a) - empty(b) || compare(value(a, column), value(b, column)) * way);
    };
    for (const head of table.querySelectorAll("th button")) {
      head.addEventListener("click", () => {
        const heading = head.closest("th"), ascending = heading.getAttribute("aria-sort") !== "ascending";
        for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
        heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
        rows = sorted(rows);
        page = 0;
        show();
      });
    }
    show();
  }
})();
