// Live traffic: rate, latency, batch fill and queue, from /metrics.

import { call } from "./api.js";
import { say } from "./form.js";
import { growth, mean, parse, quantile, total } from "./metrics.js";
import { bytes, milliseconds, number } from "./text.js";

const WINDOW_MS = 10_000;
const POINTS = 60; // of a line: 2 minutes of looks every 2 seconds

const panel = document.getElementById("traffic");
const samples = [];
const lines = {};
let allowed = true;

// The sample of the metrics; null where there is none.
export async function look() {
  if (!allowed) return null;
  try {
    samples.push([performance.now(), parse(await (await call("metrics")).text())]);
    say(panel, "");
  } catch (problem) {
    allowed = problem.status !== 403; // a key without that right will not get it
    say(panel, problem.message);
    return null;
  }
  const [[since, before], [at, now]] = [samples[0], samples.at(-1)];
  while (samples.length > 1 && at - samples[1][0] >= WINDOW_MS) samples.shift();
  show(before, now, (at - since) / 1000);
  return now;
}

// Over `seconds`, of which the first look has none: then there is only a queue.
function show(before, now, seconds) {
  const requests = growth(before, now, "flashpoint_requests_total");
  const rate = seconds ? requests / seconds : null;
  const [p50, p99] = [0.5, 0.99].map((q) => quantile(q, before, now, "flashpoint_request_seconds"));
  const fill = mean(before, now, "flashpoint_batch_fill");
  const size = mean(before, now, "flashpoint_batch_size");
  const inside = total(now, "flashpoint_queue_requests");
  const oldest = total(now, "flashpoint_queue_oldest_seconds");

  const received = seconds ? growth(before, now, "flashpoint_received_bytes_total") / seconds : 0;
  tile("rate", rate, number(rate), "", `${bytes(received)}/s received`);
  tile("latency", p99, milliseconds(p50), "ms", `p99 ${milliseconds(p99)} ms`);
  tile("fill", fill, fill === null ? "–" : number(fill * 100, 2), "%", `requests a launch: ${number(size)}`);
  tile("queue", inside, number(inside), "", `oldest ${milliseconds(oldest)} ms`);
}

function tile(id, value, figure, unit, detail) {
  const element = document.getElementById(id);
  const [shown, below] = element.querySelectorAll("p");
  shown.textContent = figure;
  if (unit && figure !== "–") shown.append(Object.assign(document.createElement("small"), { textContent: unit }));
  below.textContent = detail;
  const line = (lines[id] ??= []);
  line.push(value ?? 0);
  if (line.length > POINTS) line.shift();
  element.querySelector("polyline").setAttribute("points", points(line));
}

// In the box of the template's svg, 100 by 24, the newest at its right edge.
function points(line) {
  const top = Math.max(...line, Number.MIN_VALUE);
  return line.map((value, i) => `${100 - ((line.length - 1 - i) * 100) / (POINTS - 1)},${23 - (22 * value) / top}`).join(" ");
}
