// Charts with named axes and units, in the page's colours, light and dark; uPlot draws them.

import uPlot from "./uPlot.esm.js";
import { number } from "./text.js";

export const charts = new Map(); // element → {spec, plot}

// The font of what is written on a canvas with `scale` pixels for each CSS pixel.
export const fontOf = (scale) => `${11 * scale}px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif`;
const FONT = fontOf(1);
const LOG = { log2: 2, log10: 10 };

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [element, { spec }] of [...charts]) build(element, spec); // otherwise a legend's marks keep their colours
});
const sizes = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const plot = charts.get(target)?.plot;
    if (plot && contentRect.width) plot.setSize({ width: contentRect.width, height: plot.height });
  }
});

// Draw `spec` in an element that has a width:
//   title, heading (whether it is drawn), height, legend (whether there is one)
//   x, y: {label, kind: "linear" | "log2" | "log10" | "names", format, names, range, splits}
//   series: [{name, colour: a variable of the style sheet, dash, marks, values, gaps: whether null breaks the line}];
//     marks: "line" with points, "plain" without, "points" and "hollow" ones alone, "bars"
//   data: the x of all series; notes: a text for each, beside the values in the legend
//   marked(plot, context, colour): draws more, on top
export function draw(element, spec) {
  const known = charts.get(element);
  if (known && shapeOf(known.spec) === shapeOf(spec)) {
    known.spec = spec;
    known.plot.setData(columns(spec));
  } else {
    build(element, spec);
  }
}

export function erase(element) {
  charts.get(element)?.plot.destroy();
  charts.delete(element);
  sizes.unobserve(element);
  element.replaceChildren();
}

function build(element, spec) {
  erase(element);
  element.classList.add("chart");
  element.classList.toggle("lone", spec.series.length === 1); // its legend needs only one value
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", `${spec.title}: ${spec.y.label} by ${spec.x.label || spec.x.name}`);
  const known = { spec };
  charts.set(element, known);
  known.plot = new uPlot(options(element, spec, () => known.spec), columns(spec), element);
  sizes.observe(element);
}

const shapeOf = ({ title, x, y, series }) => JSON.stringify([title, x.kind, x.names, x.label, y.label, series.map((s) => s.name)]);
const columns = ({ data, series }) => [data, ...series.map(({ values }) => values)];

// `current` returns the spec of the newest data, to which the marks on top belong.
function options(element, spec, current) {
  const { title, heading = true, x, y, height = 220, legend = true } = spec;
  return {
    height, ...(heading && { title }),
    width: Math.max(element.clientWidth, 120),
    legend: { show: legend },
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
    scales: { x: scale(x, () => current().x.range), y: scale(y, () => current().y.range) },
    axes: [axis(x, "x", () => current().x.splits), axis(y, "y")],
    series: [
      { label: x.label || x.name, value: (_, value) => (typeof value === "number" ? text(x, value) : "") },
      ...spec.series.map((one) => line(one, y, (at) => current().notes?.[at] ?? "")),
    ],
    hooks: { draw: [(plot) => current().marked?.(plot, plot.ctx, colour)] },
  };
}

// A range from the spec also belongs to the newest data.
function scale({ kind = "linear", range }, newest) {
  const asked = (...about) => (Array.isArray(newest()) ? newest() : newest()(...about));
  if (kind === "names") return { time: false, range: (_, low, high) => [low - 0.6, high + 0.6] };
  if (kind in LOG) return { time: false, distr: 3, log: LOG[kind], range: range ? asked : wider };
  return { time: false, ...(range && { range: asked }) };
}

function wider(_, low, high) {
  return [low / 1.25, high * 1.25];
}

// Return the ticks of a logarithmic axis: powers of its base, only some if there are many, and more between few powers of 10.
function powers(base, low, high) {
  const [first, last] = [low, high].map((end) => Math.log(end) / Math.log(base));
  const step = Math.max(1, Math.round((last - first) / 6));
  const between = base !== 10 || last - first > 3.2 ? [1] : last - first > 1.6 ? [1, 3] : [1, 2, 5];
  const places = [];
  for (let power = Math.floor(first); power <= last; power += step) {
    places.push(...between.map((factor) => factor * base ** power).filter((place) => place >= low && place <= high));
  }
  return places;
}

function axis(about, which, splits) {
  const { label, kind } = about;
  return {
    font: FONT, size: which === "x" ? 28 : 50,
    ...(label && { label, labelFont: FONT, labelSize: 18 }),
    stroke: () => colour("soft"),
    grid: { stroke: () => colour("line"), width: 1, show: which === "y" },
    ticks: { stroke: () => colour("line"), width: 1, size: 4 },
    values: (_, places) => places.map((value) => (value === null ? "" : text(about, value))),
    ...(about.splits && { splits, filter: (_, places) => places }),
    ...(kind === "names" && { splits: named, filter: (_, places) => places, grid: { show: false } }),
    ...(kind in LOG && !about.splits && {
      splits: (_, i, low, high) => powers(LOG[kind], low, high), filter: (_, places) => places,
    }),
  };
}

// Return the names for which there is room.
function named(plot) {
  const every = Math.ceil((plot.data[0].length * 40 * devicePixelRatio) / plot.bbox.width) || 1;
  return plot.data[0].filter((i) => i % every === 0);
}

function text({ format = (value) => number(value), names }, value) {
  return names ? names[value] ?? "" : format(value);
}

function line({ name, colour: chosen, dash, marks = "line", gaps = false }, y, note) {
  const stroke = () => colour(chosen);
  const drawn = {
    line: { width: 1.75, points: { show: true, size: 5, fill: stroke } },
    plain: { width: 1.75, points: { show: true, size: 3, fill: stroke } }, // so that a value between two gaps is visible
    points: { width: 1.75, paths: () => null, points: { show: true, size: 8, width: 2, fill: stroke } },
    hollow: { width: 1.75, paths: () => null, points: { show: true, size: 8, width: 2, fill: () => colour("panel") } },
    bars: { width: 0, fill: stroke, paths: uPlot.paths.bars({ size: [0.7, 48], align: 0 }), points: { show: false } },
  }[marks];
  return {
    label: name, stroke, dash, spanGaps: !gaps, ...drawn,
    value: (_, value, series, at) => (typeof value === "number" ? `${text(y, value)}${note(at)}` : ""),
  };
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
