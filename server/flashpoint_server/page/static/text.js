// Numbers and shapes as text, tables, and the elements that show them.

const WORDS = { NaN, Infinity, "-Infinity": -Infinity }; // JSON has no such numbers: they are sent as these strings

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const x = typeof value === "string" ? WORDS[value] : value;
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  if (x !== 0 && (size < 1e-3 || size >= 1e7)) return x.toExponential(digits - 1).replaceAll("-", "−").replace("e+", "e");
  return x
    .toLocaleString("en", { maximumSignificantDigits: Math.max(digits, Math.ceil(Math.log10(size + 1))) })
    .replace("-", "−");
}

// Return a number of a JSON answer: infinities are strings there.
export function value(x) {
  return typeof x === "string" ? WORDS[x] ?? NaN : x;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const power = Math.min(Math.floor(Math.log2(Math.max(value, 1)) / 10), 4);
  return `${number(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

// "1.13 P", with the letter for a power of 1000: the unit goes behind it.
export function si(value) {
  const power = Math.min(Math.max(Math.floor(Math.log10(Math.abs(value) || 1) / 3), 0), 6);
  return `${number(value / 1000 ** power)} ${["", "k", "M", "G", "T", "P", "E"][power]}`;
}

export function milliseconds(seconds) {
  return seconds === null ? "–" : number(seconds * 1000);
}

// "45 s", "9 min", "3.5 h"
export function duration(seconds) {
  const [size, unit] = seconds < 120 ? [1, "s"] : seconds < 7200 ? [60, "min"] : [3600, "h"];
  return `${number(seconds / size, 2)} ${unit}`;
}

// "B1 H8/2 S512 D64", as the plots and the command line have it.
export function problem(row) {
  const pair = (a, b) => (a === b ? `${a}` : `${a}/${b}`);
  const sizes = `B${row.batch} H${pair(row.q_heads, row.kv_heads)} S${pair(row.q_len, row.kv_len)}`;
  return `${sizes} D${pair(row.head_dim, row.value_dim)} ${row.dtype} ${row.direction}${row.causal ? " causal" : ""}`;
}

// Return the first element within another that each selector matches.
export function select(within, ...selectors) {
  return selectors.map((selector) => within.querySelector(selector));
}

// Put rows into a table. On a narrow screen each is a card, whose cells have the names of their columns.
export function fill(table, rows) {
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  for (const row of rows) {
    [...row.cells].forEach((cell, at) => (cell.dataset.label = names[at] ?? ""));
  }
  table.tBodies[0].append(...rows);
}

// A row of a table: cells are text, or [text, class].
export function tableRow(head, cells) {
  const row = document.createElement("tr");
  const first = document.createElement("th");
  first.scope = "row";
  first.textContent = head;
  row.append(first);
  for (const cell of cells) {
    const [text, name] = Array.isArray(cell) ? cell : [cell, ""];
    const td = row.insertCell();
    td.textContent = text;
    td.className = name;
  }
  return row;
}
