// A verification: send the request, show its progress by block, cancel it, and show the result of each tensor.

import { Problem, told } from "./api.js";
import { code, curl, keywords, python } from "./code.js";
import { decades } from "./decades.js";
import { aging, clear, read, refused, valid } from "./form.js";
import { duration, fill, number, select, tableRow } from "./text.js";

const TICK_MS = 500;
const STAGES = {
  backend: "the backend", float64: "float64", torch: "torch’s own math", rounding: "the effect of rounding",
  causes: "known mistakes",
};
const ANSWERS = { forward: "o and lse", backward: "gradients" };

const section = document.getElementById("verify");
const [form, outcome, said, waiting, result] = select(section, "form", ".outcome", ".said", ".waiting", ".result");
const button = form.querySelector("button");
const cancel = form.querySelector("[data-cancel]");
const begin = aging(form, outcome);
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
  begin();
  asking = new AbortController();
  [button.disabled, cancel.hidden, result.hidden, outcome.hidden] = [true, false, true, false];
  say("Verifying: the backend, then float64, then torch’s own math.");
  const progress = followed();
  try {
    show(await reported(body, asking.signal, progress.at));
    clear(form);
  } catch (problem) {
    if (asking.signal.aborted) {
      say("Cancelled. The server finishes the current block, and then stops.");
    } else {
      outcome.hidden = true;
      refused(form, problem);
    }
  } finally {
    progress.end();
    [button.disabled, cancel.hidden] = [false, true];
  }
});

// The report of a verification; `at` is called with its progress. Throws Problem.
async function reported(body, signal, at) {
  for await (const event of told("verify", { method: "POST", body, signal })) {
    if (event.kind === "report") return event.report;
    if (event.kind === "problem") throw new Problem(event.problem);
    at(event);
  }
  throw new Problem({ detail: "the server stopped before the verification was complete" });
}

// Show the completed blocks and the time: `at` takes the newest progress, `end` hides both.
function followed() {
  const [bar, text] = waiting.children;
  const start = performance.now();
  let where = "Waiting in the queue";
  const tick = () => {
    text.textContent = `${where} · ${duration(Math.floor((performance.now() - start) / 1000))}`;
  };
  bar.removeAttribute("value");
  waiting.hidden = false;
  tick();
  const timer = setInterval(tick, TICK_MS);
  return {
    at({ done, total, stage, direction }) {
      [bar.max, bar.value] = [total, done];
      where = `Block ${done + 1} of ${total}: ${STAGES[stage]}, ${ANSWERS[direction]}`;
      tick();
    },
    end() {
      clearInterval(timer);
      waiting.hidden = true;
    },
  };
}

function say(text, verdict = "") {
  said.textContent = text;
  said.dataset.verdict = verdict;
}

function show(report) {
  const wrong = report.tensors.filter(({ ok }) => !ok).map(({ name }) => name);
  const verdict = report.ok ? "Right: every tensor is within its bound" : `Wrong: beyond its bound: ${wrong.join(", ")}`;
  say(`${verdict} · ${report.backend} on ${report.device} · ${number(report.seconds)} s`, report.ok ? "good" : "bad");
  result.querySelector("tbody").replaceChildren();
  fill(result.querySelector("table"), report.tensors.map(judged));
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
