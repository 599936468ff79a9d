// A verification: asked for, waited for or cancelled, and judged tensor by tensor.

import { call } from "./api.js";
import { code, curl, keywords, python } from "./code.js";
import { decades } from "./decades.js";
import { aging, clear, read, refused, valid } from "./form.js";
import { duration, number, tableRow } from "./text.js";

const TICK_MS = 500;

const section = document.getElementById("verify");
const form = section.querySelector("form");
const outcome = section.querySelector(".outcome");
const said = section.querySelector(".said");
const waiting = section.querySelector(".waiting");
const result = section.querySelector(".result");
const button = form.querySelector("button");
const cancel = form.querySelector("[data-cancel]");
const begin = aging(form, outcome);
const rates = {}; // of the last verification of a backend in a data type: products a second
let asking = null;

export const showCode = code("verify", () => ({
  curl: curl("verify", read(form)),
  python: python([`report = client.verify(${keywords(read(form))})`, 'print("right" if report.ok else "wrong", report)']),
}));

form.addEventListener("input", showCode);
cancel.addEventListener("click", () => asking.abort());
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!valid(form)) return;
  const body = read(form);
  const [kind, work] = [`${body.backend} ${body.dtype}`, products(body)]; // undefined: the API's own choice
  begin();
  asking = new AbortController();
  [button.disabled, cancel.hidden, result.hidden, outcome.hidden] = [true, false, true, false];
  say("Verifying: the backend, then float64, then torch’s own math.");
  const watch = waited(rates[kind] && work / rates[kind]);
  try {
    const report = await (await call("verify", { method: "POST", body, signal: asking.signal })).json();
    rates[kind] = work / report.seconds;
    show(report);
    clear(form);
  } catch (problem) {
    if (asking.signal.aborted) {
      say("Cancelled. A verification that had begun runs to its end on the server, which drops the report.");
    } else {
      outcome.hidden = true;
      refused(form, problem);
    }
  } finally {
    clearInterval(watch);
    [button.disabled, cancel.hidden, waiting.hidden] = [false, true, true];
  }
});

// Show how long it has taken so far, and of how long where an earlier verification tells; the timer that does.
function waited(expected) {
  const [bar, text] = waiting.children;
  const start = performance.now();
  waiting.hidden = false;
  const tick = () => {
    const seconds = (performance.now() - start) / 1000;
    bar.removeAttribute("value");
    if (expected) bar.value = Math.min(seconds / expected, 0.99);
    text.textContent = `${duration(Math.floor(seconds))}${expected ? ` of about ${duration(Math.ceil(expected))}` : ""}`;
  };
  tick();
  return setInterval(tick, TICK_MS);
}

// The number of products, to which the time of a verification is proportional, of one backend in one data type.
function products({ shape, direction }) {
  const { batch = 1, q_heads = 1, q_len, kv_len = q_len, head_dim, value_dim = head_dim } = shape;
  return batch * q_heads * q_len * kv_len * (head_dim + value_dim) * (direction === "forward" ? 1 : 3.5);
}

function say(text, verdict = "") {
  said.textContent = text;
  said.dataset.verdict = verdict;
}

function show(report) {
  const wrong = report.tensors.filter(({ ok }) => !ok).map(({ name }) => name);
  const verdict = report.ok ? "Right: every tensor is within its bound" : `Wrong: beyond its bound: ${wrong.join(", ")}`;
  say(`${verdict} · ${report.backend} on ${report.device} · ${number(report.seconds)} s`, report.ok ? "good" : "bad");
  result.querySelector("tbody").replaceChildren(...report.tensors.map(judged));
  const rules = [...new Set(report.tensors.map(({ rule }) => rule))];
  result.querySelector(".rule").textContent = `Bound: ${rules.join("; ")}.`;
  result.hidden = false;
  decades(result.querySelector(".decades"), report.tensors);
}

function judged(tensor) {
  const at = tensor.worst_index ? `[${tensor.worst_index.join(", ")}]` : "–";
  const figures = [tensor.max_abs, tensor.bound, tensor.torch.max_abs, tensor.rms].map((x) => [number(x), "n"]);
  const there = [tensor.worst_value, tensor.worst_expected].map((x) => [number(x, 6), "n"]);
  return tableRow(tensor.name, [tensor.ok ? ["right", "good"] : ["wrong", "bad"], ...figures, [at, "at"], ...there]);
}
