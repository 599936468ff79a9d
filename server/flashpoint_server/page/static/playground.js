// The playground: a small problem that the page makes, the server's answer, and the weights from q, k and lse alone.

import { head, pythonTensors, range, sentence, sizesOf, slopes, tensors } from "./attention.js";
import { base, call } from "./api.js";
import { draw } from "./chart.js";
import { code, curl, keywords, python } from "./code.js";
import { clear, read, refused, valid } from "./form.js";
import * as gradients from "./gradients.js";
import { HeatMap, scaleOf } from "./heat.js";
import { number, select, value } from "./text.js";

const WAIT_MS = 150; // behind the last change of the form
const CLOSE = 1e-3; // a larger error is shown as wrong; those of float32 are far below
const ROUNDING = 2 ** -24; // of float32, relative
const ANSWERS = { return_lse: true, return_key_weights: true };
const FIRST_WORDS = ["it", "cat"].map((word) => sentence.tokens.indexOf(word));

const section = document.getElementById("playground");
const [form, said, outcome, readout] = select(section, "form", ".said", ".outcome", ".readout");
const [heads, edit, show] = select(section, ".heads", "[data-edit]", "[data-show-all]");
const part = (name) => section.querySelector(`[data-part="${name}"]`);
const weights = new HeatMap(part("weights"), ["query", "key"], (i, j) => tell(i, j), hide);
const outputs = new HeatMap(part("o"), ["query", "value dimension"], (i, d) => tellOutput(i, d), differentiate);

let seed = 0; // of the tensors
let hidden = new Set(); // "i,j": keys that the reader has taken from queries
let asking = new AbortController();
let timer = null;
let answered = null; // {problem, options, lse, o, received} of what is on screen
let retry = false; // whether the last call may succeed if it is made again

// The form: what the tensors are made from, and the options of the call.
function asked() {
  const { pattern, mask, sink, slope, left, right, softcap, scale, ...typed } = read(form);
  const sizes = { ...typed, ...sizesOf(pattern) };
  const made = { kv_heads: sizes.q_heads, kv_len: sizes.q_len, ...sizes, pattern, seed };
  const options = {
    ...(mask && { causal: true }), ...(mask === "top_left" && { causal_alignment: mask }),
    ...((left ?? right) !== undefined && { window: [left ?? -1, right ?? -1] }),
    ...(softcap && { softcap }), ...(scale !== undefined && { scale }),
  };
  const removed = [...hidden].map((cell) => cell.split(",").map(Number)).filter(([i, j]) => i < made.q_len && j < made.kv_len);
  return {
    made, options, removed, sinks: sink === undefined ? undefined : Array(made.q_heads).fill(sink),
    slope, alibi_slopes: slope === undefined ? undefined : slopes(slope, made.q_heads),
  };
}

function request({ made, options, removed, sinks, alibi_slopes }) {
  const { q, k, v } = tensors(made);
  const attn_mask = removed.length ? range(made.q_len).map(() => Array(made.kv_len).fill(true)) : undefined;
  for (const [i, j] of removed) attn_mask[i][j] = false;
  const added = { ...(sinks && { sinks }), ...(alibi_slopes && { alibi_slopes }) };
  return { ...options, ...ANSWERS, ...added, q: [q], k: [k], v: [v], ...(attn_mask && { attn_mask }) }; // the long ones come last
}

