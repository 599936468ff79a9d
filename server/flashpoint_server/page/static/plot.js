// The picture of a benchmark, fetched rather than linked: it may need a key.

import { call } from "./api.js";

const EVERY_MS = 5000; // while rows come: the server draws on a core that the benchmark, on a CPU, would have as well

const figure = document.querySelector("#benchmark figure");
const image = figure.querySelector("img");
const caption = figure.querySelector("figcaption");
const choice = document.querySelector("#benchmark .result .tabs");

// What is on screen: a picture is drawn again when another is asked for, at the end, and now and then between.
export const plotted = {
  clear() {
    Object.assign(this, { kind: null, at: -Infinity });
    image.hidden = true;
    caption.textContent = "";
  },
};

export async function plot(id, { last = false } = {}) {
  const { value: kind, parentElement } = choice.querySelector("input:checked");
  if (!last && kind === plotted.kind && performance.now() - plotted.at < EVERY_MS) return;
  Object.assign(plotted, { kind, at: performance.now() });
  const name = parentElement.textContent.trim();
  try {
    const picture = await (await call(`benchmark/${id}/plot.svg?kind=${kind}`)).blob();
    if (kind !== plotted.kind) return; // another was chosen meanwhile
    URL.revokeObjectURL(image.src);
    image.src = URL.createObjectURL(picture);
    image.alt = `${name} by backend, as in the table above`;
    [image.hidden, caption.textContent] = [false, ""];
  } catch (problem) {
    [image.hidden, caption.textContent] = [true, `${name}: ${problem.message}`];
  }
}
