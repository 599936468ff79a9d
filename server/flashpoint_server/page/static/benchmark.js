// A benchmark: start it, show its events, draw its charts, cancel it. The address contains its id, so a reload shows it again.

import { call, events } from "./api.js";
import { code, curl, keywords, python } from "./code.js";
import { aging, clear, read, refused, valid } from "./form.js";
import { plot } from "./plot.js";
import { bytes, fill, number, problem as nameOf, select, tableRow } from "./text.js";

const ENDED = { done: "Done", failed: "Failed", cancelled: "Cancelled" };
const MARK = "#benchmark=";
// Marks of figures, with their meaning, and the rows that have them.
const MARKS = [
  ["(over): the time is below what the measured peaks allow, so its share of the roof means nothing: its data stayed in" +
    " processor caches, or other programs ran while the peaks were measured. The roofline has no point for it.",
  (row) => row.roofline_percent > 100],
  ["(busy): other programs used the cores: measure again when nothing else runs.", (row) => row.busy],
  ["(low): the memory is below what the algorithm must hold: the process reused memory that it had.", (row) => row.peak_bytes_low],
];

const section = document.getElementById("benchmark");
const [form, said, progress, outcome, result] = select(section, "form", ".said", "progress", ".outcome", ".result");
const [choice, picture, figures, caption, body, marks] = select(result, ".tabs", "[data-save]", ".charts", ".caption", "tbody", ".marks");
const start = form.querySelector("button");
const cancel = document.getElementById("cancel");
const begin = aging(form, outcome);
let id = null; // of the benchmark on screen
let rows = [];
let peaks = {}; // of the device, by data type
let watching = new AbortController(); // of its events

// Return the form as a BenchmarkRequest: one shape per length.
function request() {
  const { lengths, shape, ...rest } = read(form);
  return lengths ? { shapes: lengths.map((q_len) => ({ ...shape, q_len })), ...rest } : rest;
}

export const showCode = code("benchmark", () => ({
  curl: `${curl("benchmark", request())}\n${id ? curl(`benchmark/${id}/events`, undefined, "-sN") : ""}`.trim(),
  python: python([
    `run = client.benchmark(${keywords(request())})`,
    "for event in run.events():",
    "    print(event)",
  ]),
}));

form.addEventListener("input", () => {
  document.getElementById("grid").disabled = form.elements.preset.value !== "";
  showCode();
});
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!valid(form)) return;
  start.disabled = true;
  try {
    const job = await (await call("benchmark", { method: "POST", body: request() })).json();
    history.replaceState(null, "", MARK + job.id);
    await watch(job.id);
  } catch (problem) {
    start.disabled = false;
    refused(form, problem);
  }
});
cancel.addEventListener("click", async () => {
  cancel.disabled = true;
  try {
    await call(`benchmark/${id}`, { method: "DELETE" }); // its last event reports the end
  } catch (problem) {
    refused(form, problem);
  }
});
document.addEventListener("locked", () => watching.abort());
addEventListener("hashchange", resume);
choice.addEventListener("change", show);
picture.addEventListener("click", save);

// Show the benchmark whose id is in the address, if there is one.
export function resume() {
  if (!location.hash.startsWith(MARK)) return;
  watch(decodeURIComponent(location.hash.slice(MARK.length)));
  stay();
}

// Show this part, also while the parts above it grow, until the user scrolls or types.
function stay() {
  const seen = new AbortController();
  const grown = new ResizeObserver(() => section.scrollIntoView());
  grown.observe(document.getElementById("main"));
  seen.signal.addEventListener("abort", () => grown.disconnect());
  for (const name of ["wheel", "touchstart", "keydown", "pointerdown"]) {
    addEventListener(name, () => seen.abort(), { signal: seen.signal, passive: true });
  }
}