export const showCode = code("playground", () => {
  if (!form.checkValidity()) return { curl: "", python: "" };
  const now = asked();
  const { made, options, removed, sinks, slope } = now;
  const given = [
    "q", "k", "v", ...(sinks ? ["sinks=sinks"] : []), ...(slope === undefined ? [] : ["alibi_slopes=slopes"]),
    ...(removed.length ? ["attn_mask=mask"] : []),
  ];
  const before = [...pythonTensors(made, base)];
  if (sinks) before.push(`sinks = np.full(${made.q_heads}, ${sinks[0]}, np.float32)`);
  if (slope !== undefined) before.push(`slopes = ${slope} ** np.arange(1, ${made.q_heads + 1}, dtype=np.float32)`);
  if (removed.length) {
    const [rows, columns] = [0, 1].map((at) => removed.map((cell) => cell[at]).join(", "));
    before.push(`mask = np.ones((${made.q_len}, ${made.kv_len}), bool)`, `mask[[${rows}], [${columns}]] = False`);
  }
  const names = given.join(", ");
  const lines = [
    `o, lse, key_weights = client.attention(${names}, ${keywords({ ...options, ...ANSWERS })})`,
    "print(lse.round(3))", "print(key_weights.round(3))", "print(o.round(3))",
  ];
  const body = request(now);
  const commands = [curl("attention", body)];
  const chosen = gradients.element(made.q_len, made.head_dim);
  if (chosen) {
    const number_ = chosenHead(made.q_heads);
    before.push("do = np.zeros_like(q)", `do[0, ${number_}, ${chosen.join(", ")}] = 1`);
    lines.push(`dq, dk, dv = client.attention_grad(${["do", names, ...[keywords(options)].filter(Boolean)].join(", ")})`,
      `print(dq[0, ${number_}, ${chosen[0]}].round(3))`);
    const one_hot = gradients.oneHot({ q: body.q[0], v: body.v[0] }, number_, chosen);
    commands.push(curl("attention/grad", { ...differentiable(body), do: [one_hot] }));
  }
  return {
    curl: commands.join("\n"),
    python: python(lines, { library: made.pattern === "words" ? ["json", "urllib.request", "", "numpy as np"] : ["numpy as np"], before }),
  };
});

// Return a request of /attention as one of /attention/grad, without do.
function differentiable({ return_lse, return_key_weights, ...rest }) {
  return rest;
}

form.addEventListener("input", () => {
  fit();
  soon(WAIT_MS);
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  soon(0);
});
form.querySelector("[data-again]").addEventListener("click", () => {
  seed += 1;
  soon(0);
});
show.addEventListener("click", () => {
  hidden = new Set();
  soon(0);
});
heads.addEventListener("change", () => {
  render();
  derive();
});
section.querySelector(".views").addEventListener("change", render);

document.addEventListener("locked", () => {
  asking.abort();
  asking = new AbortController();
  fail("Waiting for the server."); // another key asks for itself
});

// Show the fields that the chosen tensors leave open.
function fit() {
  const words = form.elements.pattern.value === "words";
  for (const part of form.querySelectorAll("[data-sizes]")) [part.hidden, part.disabled] = [words, words];
  form.querySelector("[data-words]").hidden = !words;
}
form.querySelector("[data-words]").textContent =
  `“${sentence.sentence}” Real q, k and v of four heads of ${sentence.model}, rounded to two decimals.`;
fit();

// Ask for what the form holds, if nothing is on screen, or if what failed may succeed now.
export function look() {
  if (section.hasAttribute("data-denied")) return;
  if ((!answered && !asking.started) || retry) soon(0);
}

function soon(ms) {
  clearTimeout(timer);
  asking.abort();
  asking = Object.assign(new AbortController(), { started: true });
  retry = false;
  outcome.setAttribute("aria-busy", "true"); // what is on screen is not what the form holds any more
  timer = setTimeout(ask, ms, asking.signal);
}

async function ask(signal) {
  showCode();
  if (!valid(form, { focus: false })) return fail("Not sent: see the form.");
  const now = asked();
  const body = request(now);
  try {
    const response = await call("attention", { method: "POST", body, signal });
    const { o, lse, key_weights, backend } = await response.json();
    if (signal.aborted) return undefined;
    const [q, k, v] = [body.q[0], body.k[0], body.v[0]];
    const options = { ...now.options, sinks: now.sinks, alibi_slopes: now.alibi_slopes, attn_mask: body.attn_mask };
    const numbers = (rows) => rows.map((row) => row.map(value));
    answered = {
      words: now.made.pattern === "words", body, problem: { q, k, v }, options, backend,
      lse: numbers(lse[0]), received: numbers(key_weights[0]), o: o[0].map(numbers),
    };
    clear(form);
    showHeads(q.length, answered.words);
    render();
    derive();
  } catch (problem) {
    if (signal.aborted) return undefined;
    retry = [0, 429, 503].includes(problem.status);
    refused(form, problem);
    fail("No answer.");
  }
  return undefined;
}

function fail(text) {
  answered = null;
  gradients.close();
  outcome.hidden = true;
  said.dataset.verdict = "";
  said.textContent = text;
}

