// A prompt through time: all responses to it, their scores by step, and what changed between two of them.
let promptGroups = null;
let groupOfRow = null;

const groupPrompts = () => {
  if (promptGroups) return;
  const groups = new Map();
  groupOfRow = [];
  for (const row of allRows()) {
    const key = `${cell("prompt", row)} ${cell("media", row)}`;
    if (!groups.has(key)) groups.set(key, { number: groups.size, rows: [] });
    groups.get(key).rows.push(row);
    groupOfRow.push(groups.get(key).number);
  }
  promptGroups = [...groups.values()];
  for (const group of promptGroups) {
    group.rows.sort((a, b) => cell("step", a) - cell("step", b) || a - b);
    group.steps = new Set(group.rows.map((row) => cell("step", row))).size;
    group.evaluated = group.rows.some(isEvaluation);
    group.series = seriesOf(group.rows);
    group.change = changeOf(group.series);
  }
};

const promptOf = (row) => { groupPrompts(); return groupOfRow[row]; };

const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

// The scores of rows in the order of their steps, by run, kind and temperature: training samples otherwise than an evaluation.
const seriesOf = (rows) => {
  const found = new Map();
  for (const row of rows.filter((row) => cell("score", row) !== null)) {
    const run = cell("run", row), kind = cell("evaluation", row), heat = temperature(row), key = `${run} ${kind} ${heat}`, step = cell("step", row);
    if (!found.has(key)) found.set(key, { run, kind, heat, rows: [], scores: new Map() });
    const series = found.get(key);
    if (!series.scores.has(step)) series.scores.set(step, []);
    series.scores.get(step).push(cell("score", row));
    series.rows.push(row);
  }
  return [...found.values()].sort((a, b) => a.run - b.run || a.kind - b.kind || a.heat - b.heat).map(({ scores, ...series }) => ({ ...series, steps: [...scores.keys()], means: [...scores.values()].map(mean) }));
};

// By how much the mean score changes within a run, of evaluations where there are any; null: nothing was scored twice.
const changeOf = (series) => {
  const long = series.filter((one) => one.steps.length > 1), evaluations = long.filter((one) => one.kind);
  return mean((evaluations.length ? evaluations : long).map((one) => one.means[one.means.length - 1] - one.means[0]));
};

const EVALUATED = ["diamond", "square", "triangle-up", "cross", "star"];

const scoresChart = (group, place) => {
  const heats = [...new Set(group.series.map((one) => one.heat))].filter((heat) => heat !== null);
  const traces = group.series.flatMap(({ run, kind, heat, rows, steps, means }) => {
    const at = heats.length > 1 && heat !== null ? ` at temperature ${heat}` : "", symbol = kind ? EVALUATED[Math.max(0, heats.indexOf(heat)) % EVALUATED.length] : "circle";
    const name = `${several() ? `${data.runs[run].name} ` : ""}${kind ? "evaluation" : "training"}${at}`;
    const color = kind ? colour("--ink") : runColour(run);
    const dots = { x: rows.map((row) => cell("step", row)), y: rows.map((row) => cell("score", row)), mode: "markers", name, marker: { size: 7, opacity: 0.55, color, symbol }, hovertemplate: "step %{x}: %{y}<extra></extra>" };
    const line = { x: steps, y: means, mode: "lines", line: { color, width: 1.5, dash: heats.indexOf(heat) > 0 ? "dot" : "solid" }, showlegend: false, hoverinfo: "skip" };
    return steps.length > 1 ? [dots, line] : [dots];
  });
  drawChart(place, traces, { height: 230, margin: { l: 50, r: 10, t: 10, b: 40 }, legend: { orientation: "h", y: 1.15 }, showlegend: group.series.length > 1, xaxis: { title: { text: "step" }, tickformat: "d" }, yaxis: { title: { text: "score" } } }, { displayModeBar: false });
};

const responseName = (row) => `${several() ? `${data.runs[cell("run", row)].name}, ` : ""}${isEvaluation(row) ? "evaluation" : "training"}${temperature(row) === null ? "" : ` at temperature ${temperature(row)}`}, step ${cell("step", row)}, score ${cell("score", row) === null ? "none" : number(cell("score", row))}`;

