// The features of each backend, by groups, and the server's limits with their units.

import { bytes, duration, fill, number, si, tableRow } from "./text.js";

// Names in /info → labels on the page. A feature without a group is shown as Other.
const GROUPS = {
  "Data types": { float16: "float16", bfloat16: "bfloat16", float32: "float32", float64: "float64",
    tf32: "TF32 products", quantized: "8-bit K and V" },
  Masks: { causal: "causal", window: "window", bool_mask: "boolean mask", float_mask: "float mask",
    block_mask: "block mask", lengths: "lengths" },
  Scores: { softcap: "softcap", alibi_slopes: "ALiBi", sinks: "sinks", dropout: "dropout" },
  Shapes: { gqa: "GQA and MQA", thd: "packed sequences", value_dim: "value dim ≠ head dim",
    wide_head_dim: "head dim over 256", large_head_dim: "head dim over 576", paged: "pages" },
  Answers: { lse: "lse", key_weights: "key weights", backward: "gradients", dattn_mask: "dattn_mask", dsinks: "dsinks",
    dlse: "gradients through lse" },
};

const LIMITS = {
  body_bytes: "Body of a request", json_bytes: "Body in JSON", head_bytes: "Head of a safetensors body",
  sequences: "Sequences of a request", head_dim: "Head dimension",
  queue_requests: "Requests at a time", queue_bytes: "Tensors at a time", queue_flops: "Work at a time",
  queue_seconds: "Predicted time of this work", batch_bytes: "Tensors of a launch", batch_flops: "Work of a launch",
  default_timeout_ms: "Default deadline of a request", max_timeout_ms: "Longest deadline",
};

export function capabilities(table, { backends, options: able }) {
  const head = document.createElement("tr");
  for (const textContent of ["Features", ...backends]) {
    head.append(Object.assign(document.createElement("th"), { scope: "col", textContent }));
  }
  table.tHead.replaceChildren(head);
  const every = new Set(backends.flatMap((backend) => able[backend]));
  const rows = Object.entries(grouped(every)).map(([name, features]) => row(name, features, backends, able));
  table.tBodies[0].replaceChildren();
  fill(table, rows);
}

function grouped(every) {
  const rest = new Set(every);
  const groups = {};
  for (const [name, words] of Object.entries(GROUPS)) {
    const found = Object.entries(words).filter(([feature]) => rest.delete(feature));
    if (found.length) groups[name] = Object.fromEntries(found);
  }
  if (rest.size) groups.Other = Object.fromEntries([...rest].sort().map((name) => [name, name.replaceAll("_", " ")]));
  return groups;
}

function row(name, features, backends, able) {
  const line = tableRow(name, backends.map((backend) => cell(features, new Set(able[backend]))));
  const all = Object.assign(document.createElement("small"), { textContent: Object.values(features).join(", ") });
  line.cells[0].append(all);
  return line;
}

// Return "all", "all except …" if few are missing, or "only …".
function cell(features, able) {
  const has = Object.entries(features).filter(([feature]) => able.has(feature)).map(([, said]) => said);
  const lacks = Object.entries(features).filter(([feature]) => !able.has(feature)).map(([, said]) => said);
  if (!lacks.length) return ["all", "good"];
  if (!has.length) return ["none", "no"];
  return [lacks.length <= has.length ? `all except ${lacks.join(", ")}` : `only ${has.join(", ")}`, ""];
}

// Name → text with the unit of the name's suffix.
export function limits(found) {
  const said = ([name, value]) => [LIMITS[name] ?? name.replaceAll("_", " "), sized(name, value)];
  return Object.fromEntries(Object.entries(found).map(said));
}

function sized(name, value) {
  if (name.endsWith("_bytes")) return bytes(value);
  if (name.endsWith("_flops")) return `${si(value)}FLOP`;
  if (name.endsWith("_seconds")) return duration(value);
  if (name.endsWith("_ms")) return value ? duration(value / 1000) : "none";
  return number(value);
}

// Return how many tokens a call may have: its q, k and v fit a body, and with o the memory.
export function longest(memory, body) {
  const [heads, dim] = [8, 64];
  const tokens = (itemsize) => Math.min(body / 3, memory / 4) / (heads * dim * itemsize);
  const [full, half] = [4, 2].map((itemsize) => `${number(Math.floor(tokens(itemsize) / 1024))}k`);
  return `${full} tokens in float32, ${half} in 16 bits (${heads} heads of ${dim}; k is 1024)`;
}
