// The data of the page: columns in which texts are numbers of a list.
const NOTHING = -1;
const RUN_COLOURS = ["#3b82d6", "#e08a1e", "#2e9e6b", "#b057c9", "#d8504a", "#7d8b2f", "#28a3b3", "#8a6bd1"];
const runColour = (run) => RUN_COLOURS[run % RUN_COLOURS.length];
let data = null;

const text = (number) => (number === NOTHING ? "" : data.texts[number]);
const json = (number) => (number === NOTHING ? null : JSON.parse(data.texts[number]));
const cell = (name, row) => data.responses.columns[name][row];
const completion = (row) => text(cell("completion", row));
const prompt = (row) => text(cell("prompt", row));
// What was asked last: of a chat the turn of the user's, without what a template adds.
const asked = (row) => {
  const messages = json(data.responses.more.messages?.[row] ?? NOTHING);
  const last = Array.isArray(messages) ? messages.findLast((message) => message?.role === "user") : null;
  return last ? messageText(last.content) : prompt(row);
};
const isEvaluation = (row) => cell("evaluation", row) === 1;
// At which temperature an evaluation sampled; null: training, or the line does not say.
const temperature = (row) => {
  const told = isEvaluation(row) ? json(data.responses.more.temperature?.[row] ?? NOTHING) : null;
  return typeof told === "number" ? told : null;
};
const media = (row) => json(cell("media", row)) ?? [];
const allRows = () => Array.from({ length: data.responses.size }, (_, row) => row);
const several = () => data.runs.length > 1;

const place = (row) => (cell("source", row) === NOTHING ? "" : `${text(cell("source", row)).split("/").pop()}:${cell("row", row)}`);

const pictures = (names) => (names.length ? el("div", { class: "pictures" }, names.map((name) => {
  const uri = data.images[name];
  return uri ? el("img", { src: uri, alt: visible(String(name)), title: visible(String(name)) }) : chip(visible(String(name)), "file");
})) : null);