const comparison = (group) => {
  const evaluated = group.rows.filter(isEvaluation), kind = evaluated.length > 1 ? evaluated : group.rows;
  const own = kind.filter((row) => cell("run", row) === cell("run", kind[0]) && temperature(row) === temperature(kind[0])), rows = own.length > 1 ? own : kind;
  let [first, second] = [rows[0], rows[rows.length - 1]];
  const shown = el("div", {}), entries = group.rows.map((row) => [row, visible(responseName(row))]);
  const update = () => shown.replaceChildren(diffView(completion(first), completion(second)));
  update();
  return part("What changed",
    el("div", { class: "bar" }, choice("From", entries, first, (row) => { first = Number(row); update(); }), el("span", { text: "→" }), choice("To", entries, second, (row) => { second = Number(row); update(); }),
      el("span", { class: "legend" }, el("del", { text: "removed" }), el("ins", { text: "added" }))), shown);
};

const promptView = (group, go) => {
  const plot = el("div", { class: "plot" }), list = pagedList(20, (row) => el("button", { type: "button", class: "item", onclick: () => go(`response/${row}`) },
    el("span", { class: "chips" }, scoreChip(cell("score", row)), chips(row)), el("bdi", { class: "said", text: snippet(completion(row), 400) || "(empty)" })), "");
  list.set(group.rows);
  const messages = json(data.responses.more.messages?.[group.rows[0]] ?? NOTHING);
  const view = el("article", { class: "through" }, imagesIn(messages) ? null : pictures(media(group.rows[0])),
    part("Prompt", Array.isArray(messages) ? turns(messages, media(group.rows[0])) : textBlock(prompt(group.rows[0]), "prompt")),
    group.rows.some((row) => cell("score", row) !== null) ? part("Scores", plot) : null,
    group.rows.length > 1 ? comparison(group) : null,
    part(`${group.rows.length.toLocaleString("en")} responses`, list.element));
  scoresChart(group, plot);
  return view;
};

const promptsView = (go) => {
  groupPrompts();
  let filter = { search: "", sort: "steps" }, chosen = null;
  const detail = el("div", { class: "detail", tabindex: "-1" });
  const unchanged = (a, b) => (a.change === null) - (b.change === null);
  const sorts = { steps: ["most steps", (a, b) => b.steps - a.steps], rise: ["score rose most", (a, b) => unchanged(a, b) || b.change - a.change], fall: ["score fell most", (a, b) => unchanged(a, b) || a.change - b.change], count: ["most responses", (a, b) => b.rows.length - a.rows.length] };
  const item = (group) => el("button", { type: "button", class: "item", "aria-current": group === chosen ? "true" : null, "data-prompt": group.number, onclick: () => go(`prompt/${group.number}`) },
    el("span", { class: "chips" }, chip(`${group.rows.length} responses`), chip(`${group.steps} step${group.steps > 1 ? "s" : ""}`), group.evaluated ? chip("evaluation", "evaluation") : null, group.change !== null ? chip(signed(group.change), group.change > 0 ? "rose" : group.change < 0 ? "fell" : "", "mean score, last step less first") : null),
    el("bdi", { class: "said", text: snippet(asked(group.rows[0]), 200, filter.search) || "(empty)" }));
  const list = pagedList(50, item, "No prompt is like that.");
  const update = () => {
    const wanted = filter.search.toLowerCase();
    list.set(promptGroups.filter((group) => prompt(group.rows[0]).toLowerCase().includes(wanted)).sort((a, b) => sorts[filter.sort][1](a, b) || a.number - b.number));
  };
  const search = el("input", { type: "search", placeholder: "Search", "aria-label": "Search prompts", oninput: () => { filter.search = search.value; update(); } });
  const bar = el("div", { class: "bar" }, search, choice("Sort prompts", Object.entries(sorts).map(([name, [label]]) => [name, label]), "steps", (value) => { filter.sort = value; update(); }));
  const element = el("div", { class: "split" }, el("div", { class: "side" }, bar, list.element), detail);
  update();
  const show = (group) => {
    chosen = group;
    element.classList.toggle("one", group !== null);
    detail.replaceChildren(...(group ? [el("div", { class: "bar moves" }, el("button", { type: "button", class: "close", text: "‹ List", onclick: () => go("prompts") })), promptView(group, go)] : [el("p", { class: "empty", text: "Choose a prompt from the list." })]));
    detail.scrollTop = 0;
    if (group) list.showEntry(group);
  };
  const few = () => matchMedia("(max-width: 799px)").matches;
  return { element, opened(argument) { show(argument === undefined ? (few() ? null : list.entries[0] ?? null) : promptGroups[argument] ?? null); if (argument !== undefined && few()) window.scrollTo(0, 0); }, recolour() { if (chosen) show(chosen); } };
};
