// Live traffic: rate, latency, batch fill and queue, from /metrics.

import { call } from "./api.js";
import { draw } from "./chart.js";
import { say } from "./form.js";
import { growth, mean, parse, quantile, total } from "./metrics.js";
import { bytes, milliseconds, number } from "./text.js";

const WINDOW_MS = 10_000;
const SHOWN_S = 120; // of the charts

// The charts: an element's id, the unit of its axis, and its lines with their colours.
const CHARTS = {
  rate: { label: "requests/s", lines: { requests: "accent" } },
  latency: { label: "milliseconds", lines: { p50: "accent", p99: "c-orange" } },
  fill: { label: "% of a launch", least: 1, lines: { fill: "accent" } },
  queue: { label: "requests", lines: { waiting: "accent" } },
};

const panel = document.getElementById("traffic");
const samples = [];
const history = []; // [milliseconds, {chart: values of its lines}], the newest last
let allowed = true;

document.addEventListener("locked", () => {
  allowed = true; // another key may have the permission
});

// Take a sample of the metrics and return it; null if there is none.
export async function look() {
  if (!allowed) return null;
  try {
    samples.push([performance.now(), parse(await (await call("metrics")).text())]);
    say(panel, "");
  } catch (problem) {
    allowed = problem.status !== 403; // a key without this permission will not get it later
    panel.querySelector(".tiles").hidden = true; // do not show old figures
    say(panel, problem.message);
    return null;
  }
  panel.querySelector(".tiles").hidden = false;
  const [[since, before], [at, now]] = [samples[0], samples.at(-1)];
  while (samples.length > 1 && at - samples[1][0] >= WINDOW_MS) samples.shift();
  show(before, now, (at - since) / 1000);
  return now;
}

// Show the figures of the last `seconds`; the first look has 0 seconds, and shows only the queue.
function show(before, now, seconds) {
  const requests = growth(before, now, "flashpoint_requests_total");
  const rate = seconds ? requests / seconds : null;
  const [p50, p99] = [0.5, 0.99].map((q) => quantile(q, before, now, "flashpoint_request_seconds"));
  const fill = mean(before, now, "flashpoint_batch_fill");
  const size = mean(before, now, "flashpoint_batch_size");
  const inside = total(now, "flashpoint_queue_requests");
  const oldest = total(now, "flashpoint_queue_oldest_seconds");

  const received = seconds ? growth(before, now, "flashpoint_received_bytes_total") / seconds : 0;
  tile("rate", number(rate), "", `${bytes(received)}/s received`);
  tile("latency", milliseconds(p50), "ms", `p99 ${milliseconds(p99)} ms`);
  tile("fill", fill === null ? "–" : fill < 1e-4 ? "< 0.01" : number(fill * 100, 2), "%", `requests per launch: ${number(size)}`);
  tile("queue", number(inside), "", `oldest ${milliseconds(oldest)} ms`);
  const times = (x, factor) => (x === null ? null : x * factor);
  remember({ rate: [rate], latency: [times(p50, 1000), times(p99, 1000)], fill: [times(fill, 100)], queue: [inside] });
}

function tile(id, figure, unit, detail) {
  const [shown, below] = document.getElementById(id).querySelectorAll("p");
  shown.textContent = figure;
  if (unit && figure !== "–") shown.append(Object.assign(document.createElement("small"), { textContent: unit }));
  below.textContent = detail;
}

function remember(values) {
  const at = performance.now();
  history.push([at, values]);
  while (at - history[0][0] > SHOWN_S * 1000) history.shift();
  const data = history.map(([then]) => (then - at) / 1000);
  for (const [id, { label, lines, least = 0 }] of Object.entries(CHARTS)) {
    draw(document.getElementById(id).querySelector(".plot"), {
      title: document.getElementById(id).querySelector("h3").textContent, heading: false, height: 130, data,
      x: { label: "", range: [-SHOWN_S, 0], splits: [-120, -90, -60, -30, 0], format: ago, name: "time" },
      y: { label, format: (value) => number(value, 2), range: (_, low, high) => [0, Math.max(high * 1.1, least) || 1] },
      notes: data.map((then) => ` at ${ago(then)}`),
      series: Object.entries(lines).map(([name, colour], i) => ({
        name, colour, marks: "plain", gaps: true, values: history.map(([, one]) => one[id][i]),
      })),
    });
  }
}

function ago(seconds) {
  return seconds > -0.5 ? "now" : `${Math.round(seconds)} s`.replace("-", "−");
}
