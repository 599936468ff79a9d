// The caller's KV caches, and how full the server's memory for caches is.

import { call } from "./api.js";
import { code, curl, python } from "./code.js";
import { say } from "./form.js";
import { total } from "./metrics.js";
import { bytes, duration, fill, number, select, tableRow } from "./text.js";

const MOST_ROWS = 100;

const panel = document.getElementById("caches");
const [said, body, dialog] = select(panel, ".said", "tbody", "dialog");
let allowed = true;

document.addEventListener("locked", () => {
  allowed = true; // another key may have the permission
});

export const showCode = code("caches", () => ({
  curl: curl("caches"),
  python: python(
    [
      "with client.cache(kv_heads=8, head_dim=64) as cache:",
      "    for _ in range(3):",
      "        q, k, v = numpy.random.standard_normal((3, 1, 8, 1, 64)).astype(\"float32\")",
      "        o = cache.attention(q, k, v)  # writes k and v, then attends over all tokens of the cache",
      "    print(o.shape, cache.length)",
    ],
    { library: ["numpy"] },
  ),
}));

// `sample` of the metrics says what the server holds; without one the caller's own caches are shown alone.
export async function look(sample) {
  if (!allowed) return;
  try {
    const none = sample && !total(sample, "flashpoint_caches");
    const { caches, next } = none ? { caches: [] } : await (await call("caches?limit=1000")).json();
    said.textContent = `Yours: ${next ? "more than " : ""}${number(caches.length)}. ${sample ? ofServer(sample) : ""}`;
    show(caches.sort((a, b) => b.bytes - a.bytes));
    say(panel, "");
  } catch (problem) {
    allowed = ![403, 404].includes(problem.status); // no right to `attention`; a server that holds no caches
    said.textContent = "";
    say(panel, problem.message);
  }
}

function ofServer(sample) {
  const names = ["caches", "saved_forwards", "cache_bytes", "saved_bytes", "cache_limit_bytes"];
  const [caches, saved, ...sizes] = names.map((name) => total(sample, `flashpoint_${name}`));
  const [ofCaches, ofSaved, limit] = sizes;
  if (!limit) return "This server holds no caches.";
  return `On the server: ${number(caches)} and ${number(saved)} saved forwards, with ${bytes(ofCaches + ofSaved)} of ${bytes(limit)}.`;
}

function show(caches) {
  panel.querySelector(".scroll").hidden = !caches.length;
  const focused = document.activeElement?.closest?.("[data-id]")?.dataset.id;
  const rows = caches.slice(0, MOST_ROWS).map(row);
  if (caches.length > MOST_ROWS) rows.push(tableRow(`and ${number(caches.length - MOST_ROWS)} smaller ones`, []));
  body.replaceChildren();
  fill(body.closest("table"), rows);
  if (focused) body.querySelector(`[data-id="${CSS.escape(focused)}"] button`)?.focus();
}

function row(cache) {
  const n = (text) => [text, "n"];
  const sizes = [cache.kv_heads, cache.head_dim].map((value) => n(range([value].flat())));
  const cells = [n(range(cache.lengths)), n(number(cache.layers)), ...sizes, cache.dtype, n(bytes(cache.bytes))];
  const name = `${cache.id.slice(0, 9)}…`; // an id begins with what differs between caches of one shape
  const line = tableRow(name, [...cells, n(duration(cache.expires_in_s)), ""]);
  line.dataset.id = cache.id;
  line.cells[0].title = cache.id;
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Delete" });
  button.className = "quiet small";
  button.setAttribute("aria-label", `Delete the cache ${name}`);
  button.addEventListener("click", () => confirm(cache, name));
  line.cells[line.cells.length - 1].append(button);
  return line;
}

// Ask before a cache is deleted: its keys and values are nowhere else.
function confirm(cache, name) {
  const text = `Delete the cache ${name}? Its ${range(cache.lengths)} tokens (${bytes(cache.bytes)}) are lost.`;
  dialog.querySelector("p").textContent = text;
  dialog.returnValue = "";
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "delete") remove(cache.id);
    else body.querySelector(`[data-id="${CSS.escape(cache.id)}"] button`)?.focus();
  }, { once: true });
  dialog.showModal();
}

async function remove(id) {
  const row = () => body.querySelector(`[data-id="${CSS.escape(id)}"]`); // it is made again every few seconds
  try {
    await call(`caches/${encodeURIComponent(id)}`, { method: "DELETE" });
    row()?.remove();
  } catch (problem) {
    say(panel, problem.message);
  }
}

// "512", or "0–512" where layers differ.
function range(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return low === high ? number(low) : `${number(low)}–${number(high)}`;
}
