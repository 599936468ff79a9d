// The rows of a benchmark as charts: a chart for each family of cases, a line for each backend.

import { draw, erase } from "./chart.js";
import { bytes, number } from "./text.js";

// A backend's colour and dashes, one for all charts and those of the pictures of the command line.
const LOOKS = {
  naive: ["text"], naive_explicit: ["soft", [2, 3]], reference: ["soft", [2, 7]], triton: ["c-vermilion"], cpu: ["c-blue"],
  torch: ["c-blue"], tiled: ["c-green"], sdpa_flash: ["c-sky", [9, 4]], sdpa_cudnn: ["c-orange", [10, 4, 2, 4]],
  sdpa_efficient: ["c-purple", [4, 2]],
  sdpa_math: ["soft", [9, 3, 2, 3, 2, 3]], flex: ["c-orange", [18, 4]], flash_attn: ["c-sky", [2, 5]],
  flash_attn_3: ["c-blue", [15, 4, 5, 4]], flashinfer: ["c-green", [4, 9]], xformers: ["c-purple", [15, 4, 2, 4, 2, 4]],
};
const FAMILY = ["dtype", "head_dim", "value_dim", "q_heads", "kv_heads", "causal", "direction"];
const KINDS = {
  time: { title: "Time of a call", label: "milliseconds", kind: "log10", spreads: true, of: (row) => row.ms },
  tflops: { title: "Throughput", label: "TFLOP/s", of: (row) => row.tflops_standard },
  speedup: { title: "Speed-up", label: "× as fast as naive", of: (row) => row.speedup_over_naive, least: 1 },
  memory: {
    title: "Memory of a call", label: "peak, a sequence", kind: "log2", of: (row) => row.peak_bytes / row.batch, format: bytes,
  },
};

// Draw all rows as `kind`, in the place of what `element` shows.
export function plot(element, kind, rows, peaks) {
  const timed = rows.filter(({ skipped, ms }) => skipped === null && ms);
  const families = () => grouped(timed, FAMILY).map((family) => lengths(family, KINDS[kind]));
  const specs = kind === "roofline" ? rooflines(timed, peaks) : families();
  const shown = specs.filter(({ series }) => series.some(({ values }) => values.some((value) => value !== null)));
  while (element.children.length > shown.length) {
    erase(element.lastChild);
    element.lastChild.remove();
  }
  while (element.children.length < shown.length) element.append(document.createElement("div"));
  shown.forEach((spec, i) => draw(element.children[i], spec));
  return shown.length;
}

function grouped(rows, fields) {
  const found = new Map();
  for (const row of rows) {
    const name = JSON.stringify(fields.map((field) => row[field]));
    found.set(name, [...(found.get(name) ?? []), row]);
  }
  return [...found.values()];
}

function nameOf({ dtype, head_dim, value_dim, q_heads, kv_heads, causal, direction }) {
  const pair = (a, b) => (a === b ? a : `${a}/${b}`);
  return `${direction}${causal ? ", causal" : ""} · ${dtype} · H ${pair(q_heads, kv_heads)} · D ${pair(head_dim, value_dim)}`;
}

function look(backend) {
  const [colour, dash] = LOOKS[backend] ?? ["soft", [8, 3, 2, 3]];
  return { name: backend, colour, dash };
}

function ordered(rows) {
  const names = Object.keys(LOOKS);
  const place = (name) => (names.includes(name) ? names.indexOf(name) : names.length);
  return [...new Set(rows.map(({ backend }) => backend))].sort((a, b) => place(a) - place(b));
}

// Against sequence length; with one length alone, a bar for each backend.
// `least`: a value at which all charts have a line.
function lengths(rows, { title, label, kind, of, format, spreads = false, least }) {
  const found = [...new Set(rows.map(({ kv_len }) => kv_len))].sort((a, b) => a - b);
  const backends = ordered(rows);
  const at = (backend, length) => rows.find((row) => row.backend === backend && row.kv_len === length);
  const figure = (row) => (row && of(row) > 0 ? of(row) : null);
  const family = `${title}: ${nameOf(rows[0])}`;
  const range = (_, low, high) => fromZero(low, Math.max(high, least ?? 0));
  const across = (chart, context, colour) => least !== undefined && level(chart, context, colour, least);
  if (found.length === 1) {
    return {
      title: `${family} · S ${found[0]}`, legend: false, data: backends.map((_, i) => i),
      x: { label: "backend", kind: "names", names: backends },
      y: { label, format, range },
      marked: across,
      series: backends.map((backend, own) => ({
        ...look(backend), marks: "bars", values: backends.map((_, i) => (i === own ? figure(at(backend, found[0])) : null)),
      })),
    };
  }
  return {
    title: family, data: found,
    x: { label: "sequence length", kind: "log2", splits: found, range: (_, low, high) => [low / 1.15, high * 1.15], format: short },
    y: { label, kind, format, ...(spreads && { range: () => spread(rows) }), ...(!kind && { range }) },
    series: backends.map((backend) => ({ ...look(backend), values: found.map((length) => figure(at(backend, length))) })),
    marked(chart, context, colour) {
      across(chart, context, colour);
      if (spreads) for (const row of rows) whisker(chart, context, colour(look(row.backend).colour), row);
    },
  };
}