function showHeads(count, words) {
  const chosen = chosenHead(count);
  const shape = `${count}${words}`;
  if (heads.dataset.shape !== shape) {
    heads.dataset.shape = shape;
    heads.querySelectorAll("label").forEach((label) => label.remove());
    for (const number_ of range(count)) {
      const input = Object.assign(document.createElement("input"), { type: "radio", name: "head", value: number_ });
      const label = document.createElement("label");
      label.append(input, words ? ` ${sentence.heads[number_].name}` : ` Head ${number_}`);
      if (words) label.title = `Layer ${sentence.heads[number_].layer}, head ${sentence.heads[number_].head} of ${sentence.model}`;
      heads.append(label);
    }
  }
  heads.querySelectorAll("input")[chosen].checked = true;
  heads.hidden = count === 1;
}

// Return the number of the chosen head of `count`.
function chosenHead(count) {
  return Math.min(Number(heads.querySelector("input:checked")?.value ?? 0), count - 1);
}

function current() {
  const chosen = chosenHead(answered.lse.length);
  const lse = answered.lse[chosen];
  const slope = answered.options.alibi_slopes?.[chosen];
  const one = head(answered.problem, lse, answered.options, chosen);
  return { one, lse, o: answered.o[chosen], received: answered.received[chosen], slope, chosen };
}

function render() {
  outcome.hidden = false;
  outcome.removeAttribute("aria-busy");
  show.hidden = !hidden.size;
  const { one, lse, o, received } = current();
  const scores = section.querySelector(".views input:checked").value === "scores";
  const shown = scores ? one.score : one.weight;
  const finite = (x) => Number.isFinite(x); // colours have no place for other numbers
  const cells = range(one.rows).flatMap((i) => range(one.columns).filter((j) => one.seen(i, j)).map((j) => shown(i, j))).filter(finite);
  const sink = answered.options.sinks && !scores ? { name: "sink", value: one.sink } : undefined;
  const most = Math.max(0, ...cells, ...(sink ? range(one.rows).map(one.sink).filter(finite) : []));
  const low = scores ? Math.min(0, ...cells) : 0;
  const { rows, columns } = one;
  const texts = answered.words ? { rowTexts: sentence.tokens, columnTexts: sentence.tokens } : {};
  const top = Math.max(0, ...received.filter(finite));
  const below = scores ? undefined : { name: "sum", value: (j) => received[j], high: top };
  weights.show({ rows, columns, value: shown, hidden: (i, j) => !one.seen(i, j), low, high: most, extra: sink, below, ...texts });
  const size = Math.max(0, ...o.flat().map(Math.abs).filter(finite));
  outputs.show({ rows: o.length, columns: o[0].length, value: (i, d) => o[i][d], hidden: () => false, low: -size, high: size, rowTexts: texts.rowTexts, marked: gradients.element(o.length, o[0].length) });
  scaleOf(part("weights-scale"), low, most);
  part("received-scale").hidden = scores;
  scaleOf(part("received-scale"), 0, top);
  scaleOf(part("o-scale"), -size, size);
  draw(part("lse"), {
    title: "lse", heading: false, height: 170, legend: false, data: range(one.rows),
    x: { label: "query", range: [-0.5, one.rows - 0.5], format: (i) => (Number.isInteger(i) ? String(i) : "") },
    y: { label: "lse (natural log)" },
    series: [{ name: "lse", colour: "accent", gaps: true, values: lse.map((x) => (Number.isFinite(x) ? x : null)) }],
  });
  check(one, o, lse, received);
  weights.cell ??= answered.words ? FIRST_WORDS : [one.rows - 1, one.columns - 1];
  weights.draw();
  tell(...weights.cell);
}

