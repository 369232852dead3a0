"use strict";
// What every page has: its packed data, plotly, and charts in the page's colours.
const unpacked = async (id) => {
  const text = document.getElementById(id).textContent.trim();
  const bytes = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
};

let plotly = null;
const loadPlotly = () => {
  plotly ??= unpacked("plotly").then((source) => {
    const script = document.createElement("script");
    script.textContent = source;
    document.head.append(script);
    return window.Plotly;
  });
  return plotly;
};

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const chartLayout = (layout) => {
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"), automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--ink"), family: "system-ui, sans-serif", size: 12 },
    hoverlabel: { bgcolor: colour("--band"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
    margin: { l: 50, r: 15, t: 10, b: 40 }, hovermode: "closest", ...layout,
    xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
  };
};

const drawChart = async (place, traces, layout, options = {}) =>
  (await loadPlotly()).react(place, traces, chartLayout(layout), { displaylogo: false, responsive: true, ...options });

const onSchemeChange = (redraw) => matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