function fromZero(low, high) {
  return [0, high > 0 ? high * 1.08 : 1];
}

// Draw a line across the chart at a value.
function level(chart, context, colour, value) {
  const { left, width } = chart.bbox;
  const y = chart.valToPos(value, "y", true);
  Object.assign(context, { strokeStyle: colour("text"), lineWidth: 1.5 * devicePixelRatio });
  context.setLineDash([6 * devicePixelRatio, 3 * devicePixelRatio]);
  context.beginPath();
  context.moveTo(left, y);
  context.lineTo(left + width, y);
  context.stroke();
  context.setLineDash([]);
}

// Draw the times with their whiskers.
function spread(rows) {
  return [Math.min(...rows.map(({ ms_p20 }) => ms_p20)) / 1.25, Math.max(...rows.map(({ ms_p80 }) => ms_p80)) * 1.25];
}

// From p20 to p80 of the times.
function whisker(chart, context, colour, { kv_len, ms_p20, ms_p80 }) {
  const x = chart.valToPos(kv_len, "x", true);
  Object.assign(context, { strokeStyle: colour, lineWidth: devicePixelRatio });
  context.setLineDash([]);
  context.beginPath();
  context.moveTo(x, chart.valToPos(ms_p20, "y", true));
  context.lineTo(x, chart.valToPos(ms_p80, "y", true));
  context.stroke();
}

// A chart for each data type, forward and backward apart: FLOP/s over FLOPs a byte, below the device's measured roof.
// A row above the roof has no point: its share of the roof means nothing.
function rooflines(rows, peaks = {}) {
  const sides = rows.filter(({ roofline_percent }) => !(roofline_percent > 100)).map((row) => ({ ...row, side: row.direction === "forward" ? "forward" : "with the backward" }));
  const known = grouped(sides, ["dtype", "side"]).filter(([{ dtype }]) => peaks[dtype]);
  return known.map((members) => roofline(members, peaks[members[0].dtype]));
}

function roofline(rows, { tflops, gb_per_s, sheet_tflops, sheet_gb_per_s }) {
  const ridge = (tflops * 1000) / gb_per_s;
  const reached = rows.map((row) => row.arithmetic_intensity);
  const ends = [Math.min(...reached, ridge) / 2, ridge, Math.max(...reached, ridge) * 3].map((x) => [x, null]);
  const places = [...ends, ...rows.map((row) => [row.arithmetic_intensity, row])].sort(([a], [b]) => a - b);
  const roof = (name, top, speed, dash) => ({
    name, colour: "text", dash, marks: "plain", values: places.map(([x]) => Math.min(top, (speed * x) / 1000)),
  });
  return {
    title: `Roofline: ${rows[0].side} · ${rows[0].dtype}`, height: 280, data: places.map(([x]) => x),
    notes: places.map(([, row]) => (row ? ` at S ${row.kv_len}` : "")),
    x: { label: "FLOPs a byte", kind: "log10" },
    y: { label: "TFLOP/s", kind: "log10" },
    series: [
      roof("measured roof", tflops, gb_per_s),
      ...(sheet_tflops ? [roof("data sheet", sheet_tflops, sheet_gb_per_s, [2, 3])] : []),
      ...ordered(rows).map((backend) => ({
        ...look(backend), marks: rows[0].side === "forward" ? "points" : "hollow",
        values: places.map(([, row]) => (row?.backend === backend ? row.tflops : null)),
      })),
    ],
  };
}

function short(length) {
  return length < 10_000 ? number(length, 5) : `${number(length / 1024)}k`;
}
