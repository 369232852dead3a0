// What a reward model made of pairs: its worst mistakes, its calibration, and how far it goes by length.
const LABELS = { 1: "people prefer the first", "-1": "people prefer the second", 0: "people see no difference" };

const pairsView = () => {
  const evaluations = data.evaluations;
  let chosen = evaluations.length - 1, head = "", order = "worst", search = "";
  const same = (one, other) => one.run === other.run && one.step === other.step;
  const setsOf = (index) => evaluations.flatMap((one, at) => (same(one, evaluations[index]) ? [[at, visible(one.set)]] : []));
  // one entry for the sets of an evaluation, which have a choice of their own
  const names = evaluations.map((one, index) => [index, `${several() ? `${visible(data.runs[one.run].name)}, ` : ""}step ${one.step}`]).filter(([index]) => setsOf(index)[0][0] === index);
  const facts = el("p", { class: "lead" }), calibration = el("div", { class: "plot" }), length = el("div", { class: "plot" }), lengthNote = el("p", { class: "note" }), sets = el("span", {}), heads = el("span", {}), told = el("span", { class: "told" });
  const current = () => evaluations[chosen];
  const signedMargin = (pair) => { const label = pair.labels[head], margin = pair.margins[head]; return label && margin !== null && margin !== undefined ? margin * label : null; };
  const orders = { worst: ["worst mistakes first", (a, b) => a - b], best: ["clearest first", (a, b) => b - a], close: ["closest first", (a, b) => Math.abs(a) - Math.abs(b)] };

  const side = (pair, index) => {
    const label = pair.labels[head], better = label === (index ? -1 : 1), score = pair[`scores${index}`][head];
    return el("div", { class: `candidate ${better ? "better" : ""}` }, el("div", { class: "chips" }, chip(score === null || score === undefined ? "unscored" : number(score), "score"), better ? chip("preferred by people", "rose") : null),
      pair[`candidate${index}`] === NOTHING ? el("p", { class: "empty", text: "no text in the records" }) : textBlock(text(pair[`candidate${index}`]), "clamped"));
  };
  const card = (pair) => {
    const value = signedMargin(pair), more = json(pair.more);
    const verdict = value === null ? chip(LABELS[pair.labels[head]] ?? "not labelled") : value === 0 ? chip("equal scores") : value > 0 ? chip(`right by ${number(value)}`, "rose") : chip(`wrong by ${number(-value)}`, "fell");
    return el("article", { class: "pair" }, el("div", { class: "chips" }, verdict, pair.place === NOTHING ? null : chip(visible(text(pair.place).split("/").pop()))), pictures(json(pair.media) ?? []),
      pair.prompt === NOTHING ? null : textBlock(text(pair.prompt), "prompt clamped"), el("div", { class: "sides" }, side(pair, 0), side(pair, 1)),
      more ? el("details", {}, el("summary", { text: "Row" }), table(Object.entries(more))) : null);
  };
  const list = pagedList(20, card, "No pair is like that.");

  const drawCalibration = (statistics) => drawChart(calibration, [
    { x: [0.5, 1], y: [0.5, 1], mode: "lines", line: { dash: "dot", color: colour("--faint"), width: 1 }, hoverinfo: "skip", showlegend: false },
    { x: statistics.calibration.map((bin) => bin.predicted), y: statistics.calibration.map((bin) => bin.right), text: statistics.calibration.map((bin) => `${bin.pairs} pairs`), mode: "lines+markers",
      marker: { size: statistics.calibration.map((bin) => 6 + 14 * Math.sqrt(bin.pairs / statistics.pairs)), color: runColour(current().run) }, line: { color: runColour(current().run) }, hovertemplate: "predicted %{x:.2f}, right %{y:.2f}, %{text}<extra></extra>", showlegend: false },
  ], { height: 300, xaxis: { title: { text: "predicted probability of being right" }, range: [0.48, 1.02] }, yaxis: { title: { text: "share that is right" }, range: [-0.03, 1.05] } }, { displayModeBar: false });

  const drawLength = () => {
    const pairs = current().pairs.filter((pair) => pair.candidate0 !== NOTHING && typeof pair.margins[head] === "number");
    const won = (pair) => Math.sign(signedMargin(pair) ?? NaN) + 0; // never -0
    const trace = (some, name, color) => ({ x: some.map((pair) => text(pair.candidate0).length - text(pair.candidate1).length), y: some.map((pair) => pair.margins[head]), mode: "markers", name, marker: { size: 6, opacity: 0.6, color }, hovertemplate: "%{x} characters longer: margin %{y:.3f}<extra></extra>" });
    const kinds = [["right", 1, "--accent"], ["wrong", -1, "--bad"], ["equal scores", 0, "--ink"], ["not labelled", NaN, "--faint"]];
    drawChart(length, kinds.map(([name, way, shade]) => trace(pairs.filter((pair) => Object.is(won(pair), way)), name, colour(shade))).filter((one) => one.x.length),
      { height: 300, legend: { orientation: "h", y: 1.15 }, xaxis: { title: { text: "first less second, characters" } }, yaxis: { title: { text: "margin" } } }, { displayModeBar: false });
  };

  const listed = () => {
    const wanted = search.toLowerCase(), has = (number) => number !== NOTHING && text(number).toLowerCase().includes(wanted);
    const found = current().pairs.filter((pair) => !wanted || has(pair.prompt) || has(pair.candidate0) || has(pair.candidate1));
    const rank = (pair) => signedMargin(pair);
    found.sort((a, b) => (rank(a) === null) - (rank(b) === null) || orders[order][1](rank(a), rank(b)));
    told.textContent = `${found.length.toLocaleString("en")} of ${current().total.toLocaleString("en")} pairs`;
    list.set(found);
  };
  const update = () => {
    const statistics = current().heads[head];
    figures.hidden = !statistics;
    facts.textContent = statistics ? `${percent(statistics.accuracy)} of ${statistics.pairs.toLocaleString("en")} labelled pairs are ranked as people rank them. The predicted probabilities are ${number(statistics.calibration_error * 100, 2)} percentage points off on average.` : "No pair of this evaluation is labelled.";
    const bias = statistics?.length;
    lengthNote.textContent = bias ? `The model prefers the longer answer in ${percent(bias.model_prefers_longer)} of ${bias.pairs.toLocaleString("en")} pairs, people in ${percent(bias.people_prefer_longer)}.${bias.correlation === null ? "" : ` Correlation of margin and length difference: ${number(bias.correlation, 2)}.`}` : "The records hold no texts.";
    if (statistics) drawCalibration(statistics);
    drawLength();
    listed();
  };
  const pick = (index) => {
    chosen = Number(index);
    const own = setsOf(chosen);
    sets.replaceChildren(...(own.length > 1 ? [choice("Validation set", own, chosen, pick)] : []));
    const all = [...new Set(current().pairs.flatMap((pair) => Object.keys(pair.margins)))];
    if (!all.includes(head)) head = all[0] ?? "";
    heads.replaceChildren(...(all.length > 1 ? [choice("Head", all.map((name) => [name, visible(name)]), head, (name) => { head = name; update(); })] : []));
    update();
  };
  // the same set of another evaluation
  const pickEvaluation = (index) => pick((setsOf(Number(index)).find(([at]) => evaluations[at].set === current().set) ?? [index])[0]);
  const figures = el("div", { class: "figures" }, el("figure", {}, el("figcaption", { text: "Calibration" }), calibration, el("p", { class: "note", text: "On the dotted line a model is as sure as it is right; below it, it is too sure. Larger dots stand for more pairs." })),
    el("figure", {}, el("figcaption", { text: "Length" }), length, lengthNote));
  const input = el("input", { type: "search", placeholder: "Search", "aria-label": "Search pairs", oninput: () => { search = input.value; listed(); } });
  const element = el("div", { class: "pairs" }, el("div", { class: "bar" }, names.length > 1 ? choice("Evaluation", names, setsOf(chosen)[0][0], pickEvaluation) : el("span", { text: names[0][1] }), sets, heads), facts, figures,
    el("div", { class: "bar" }, input, choice("Sort pairs", Object.entries(orders).map(([name, [label]]) => [name, label]), order, (name) => { order = name; listed(); }), told), list.element);
  return { element, opened() { pick(chosen); }, recolour() { update(); } };
};
