// Elements of the page. Texts get in as text nodes only: nothing in them is taken for markup.
const el = (tag, options = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
};

const chip = (text, kind = "", title) => el("span", { class: `chip ${kind}`, text, title });

const choice = (label, entries, picked, act) => {
  const select = el("select", { "aria-label": label, onchange: () => act(select.value) },
    entries.map(([value, text]) => el("option", { value, text })));
  if (picked !== undefined) select.value = picked;
  return select;
};

const field = (label, input) => el("label", { class: "field" }, el("span", { text: label }), input);

const number = (value, digits = 3) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en").replace("-", "−");
  const shown = size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : Number(value.toPrecision(digits)).toString();
  return shown.replace("-", "−");
};

const percent = (share) => `${Math.round(share * 100)} %`;

const signed = (value) => (value > 0 ? `+${number(value)}` : number(value));

// A list in pages: `render` makes the element of an entry, and only those that are shown exist.
const pagedList = (size, render, empty) => {
  let entries = [], page = 0;
  const list = el("div", { class: "list" }), told = el("span", { class: "told", "aria-live": "polite" });
  const back = el("button", { type: "button", text: "‹", "aria-label": "Page before", onclick: () => show(page - 1) });
  const next = el("button", { type: "button", text: "›", "aria-label": "Next page", onclick: () => show(page + 1) });
  const show = (number) => {
    const last = Math.max(0, Math.ceil(entries.length / size) - 1);
    page = Math.min(Math.max(number, 0), last);
    const part = entries.slice(page * size, (page + 1) * size);
    list.replaceChildren(...(part.length ? part.map(render) : [el("p", { class: "empty", text: empty })]));
    list.scrollTop = 0;
    told.textContent = entries.length ? `${(page * size + 1).toLocaleString("en")}–${(page * size + part.length).toLocaleString("en")} of ${entries.length.toLocaleString("en")}` : "";
    back.disabled = page === 0;
    next.disabled = page === last;
    pager.hidden = last === 0;
  };
  const pager = el("div", { class: "pager" }, back, told, next);
  return {
    element: el("div", { class: "paged" }, list, pager),
    set(some) { entries = some; show(0); },
    showEntry(entry) {
      const at = entries.indexOf(entry);
      if (at < 0) return;
      show(Math.floor(at / size));
      const shown = list.children[at % size];
      list.scrollTop = shown.offsetTop - list.offsetTop - list.clientHeight / 3;
    },
    get entries() { return entries; },
  };
};
