// The parts of the page, one at a time; the address says which, so that going back works.
const go = (where) => { location.hash = where; };

const views = {};
const PARTS = [
  ["curves", "Curves", () => metricNames().length, () => curvesView()],
  ["responses", "Responses", () => data.responses.size, () => responsesView(go)],
  ["prompts", "Prompts", () => data.responses.size, () => promptsView(go)],
  ["pairs", "Pairs", () => data.evaluations.length, () => pairsView()],
];
const DETAILS = { response: "responses", prompt: "prompts" };

const openPart = () => {
  const there = PARTS.filter(([, , size]) => size());
  const [word, argument] = location.hash.slice(1).split("/");
  const name = there.find(([one]) => one === (DETAILS[word] ?? word))?.[0] ?? there[0]?.[0];
  const main = document.getElementById("main");
  if (!name) {
    main.replaceChildren(el("p", { class: "empty", text: "These runs have written nothing yet." }));
    return;
  }
  views[name] ??= PARTS.find(([one]) => one === name)[3]();
  for (const tab of document.querySelectorAll("#tabs a")) tab.setAttribute("aria-selected", tab.dataset.part === name);
  if (main.firstElementChild !== views[name].element) main.replaceChildren(views[name].element);
  views[name].opened(word in DETAILS && /^\d+$/.test(argument ?? "") ? Number(argument) : undefined);
};

const start = async () => {
  data = JSON.parse(await unpacked("data"));
  const runs = document.getElementById("runs");
  runs.replaceChildren(...data.runs.flatMap((run, index) => {
    const dot = el("i", { class: "dot" });
    dot.style.background = runColour(index);
    return [el("span", { class: "run", title: visible(run.folder) }, dot, visible(run.folder))];
  }));
  document.getElementById("tabs").append(...PARTS.filter(([, , size]) => size()).map(([name, label]) => el("a", { href: `#${name}`, role: "tab", "data-part": name, text: label })));
  window.addEventListener("hashchange", openPart);
  onSchemeChange(() => Object.values(views).forEach((view) => view.element.isConnected && view.recolour?.()));
  openPart();
  document.documentElement.dataset.ready = "true";
};

start().catch((error) => {
  document.getElementById("main").replaceChildren(el("p", { class: "empty", text: `This page cannot be shown: ${error.message}. It needs a browser of 2023 or later.` }));
  throw error;
});
