// A verification: asked for, waited for, and judged tensor by tensor.

import { call } from "./api.js";
import { code, curl, keywords, python } from "./code.js";
import { decades } from "./decades.js";
import { clear, read, refused, valid } from "./form.js";
import { number, tableRow } from "./text.js";

const section = document.getElementById("verify");
const form = section.querySelector("form");
const said = section.querySelector(".said");
const result = section.querySelector(".result");
const button = form.querySelector("button");

export const showCode = code("verify", () => ({
  curl: curl("verify", read(form)),
  python: python([`report = client.verify(${keywords(read(form))})`, 'print("right" if report.ok else "wrong", report)']),
}));

form.addEventListener("input", showCode);
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!valid(form)) return;
  button.disabled = true;
  say("Verifying …");
  result.hidden = true;
  try {
    show(await (await call("verify", { method: "POST", body: read(form) })).json());
    clear(form);
  } catch (problem) {
    say("Not verified.");
    refused(form, problem);
  } finally {
    button.disabled = false;
  }
});

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
  const { figures, words } = decades(report.tensors);
  result.querySelector(".decades").replaceChildren(...figures);
  result.querySelector(".rule").textContent = `Bound: ${rules.join("; ")}. ${words}.`;
  result.hidden = false;
}

function judged(tensor) {
  const at = tensor.worst_index ? `[${tensor.worst_index.join(", ")}]` : "–";
  const figures = [tensor.max_abs, tensor.bound, tensor.torch.max_abs, tensor.rms].map((x) => [number(x), "n"]);
  const there = [tensor.worst_value, tensor.worst_expected].map((x) => [number(x, 6), "n"]);
  return tableRow(tensor.name, [tensor.ok ? ["right", "good"] : ["wrong", "bad"], ...figures, [at, "at"], ...there]);
}
