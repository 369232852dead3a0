// One response in full: its turns, media, rewards, and tokens in the colours of what an update knows of them.
const TOKENS_AT_ONCE = 6_000;
const difference = (first, second) => first && second && first.map((value, at) => (value === null || second[at] === null ? null : value - second[at]));

const MEASURES = {
  advantage: { label: "Advantage", of: (tokens) => tokens.advantage, middle: 0 },
  surprise: { label: "Surprise (−log p)", of: (tokens) => (tokens.logprob ?? tokens.engine_logprob)?.map((value) => (value === null ? null : -value)) },
  kl: { label: "KL to the reference", of: (tokens) => difference(tokens.logprob ?? tokens.engine_logprob, tokens.ref_logprob), middle: 0 },
  ratio: { label: "Ratio to the sampler", of: (tokens) => difference(tokens.logprob, tokens.engine_logprob)?.map((value) => (value === null ? null : Math.exp(value))), middle: 1 },
  entropy: { label: "Entropy", of: (tokens) => tokens.entropy },
  value: { label: "Value", of: (tokens) => tokens.value, middle: 0 },
  weight: { label: "Importance weight", of: (tokens) => tokens.weight, middle: 1 },
};
let lastMeasure = "advantage";

const measuresOf = (tokens) => Object.entries(MEASURES).flatMap(([name, measure]) => {
  const values = measure.of(tokens);
  return values?.some((value) => value !== null) ? [{ name, middle: null, ...measure, values }] : [];
});

// The distance from the middle at which a colour is full, the same for all responses: of each hundred tokens two are
// further away, or all others would be pale. A few hundred responses tell.
const scales = {};
const scaleOf = ({ name, of, middle }) => {
  if (!(name in scales)) {
    const all = Object.values(data.responses.tokens), every = Math.ceil(all.length / 200);
    const values = all.filter((_, at) => at % every === 0).flatMap((tokens) => of(tokens) ?? []);
    const sizes = values.filter((value) => value !== null).map((value) => Math.abs(value - (middle ?? 0))).sort((a, b) => a - b);
    scales[name] = sizes[Math.min(sizes.length - 1, Math.floor(sizes.length * 0.98))] || 1;
  }
  return scales[name];
};

const tint = (value, middle, scale) => {
  if (value === null) return "";
  const part = Math.min(1, Math.abs(value - (middle ?? 0)) / scale);
  const hue = middle === null || middle === undefined ? "var(--high)" : value >= middle ? "var(--more)" : "var(--less)";
  return `color-mix(in srgb, ${hue} ${Math.round(part * 62)}%, transparent)`;
};

const tokenView = (tokens) => {
  const measures = measuresOf(tokens), texts = el("div", { class: "block tokens", dir: "auto" });
  const readout = el("p", { class: "readout", "aria-live": "polite" }), legend = el("span", { class: "legend" });
  const shown = Math.min(tokens.texts.length, TOKENS_AT_ONCE);
  const read = (at) => {
    const parts = measures.map(({ label, values }) => `${label.toLowerCase()} ${number(values[at], 4)}`);
    readout.textContent = at === null ? "Point at a token, or tap it, to read its values." : `“${visible(tokens.texts[at]).replace(/\n/g, "⏎")}” · token ${at + 1} · ${parts.join(" · ")}`;
  };
  const paint = (count) => {
    const measure = measures.find(({ name }) => name === lastMeasure) ?? measures[0];
    if (!measure) return texts.replaceChildren(...tokens.texts.map((one) => document.createTextNode(visible(one))));
    const scale = scaleOf(measure), { middle } = measure;
    legend.replaceChildren(...(middle === null ? [["var(--high)", `up to ${number(scale)}`]] : [["var(--less)", `${number(middle - scale)}`], ["var(--more)", `${number(middle + scale)}`]])
      .flatMap(([shade, told]) => { const box = el("i", {}); box.style.background = `color-mix(in srgb, ${shade} 62%, transparent)`; return [box, el("span", { text: told })]; }));
    // of the many tokens of an image one is shown, with their number
    const repeats = (at) => measure.values[at] === null && /^<.*>$/.test(tokens.texts[at]) && tokens.texts[at] === tokens.texts[at - 1];
    const times = (at) => { let end = at + 1; while (end < tokens.texts.length && repeats(end)) end += 1; return end - at > 1 ? ` × ${end - at} ` : ""; };
    texts.replaceChildren(...tokens.texts.slice(0, count).flatMap((one, at) => {
      if (repeats(at)) return [];
      const value = measure.values[at], span = el("span", { "data-at": at, class: value === null ? "given" : null, text: visible(one).replace(/\n/g, "⏎\n") + times(at) });
      span.style.backgroundColor = tint(value, middle, scale);
      return span;
    }));
    if (count < tokens.texts.length) texts.append(el("button", { type: "button", text: `Show all ${tokens.texts.length.toLocaleString("en")} tokens`, onclick: () => paint(tokens.texts.length) }));
    return undefined;
  };
  const over = (event) => { const at = event.target.dataset?.at; if (at !== undefined) read(Number(at)); };
  texts.addEventListener("pointerover", over);
  texts.addEventListener("pointerdown", over);
  const chosen = measures.some(({ name }) => name === lastMeasure) ? lastMeasure : measures[0]?.name;
  const select = choice("Colour by", measures.map(({ name, label }) => [name, label]), chosen, (name) => { lastMeasure = name; paint(shown); });
  read(null);
  paint(shown);
  return el("div", {}, el("div", { class: "bar" }, field("colour", select), legend), texts, readout);
};

