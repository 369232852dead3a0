// The list of responses, and the one that was chosen from it.
const responsesView = (go) => {
  const filter = emptyFilter(), detail = el("div", { class: "detail", tabindex: "-1" });
  let chosen = null;
  const item = (row) => el("button", { type: "button", class: "item", "data-row": row, "aria-current": row === chosen ? "true" : null, onclick: () => go(`response/${row}`) },
    el("span", { class: "chips" }, scoreChip(cell("score", row)), chips(row)),
    el("bdi", { class: "said", text: snippet(completion(row), 220, filter.search) || "(empty)" }),
    el("bdi", { class: "asked", text: snippet(asked(row), 140, filter.search) }));
  const list = pagedList(50, item, "No response is like that.");
  const told = el("p", { class: "told", id: "found", "aria-live": "polite" });
  const update = () => {
    const rows = ordered(matching(filter), filter);
    told.textContent = `${rows.length.toLocaleString("en")} of ${data.responses.size.toLocaleString("en")} responses`;
    list.set(rows);
  };
  const move = (by) => {
    const rows = list.entries, at = rows.indexOf(chosen) + by;
    if (at >= 0 && at < rows.length) go(`response/${rows[at]}`);
  };
  const close = el("button", { type: "button", class: "close", text: "‹ List", onclick: () => go("responses") });
  const before = el("button", { type: "button", text: "↑", "aria-label": "Response before", title: "Response before (k)", onclick: () => move(-1) });
  const after = el("button", { type: "button", text: "↓", "aria-label": "Next response", title: "Next response (j)", onclick: () => move(1) });
  const element = el("div", { class: "split" }, el("div", { class: "side" }, filterBar(filter, update), told, list.element), detail);
  document.addEventListener("keydown", (event) => {
    if (element.isConnected && !event.target.closest("input, select") && "jk".includes(event.key) && event.key && !event.ctrlKey && !event.metaKey) move(event.key === "j" ? 1 : -1);
  });
  const show = (row) => {
    chosen = row;
    element.classList.toggle("one", row !== null);
    if (row === null) {
      detail.replaceChildren(el("p", { class: "empty", text: "Choose a response from the list." }));
    } else {
      detail.replaceChildren(el("div", { class: "bar moves" }, close, before, after, el("span", { class: "told keys", text: "keys j and k" })), responseView(row, (of) => go(`prompt/${promptOf(of)}`)));
      detail.scrollTop = 0;
      list.showEntry(row);
    }
  };
  update();
  const few = matchMedia("(max-width: 799px)").matches;
  show(null);
  return { element, opened(argument) { show(argument === undefined ? (few ? null : list.entries[0] ?? null) : Number(argument) < data.responses.size ? Number(argument) : null); if (argument !== undefined && few) window.scrollTo(0, 0); } };
};