// Show the error of the weights' sums, and the differences between weights·v and the server's o, and between the sums of
// columns and the server's key weights.
function check(one, o, lse, received) {
  const rows = range(one.rows).filter((i) => lse[i] !== -Infinity);
  const off = Math.max(0, ...rows.map((i) => Math.abs(one.total(i) + one.sink(i) - 1)));
  const apart = Math.max(...range(one.rows).flatMap((i) => one.o(i).map((x, d) => Math.abs(x - o[i][d]))));
  const astray = Math.max(...received.map((x, j) => Math.abs(one.received(j) - x)));
  const sums = answered.options.sinks ? "Each row and its sink add up to 1" : "Each row adds up to 1";
  const blind = one.rows - rows.length;
  said.textContent =
    `${sums} within ${number(off, 2)}; weights · v equals the server’s o within ${number(apart, 2)},` +
    ` and each column adds up to its key weight within ${number(astray, 2)}.` +
    ` Computed by ${answered.backend}.` +
    (blind ? ` ${blind} of ${one.rows} queries see no key: their o is 0, and their lse −∞.` : "") + explained(one, o, lse, off, Math.max(apart, astray));
  said.dataset.verdict = off <= CLOSE && apart <= CLOSE * Math.max(1, ...o.flat().map(Math.abs)) && astray <= CLOSE * one.rows ? "" : "bad";
}

// Return why the weights do not fit the answer: the server computes in float32, which has about 7 digits, and the page in float64.
function explained(one, o, lse, off, apart) {
  if ([...o.flat(), ...lse].some(Number.isNaN)) return " The answer has NaN: its scores, or the scale, are beyond the range of float32.";
  if (off <= CLOSE && apart <= CLOSE) return "";
  const most = Math.max(...range(one.rows).flatMap((i) => range(one.columns).map((j) => Math.abs(one.score(i, j)))));
  return ` The scores reach ${number(most)}. In float32, the server rounds scores and lse of that size by up to ${number(most * ROUNDING, 2)},` +
    " and exp(score − lse) turns this into a factor: use a smaller scale.";
}

// Show how the weight of a cell follows from its score and its row's lse.
function tell(i, j) {
  const { one, lse, slope, received } = current();
  const l = number(lse[i], 4);
  let lines;
  if (i >= one.rows) {
    lines = [`All queries, ${keyName(j)}`, `key weight of the server = ${number(received[j], 6)}`,
      `sum of the column’s weights = ${number(one.received(j), 6)}: the attention that the key receives from ${one.rows} queries`];
  } else if (j >= one.columns) {
    const logit = number(answered.options.sinks[0], 4); // every head has the same
    lines = [`${queryName(i)}, the sink`, `weight = exp(sink − lse) = exp(${logit} − ${l}) = ${number(one.sink(i), 4)}`,
      "The sink takes this part of the row, and adds nothing to o."];
  } else if (!one.seen(i, j)) {
    lines = [`${queryName(i)}, ${keyName(j)}`, "The mask hides this key: its weight is 0.", `lse = ${l}`];
  } else {
    const how = answered.options.softcap ? "softcap · tanh(scale · q·k / softcap)" : "scale · q·k";
    const less = slope === undefined ? "" : ` − ${number(slope)} · ${one.distance(i, j)}`; // ALiBi
    lines = [`${queryName(i)}, ${keyName(j)}`, `score = ${how}${less} = ${number(one.score(i, j), 4)}`,
      `weight = exp(score − lse) = exp(${number(one.score(i, j), 4)} − ${l}) = ${number(one.weight(i, j), 4)}`];
  }
  say(lines);
}

function tellOutput(i, d) {
  const { one, o } = current();
  say([`${queryName(i)}, value dimension ${d}`, `o of the server = ${number(o[i][d], 6)}`,
    `sum of weight · v = ${number(one.o(i)[d], 6)}`]);
}

// Show the gradients of an element of o.
function differentiate(i, d) {
  gradients.pick(i, d);
  render();
  derive();
}

function derive() {
  showCode();
  const { one, chosen } = current();
  gradients.show(differentiable(answered.body), one, chosen, { query: queryName, key: keyName, words: answered.words ? sentence.tokens : undefined });
}

const word = (at) => (answered.words ? ` “${sentence.tokens[at]}”` : "");
const queryName = (i) => `Query ${i}${word(i)}`;
const keyName = (j) => `key ${j}${word(j)}`;

function say(lines) {
  readout.replaceChildren(...lines.map((text) => Object.assign(document.createElement("p"), { textContent: text })));
}

// Hide a key from a query, or show it again.
function hide(i, j) {
  const { one } = current();
  if (!edit.checked || i >= one.rows || j >= one.columns) return;
  const cell = `${i},${j}`;
  if (!hidden.delete(cell)) {
    if (!one.seen(i, j)) return; // another mask hides it
    hidden.add(cell);
  }
  soon(0);
}