async function watch(job) {
  watching.abort();
  const { signal } = (watching = new AbortController());
  id = job;
  [rows, peaks] = [[], {}];
  clear(form);
  showCode();
  begin();
  body.replaceChildren();
  [start.disabled, cancel.hidden, cancel.disabled] = [true, false, false];
  [outcome.hidden, result.hidden, progress.hidden] = [false, true, false];
  progress.removeAttribute("value");
  said.dataset.verdict = "";
  said.textContent = "Queued";
  try {
    for await (const event of events(`benchmark/${encodeURIComponent(job)}/events`, signal)) {
      HAPPENED[event.kind]?.(event);
      if (event.kind === "state" && event.state in ENDED) break;
    }
  } catch (problem) {
    if (!signal.aborted) ended(`No more events: ${problem.message}`, "bad");
  }
}

const HAPPENED = {
  state({ state, error }) {
    if (state in ENDED) {
      ended(`${ENDED[state]}${error ? `: ${error}` : ` · ${body.rows.length} rows`}`, state === "failed" ? "bad" : "");
    } else {
      said.textContent = state === "running" ? "Running" : "Queued";
    }
  },
  progress({ done, total, backend }) {
    if (total) [progress.max, progress.value] = [total, done];
    said.textContent = `${done} of ${total} · ${backend ?? "the device’s peaks"}`;
  },
  device({ environment }) {
    peaks = environment.peaks ?? {};
  },
  row({ done, total, row }) {
    [progress.max, progress.value] = [total, done];
    rows.push(row);
    if (row.skipped === null) fill(body.closest("table"), [timed(row)]);
    explain();
    result.hidden = false;
    show();
  },
};

function ended(text, verdict = "") {
  said.textContent = text;
  said.dataset.verdict = verdict;
  [start.disabled, cancel.hidden, progress.hidden] = [false, true, true];
}

function show() {
  const { value, parentElement } = choice.querySelector("input:checked");
  const drawn = plot(figures, value, rows, peaks);
  caption.textContent = drawn ? "" : `${parentElement.textContent.trim()}: no row has figures for it.`;
}

// Save the chart as an SVG. It is fetched, not linked, because it may need a key.
async function save() {
  const { value } = choice.querySelector("input:checked");
  try {
    const file = await (await call(`benchmark/${id}/plot.svg?kind=${value}`)).blob();
    const link = document.createElement("a");
    Object.assign(link, { href: URL.createObjectURL(file), download: `benchmark-${value}.svg` }).click();
    URL.revokeObjectURL(link.href);
  } catch (problem) {
    caption.textContent = problem.message;
  }
}

function timed(row) {
  const part = row.roofline_percent;
  const reached = part === null ? "–" : part > 100 ? "(over)" : `${number(part)} %`;
  const figures = [
    `${number(row.ms)}${row.busy ? " (busy)" : ""}`, `${number(row.ms_p20)}–${number(row.ms_p80)}`, number(row.tflops), number(row.gb_per_s),
    reached, `${bytes(row.peak_bytes)}${row.peak_bytes_low ? " (low)" : ""}`, number(row.speedup_over_naive),
  ];
  return tableRow(row.backend, [[nameOf(row), "case"], ...figures.map((figure) => [figure, figure.endsWith(")") ? "n odd" : "n"])]);
}

// List what the marks of the rows mean, and which cases were not timed.
function explain() {
  const notes = MARKS.filter(([, on]) => rows.some(on)).map(([text]) => text);
  const skipped = new Map();
  for (const row of rows.filter(({ skipped: reason }) => reason !== null)) {
    const why = `${row.backend}: ${row.skipped}`;
    skipped.set(why, [...(skipped.get(why) ?? []), nameOf(row)]);
  }
  for (const [why, cases] of skipped) notes.push(`Not timed: ${why} (${cases.length > 3 ? `${cases.length} cases` : cases.join("; ")}).`);
  marks.hidden = !notes.length;
  marks.replaceChildren(...notes.map((textContent) => Object.assign(document.createElement("li"), { textContent })));
}