const segmentView = (segments) => el("div", { class: "block", dir: "auto" }, segments.map((segment) =>
  el("span", { class: segment.sampled ? null : "given", text: visible(String(segment.text ?? "")), title: segment.sampled ? null : "given, not sampled" })));

const table = (entries) => el("table", { class: "facts" }, el("tbody", {}, entries.map(([name, value]) =>
  el("tr", {}, el("th", { scope: "row", text: visible(name) }), el("td", { text: visible(typeof value === "string" ? value : typeof value === "number" ? number(value, 5) : JSON.stringify(value, null, 1)) })))));

const scoreChip = (score) => chip(score === null ? "unscored" : number(score), score === null ? "score none" : "score");

const chips = (row) => [
  several() ? (() => { const one = chip(visible(data.runs[cell("run", row)].name), "run"); one.style.borderColor = runColour(cell("run", row)); return one; })() : null,
  chip(isEvaluation(row) ? "evaluation" : "training", isEvaluation(row) ? "evaluation" : ""),
  chip(`step ${cell("step", row)}`),
  cell("length", row) === null ? null : chip(`${number(cell("length", row))} tokens`),
  cell("finish_reason", row) === NOTHING ? null : chip(visible(text(cell("finish_reason", row))), ["stop", "done"].includes(text(cell("finish_reason", row))) ? "" : "warn"),
  row in data.responses.tokens ? chip("token values", "tokens-there") : null,
];

const moreOf = (row) => Object.fromEntries(Object.entries(data.responses.more).map(([key, column]) => [key, json(column[row])]).filter(([, value]) => value !== null));

const part = (title, ...content) => el("section", { class: "part" }, el("h3", { text: title }), ...content);

const responseView = (row, openPrompt) => {
  const { messages, segments, episode, columns, extras, turn_rewards: turnRewards, ...more } = moreOf(row);
  const tokens = data.responses.tokens[row], shown = part("Response");
  const ways = [
    tokens ? ["tokens", "Tokens", () => tokenView(tokens)] : null,
    Array.isArray(episode) ? ["turns", "Turns", () => turns(episode, media(row).slice(imagesIn(messages)))] : null,
    Array.isArray(segments) ? ["segments", "Segments", () => segmentView(segments)] : null,
    ["text", "Text", () => textBlock(completion(row))],
  ].filter(Boolean);
  const content = el("div", {}), buttons = ways.map(([name, label, make]) => el("button", { type: "button", "data-way": name, text: label, onclick: () => use(name, make) }));
  const use = (name, make) => {
    content.replaceChildren(make());
    for (const button of buttons) button.setAttribute("aria-pressed", button.dataset.way === name);
  };
  shown.querySelector("h3").append(ways.length > 1 ? el("span", { class: "ways" }, buttons) : "");
  shown.append(content);
  // images are seen in their turns only
  const first = (imagesIn(episode) && ways.find(([name]) => name === "turns")) || ways[0];
  use(first[0], first[2]);
  const rewards = Object.entries(data.responses.rewards).map(([name, column]) => [name, column[row]]).filter(([, value]) => value !== null);
  const advantage = cell("advantage", row);
  const facts = [["score", cell("score", row) ?? "none"], ...(advantage === null ? [] : [["advantage", advantage]]), ...rewards.map(([name, value]) => [`reward ${name}`, value]), ...(Array.isArray(turnRewards) ? [["rewards of turns", turnRewards.map((value) => number(value)).join(", ")]] : [])];
  const rest = { ...columns, ...extras, ...more, ...(place(row) ? { place: place(row) } : {}) };
  return el("article", { class: "response", "data-row": row },
    el("div", { class: "chips" }, scoreChip(cell("score", row)), chips(row)),
    imagesIn(messages) + imagesIn(episode) ? null : pictures(media(row)),
    part("Prompt", Array.isArray(messages) ? turns(messages, media(row)) : textBlock(prompt(row), "prompt"),
      el("button", { type: "button", class: "link", text: "All responses to this prompt, step by step →", onclick: () => openPrompt(row) })),
    shown,
    part("Rewards", table(facts)),
    Object.keys(rest).length ? part("Row", table(Object.entries(rest))) : null);
};
