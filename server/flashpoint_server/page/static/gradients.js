// The gradients of one element of o: the server's dq, dk and dv, and the formulas that give them.

import { call } from "./api.js";
import { say as alarm } from "./form.js";
import { HeatMap, scaleOf } from "./heat.js";
import { number, select, value } from "./text.js";

const panel = document.querySelector("#playground .gradients");
const [told, derived, readout] = select(panel, ".told", ".derived", ".readout");
const invitation = told.textContent;
const part = (name) => panel.querySelector(`[data-part="${name}"]`);
const maps = {
  dq: new HeatMap(part("dq"), ["query", "head dimension"], (i, c) => tell("dq", i, c)),
  dk: new HeatMap(part("dk"), ["key", "head dimension"], (j, c) => tell("dk", j, c)),
  dv: new HeatMap(part("dv"), ["key", "value dimension"], (j, c) => tell("dv", j, c)),
};

let picked = null; // [query, value dimension]
let shown = null; // what is on screen: {server, own, names, element}
let asking = new AbortController();

// Return the element that the reader has chosen, if an o of this size has it.
export function element(rows, columns) {
  return picked && picked[0] < rows && picked[1] < columns ? picked : null;
}

export function pick(i, d) {
  picked = [i, d];
}

// Return do: 1 at the element of a head, 0 elsewhere.
export function oneHot({ q, v }, head, [query, d]) {
  return q.map((rows, h) => rows.map((_, i) => v[0][0].map((_x, c) => (h === head && i === query && c === d ? 1 : 0))));
}

export function close() {
  asking.abort();
  [shown, derived.hidden, told.textContent] = [null, true, invitation];
  alarm(panel, "");
}

// Ask the server for the gradients of the chosen element, and show them. `request` has the tensors and options of the
// call; `one` is the head with the number `head` by its formulas; `names` has the names of a query and a key, and the
// words of the tokens.
export async function show(request, one, head, names) {
  asking.abort();
  const { signal } = (asking = new AbortController());
  const chosen = element(one.rows, one.o(0).length);
  if (!chosen) return close();
  panel.setAttribute("aria-busy", "true");
  try {
    const body = { ...request, do: [oneHot({ q: request.q[0], v: request.v[0] }, head, chosen)] };
    const { dq, dk, dv } = await (await call("attention/grad", { method: "POST", body, signal })).json();
    if (signal.aborted) return undefined;
    const shared = Math.floor((head * dk[0].length) / dq[0].length); // the key/value head
    const numbers = (rows) => rows.map((row) => row.map(value));
    const server = { dq: numbers([dq[0][head][chosen[0]]]), dk: numbers(dk[0][shared]), dv: numbers(dv[0][shared]) };
    const own = one.gradients(...chosen);
    shown = { server, own: { ...own, dq: [own.dq] }, names, chosen };
    alarm(panel, "");
    draw(Boolean(request.softcap));
  } catch (problem) {
    if (signal.aborted) return undefined;
    close();
    alarm(panel, problem.message);
  }
  panel.removeAttribute("aria-busy");
  return undefined;
}

function draw(capped) {
  const { server, own, names, chosen: [i, d] } = shown;
  derived.hidden = false; // hidden maps have no width
  const finite = (rows) => rows.flat().map(Math.abs).filter(Number.isFinite);
  for (const [name, rows] of Object.entries(server)) {
    const size = Math.max(0, ...finite(rows));
    const words = names.words && (name === "dq" ? [names.words[i]] : names.words);
    maps[name].show({
      rows: rows.length, columns: rows[0].length, value: (row, c) => rows[row][c], hidden: () => false,
      low: -size, high: size, rowTexts: words, firstRow: name === "dq" ? i : 0,
    });
    scaleOf(part(`${name}-scale`), -size, size);
  }
  const apart = Object.keys(server).flatMap((name) => server[name].flatMap((row, at) => row.map((x, c) => x - own[name][at][c])));
  told.textContent =
    `${names.query(i)}, value dimension ${d}: the gradients of o[${i}, ${d}], from POST /attention/grad with a do that is 1 there and 0 elsewhere.` +
    ` They equal the formulas within ${number(Math.max(0, ...apart.map(Math.abs)), 2)}.`;
  const steep = capped ? " · (1 − tanh²(scale · q·k / softcap))" : "";
  const formulas = [
    `dv[key, ${d}] = weight`,
    `dk[key] = scale · weight · (v[key, ${d}] − o)${steep} · q`,
    `dq = sum over the keys of scale · weight · (v[key, ${d}] − o)${steep} · k[key]`,
  ];
  derived.querySelectorAll(".formula").forEach((line, at) => (line.textContent = formulas[at]));
  readout.replaceChildren();
}

function tell(name, row, c) {
  const { server, own, names, chosen } = shown;
  const whose = name === "dq" ? names.query(chosen[0]) : names.key(row).replace("key", "Key");
  const lines = [`${whose}, dimension ${c}`,
    `${name} of the server = ${number(server[name][row][c], 6)}; by the formula ${number(own[name][row][c], 6)}`];
  readout.replaceChildren(...lines.map((text) => Object.assign(document.createElement("p"), { textContent: text })));
}

document.addEventListener("locked", () => {
  picked = null;
  close();
});
