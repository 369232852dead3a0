// Which responses are listed, and in which order.
const emptyFilter = () => ({ search: "", run: "", kind: "", finish: "", from: "", to: "", part: "score", low: "", high: "", tokens: false, sort: "step", descending: false });

// Each letter once, however large the letters of a search are; made when somebody searches.
let lowered = null;
const loweredTexts = () => (lowered ??= data.texts.map((one) => one.toLowerCase()));

const columnOf = (name) => (name.startsWith("reward ") ? data.responses.rewards[name.slice(7)] : data.responses.columns[name]);

const matching = (filter) => {
  const { columns, tokens } = data.responses, texts = filter.search ? loweredTexts() : null;
  const wanted = filter.search.toLowerCase(), part = columnOf(filter.part);
  const within = (value, low, high) => (low === "" || (value !== null && value >= Number(low))) && (high === "" || (value !== null && value <= Number(high)));
  const has = (number) => number !== NOTHING && texts[number].includes(wanted);
  return allRows().filter((row) =>
    (filter.run === "" || columns.run[row] === Number(filter.run))
    && (filter.kind === "" || columns.evaluation[row] === Number(filter.kind))
    && (filter.finish === "" || columns.finish_reason[row] === Number(filter.finish))
    && within(columns.step[row], filter.from, filter.to)
    && within(part[row], filter.low, filter.high)
    && (!filter.tokens || row in tokens)
    && (!wanted || has(columns.completion[row]) || has(columns.prompt[row])));
};

const ordered = (rows, filter) => {
  const column = columnOf(filter.sort), way = filter.descending ? -1 : 1;
  // what has no value comes last, whichever way
  return rows.sort((a, b) => (column[a] === null) - (column[b] === null) || (column[a] - column[b]) * way || a - b);
};

const numeric = () => [["score", "score"], ...Object.keys(data.responses.rewards).map((name) => [`reward ${name}`, `reward ${visible(name)}`]), ["advantage", "advantage"], ["length", "tokens"]]
  .filter(([name]) => columnOf(name).some((value) => value !== null));

const filterBar = (filter, changed) => {
  const { columns } = data.responses, set = (name) => (value) => { filter[name] = value; changed(); };
  let waits = 0;
  const later = (name) => (event) => { filter[name] = event.target.value; clearTimeout(waits); waits = setTimeout(changed, 120); };
  const limits = (low, high, what) => el("span", { class: "limits" },
    el("input", { type: "number", step: "any", placeholder: "from", "aria-label": `${what} from`, value: filter[low] || null, oninput: later(low) }), "–",
    el("input", { type: "number", step: "any", placeholder: "to", "aria-label": `${what} to`, value: filter[high] || null, oninput: later(high) }));
  const reasons = [...new Set(columns.finish_reason)].filter((reason) => reason !== NOTHING).map((reason) => [reason, visible(text(reason))]);
  const kinds = new Set(columns.evaluation);
  const sorts = [["step", "step"], ...numeric()];
  const direction = el("button", { type: "button", title: "Turn the order around", "aria-label": "Turn the order around", onclick: () => {
    filter.descending = !filter.descending;
    direction.textContent = filter.descending ? "↓" : "↑";
    changed();
  } });
  direction.textContent = filter.descending ? "↓" : "↑";
  const any = (label) => [["", label]];
  const more = el("div", { class: "filters" },
    several() ? choice("Run", [...any("all runs"), ...data.runs.map((run, index) => [index, visible(run.name)])], filter.run, set("run")) : null,
    kinds.size > 1 ? choice("Kind", [...any("training and evaluation"), [0, "training"], [1, "evaluation"]], filter.kind, set("kind")) : null,
    reasons.length > 1 ? choice("Finish reason", [...any("any end"), ...reasons], filter.finish, set("finish")) : null,
    field("steps", limits("from", "to", "Step")),
    el("span", { class: "field" }, choice("Part", numeric(), filter.part, set("part")), limits("low", "high", "Value")),
    Object.keys(data.responses.tokens).length ? el("label", { class: "field" }, el("input", { type: "checkbox", onchange: (event) => set("tokens")(event.target.checked) }), el("span", { text: "with token values" })) : null);
  const search = el("input", { type: "search", placeholder: "Search", "aria-label": "Search prompts and responses", value: filter.search || null, oninput: later("search") });
  const order = el("span", { class: "order" }, choice("Sort by", sorts.map(([name, shown]) => [name, `by ${shown}`]), filter.sort, set("sort")), direction);
  const wide = matchMedia("(min-width: 800px)").matches;
  return el("div", { class: "searching" }, el("div", { class: "bar" }, search, order), el("details", { open: wide }, el("summary", { text: "Filters" }), more));
};
