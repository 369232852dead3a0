// A small chart for each metric; the step under the pointer is read off all of them.
const MARGIN = { l: 52, r: 10, t: 6, b: 24 };
let curveState = { smoothing: 0, search: "", step: null };
let curveCards = [];

const metricNames = () => [...new Set(data.runs.flatMap((run) => Object.keys(run.curves)))].sort((a, b) => b.endsWith("/score") - a.endsWith("/score") || a.localeCompare(b));

const smoothed = (values, weight) => {
  let mean = 0, bias = 1;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    bias *= weight;
    return mean / (1 - bias);
  });
};

const curvesOf = (metric) => data.runs.flatMap((run, index) => {
  const curve = run.curves[metric];
  return curve ? [{ run: index, name: run.name, ...curve }] : [];
});

const curveTraces = (metric) => curvesOf(metric).flatMap((curve) => {
  const line = { x: curve.steps, y: curve.values, mode: curve.steps.length > 60 ? "lines" : "lines+markers", marker: { size: 4 }, name: curve.name, line: { color: runColour(curve.run), width: 1.8 }, connectgaps: false };
  if (!curveState.smoothing) return [line];
  return [{ ...line, opacity: 0.25, showlegend: false, mode: "lines" }, { ...line, y: smoothed(curve.values, curveState.smoothing), mode: "lines" }];
});

const nearest = (steps, step) => {
  let best = 0;
  steps.forEach((value, index) => { if (Math.abs(value - step) < Math.abs(steps[best] - step)) best = index; });
  return best;
};

const curveCard = (metric) => {
  const curves = curvesOf(metric), steps = curves.flatMap((curve) => curve.steps);
  const low = steps.reduce((a, b) => Math.min(a, b), Infinity), high = steps.reduce((a, b) => Math.max(a, b), -Infinity);
  const pad = Math.max((high - low) * 0.02, 0.25), range = [low - pad, high + pad];
  const values = el("span", { class: "values" }), plot = el("div", { class: "plot" }), line = el("div", { class: "cursor" });
  line.hidden = true;
  const area = el("div", { class: "area" }, plot, line);
  const short = metric.split("/").slice(1).join("/") || metric;
  const element = el("article", { class: "curve", "data-metric": metric },
    el("h3", {}, el("button", { type: "button", class: "plain", text: visible(short), title: `${visible(metric)}: enlarge`, onclick: () => enlarge(metric) }), values), area);
  const width = () => area.clientWidth - MARGIN.l - MARGIN.r;
  const card = {
    metric, element, drawn: false,
    draw() {
      card.drawn = true;
      drawChart(plot, curveTraces(metric), {
        margin: MARGIN, showlegend: false, height: 150, font: { color: colour("--faint"), family: "system-ui, sans-serif", size: 11 },
        xaxis: { range, fixedrange: true, automargin: false, nticks: 5, tickformat: "d" }, yaxis: { fixedrange: true, automargin: false, nticks: 6, tickformat: "~g", exponentformat: "e" },
      }, { staticPlot: true });
    },
    read(step) {
      values.replaceChildren(...curves.map((curve) => {
        const at = step === null ? curve.steps.length - 1 : nearest(curve.steps, step);
        const shown = el("span", { text: number(curve.values[at], 4), title: `${curve.name}, step ${curve.steps[at]}` });
        if (several()) shown.style.color = runColour(curve.run);
        return shown;
      }));
      line.hidden = step === null || step < range[0] || step > range[1];
      if (!line.hidden) line.style.left = `${MARGIN.l + ((step - range[0]) / (range[1] - range[0])) * width()}px`;
    },
  };
  const point = (event) => {
    const x = event.clientX - area.getBoundingClientRect().left - MARGIN.l;
    const wanted = range[0] + (x / width()) * (range[1] - range[0]);
    const all = [...new Set(steps)];
    readCurves(all[nearest(all, wanted)]);
  };
  area.addEventListener("pointermove", point);
  area.addEventListener("pointerdown", point);
  card.read(null);
  return card;
};

const readCurves = (step) => {
  curveState.step = step;
  for (const card of curveCards) card.read(step);
  const told = document.getElementById("pointed");
  told.textContent = step === null ? "last values; point at a chart to read a step" : `step ${step.toLocaleString("en")}`;
};

const enlarge = (metric) => {
  const dialog = document.getElementById("large");
  dialog.querySelector("h2").textContent = visible(metric);
  dialog.showModal();
  drawChart(dialog.querySelector(".plot"), curveTraces(metric), {
    hovermode: "x unified", showlegend: several(), legend: { orientation: "h" }, margin: { l: 60, r: 20, t: 30, b: 50 }, xaxis: { title: { text: "step" } }, yaxis: {},
  });
};

const curvesView = () => {
  const groups = new Map(), metrics = metricNames();
  for (const metric of metrics) {
    const prefix = metric.includes("/") ? metric.split("/")[0] : "other";
    groups.set(prefix, [...(groups.get(prefix) ?? []), metric]);
  }
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const card = curveCards.find((one) => one.element === entry.target);
      if (entry.isIntersecting && card && !card.drawn) card.draw();
    }
  }, { rootMargin: "300px" });
  curveCards = [];
  // what people look at first; the others in the order of the alphabet
  const first = ["rollout", "eval", "reward_model", "rewards", "policy", "kl", "value", "train"];
  const order = [...groups.keys()].sort((a, b) => (first.indexOf(a) + 99) % 99 - (first.indexOf(b) + 99) % 99 || a.localeCompare(b));
  const sections = order.map((prefix) => {
    const cards = groups.get(prefix).map(curveCard);
    curveCards.push(...cards);
    return el("section", { class: `metrics span${Math.min(cards.length, 3)}` }, el("h2", { text: visible(prefix) }), el("div", { class: "grid" }, cards.map((card) => card.element)));
  });
  const search = el("input", { type: "search", placeholder: "Metric", "aria-label": "Search metrics", oninput: () => {
    for (const card of curveCards) card.element.hidden = !card.metric.toLowerCase().includes(search.value.toLowerCase());
    for (const section of sections) section.hidden = ![...section.querySelectorAll(".curve")].some((one) => !one.hidden);
  } });
  const smoothing = choice("Smoothing", [[0, "no smoothing"], [0.6, "smoothing 0.6"], [0.9, "smoothing 0.9"], [0.97, "smoothing 0.97"]], 0, (value) => {
    curveState.smoothing = Number(value);
    for (const card of curveCards) if (card.drawn) card.draw();
  });
  const view = el("div", { class: "curves" }, el("div", { class: "bar" }, search, smoothing, el("span", { id: "pointed", class: "told" })), el("div", { class: "groups" }, sections));
  view.addEventListener("pointerleave", () => readCurves(null));
  return { element: view, opened() { readCurves(null); curveCards.forEach((card) => watch.observe(card.element)); }, recolour() { curveCards.forEach((card) => card.drawn && card.draw()); } };
};
