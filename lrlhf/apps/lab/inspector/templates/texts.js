// Texts as people read them: what has no glyph, or turns the text around, is made visible.
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f]/g;
const UNSEEN = /[\u0080-\u009f\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u2069\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
const AT_ONCE = 20_000;

const visible = (text) => text
  .replace(CONTROLS, (letter) => (letter === "\u007f" ? "␡" : String.fromCharCode(0x2400 + letter.charCodeAt(0))))
  .replace(UNSEEN, (letter) => `⟨U+${letter.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

// The beginning of a text on one line, or what stands around a searched word.
const snippet = (text, length, word = "") => {
  const found = word ? text.toLowerCase().indexOf(word.toLowerCase()) : -1;
  const from = found > length / 2 ? found - Math.floor(length / 3) : 0;
  const part = visible(text.slice(from, from + length)).replace(/\s+/g, " ").trim();
  return `${from ? "… " : ""}${part}${text.length > from + length ? " …" : ""}`;
};

// A text in full; one that is very long begins with its beginning and a button for the rest.
const textBlock = (text, kind = "") => {
  const block = el("div", { class: `block ${kind}`, dir: "auto" });
  if (text.length <= AT_ONCE) {
    block.textContent = visible(text);
    if (!text) block.append(el("span", { class: "empty", text: "(empty)" }));
    return block;
  }
  const rest = el("button", {
    type: "button", text: `Show all ${text.length.toLocaleString("en")} characters`,
    onclick: () => { block.textContent = visible(text); rest.remove(); },
  });
  block.textContent = visible(text.slice(0, AT_ONCE));
  return el("div", {}, block, rest);
};

const isImage = (part) => part?.type === "image";
const messageText = (content) => {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return content === null || content === undefined ? "" : JSON.stringify(content, null, 1);
  return content.map((part) => (typeof part === "string" ? part : part?.type === "text" && typeof part.text === "string" ? part.text : isImage(part) ? "[image]" : JSON.stringify(part))).join("\n");
};

const partsOf = (message) => (Array.isArray(message?.content) ? message.content : []);
const imagesIn = (messages) => (Array.isArray(messages) ? messages.flatMap(partsOf).filter(isImage).length : 0);

// Content with the images that its parts stand for, of which `next` returns the names; those in a row are side by side.
const contentView = (content, next) => {
  if (!Array.isArray(content) || !content.some(isImage)) return textBlock(messageText(content));
  return el("div", {}, content.flatMap((part, at) => {
    if (!isImage(part)) return [textBlock(messageText([part]))];
    if (at && isImage(content[at - 1])) return [];
    const end = content.findIndex((other, index) => index > at && !isImage(other));
    return [pictures(content.slice(at, end < 0 ? content.length : end).map(() => next() ?? "image"))];
  }));
};

// Turns of a chat or an episode, which show the images of some names.
const turns = (messages, names = []) => {
  const left = [...names];
  return el("div", { class: "turns" }, messages.map((message) => {
    const { role, content, ...more } = message ?? {};
    const rest = Object.keys(more).length ? textBlock(JSON.stringify(more, null, 1), "code") : null;
    return el("div", { class: `turn ${role === "assistant" ? "own" : ""}` }, el("div", { class: "role", text: visible(String(role ?? "")) }),
      content !== undefined && content !== null ? contentView(content, () => left.shift()) : null, rest);
  }));
};
