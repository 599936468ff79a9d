// The errors of each tensor by decade: the number of elements in each, and the bound.

import { draw, erase, fontOf } from "./chart.js";
import { number, si } from "./text.js";

const INFINITE = 309; // the decade of an infinite error; an error of 0 has null

// Draw one chart per tensor in `element`, all with the same axes.
export function decades(element, tensors) {
  const all = tensors.flatMap(({ histogram }) => histogram.map(({ exponent }) => exponent));
  const bounds = tensors.map(({ bound }) => Math.floor(Math.log10(bound))).filter(Number.isFinite);
  const finite = [...all.filter((exponent) => exponent !== null && exponent !== INFINITE), ...bounds];
  const [low, high] = [Math.min(...finite), Math.max(...finite)];
  const axis = Array.from({ length: high - low + 1 }, (_, i) => low + i);
  if (all.includes(null)) axis.unshift(null);
  if (all.includes(INFINITE)) axis.push(INFINITE);
  for (const old of element.children) erase(old.querySelector(".plot"));
  element.replaceChildren();
  for (const tensor of tensors) {
    const figure = document.createElement("figure");
    const plot = Object.assign(document.createElement("div"), { className: "plot" });
    figure.append(Object.assign(document.createElement("figcaption"), { textContent: tensor.name }), plot);
    element.append(figure);
    draw(plot, chart(tensor, axis));
  }
}

function chart({ name, histogram, bound }, axis) {
  const counts = new Map(histogram.map(({ exponent, count }) => [exponent, count]));
  const words = new Map([[null, "0"], [INFINITE, "∞"]]);
  const names = axis.map((exponent) => words.get(exponent) ?? `1e${exponent}`.replace("-", "−"));
  const decade = Math.log10(bound);
  // A bar is from one power to the next. A bound of 0 is at the end of the exact elements.
  const at = bound === 0 ? axis.indexOf(null) + 0.5 : axis.indexOf(Math.floor(decade)) - 0.5 + decade - Math.floor(decade);
  return {
    title: `Errors of ${name}`, heading: false, height: 170, data: axis.map((_, i) => i),
    x: { label: "absolute error", kind: "names", names },
    y: { label: "elements", kind: "log10", format: (count) => si(count).replace(" ", ""), range: (_, low, high) => [0.6, high * 30] }, // room for the bound's name
    notes: names.map((decade_) => ` from ${decade_}`),
    series: [{ name: "elements", colour: "accent", marks: "bars", values: axis.map((exponent) => counts.get(exponent) ?? null) }],
    marked(plot, context, colour) {
      if (!Number.isFinite(at)) return;
      const x = plot.valToPos(at, "x", true);
      context.save();
      Object.assign(context, { strokeStyle: colour("bad"), lineWidth: 2 * devicePixelRatio, font: fontOf(devicePixelRatio) });
      context.beginPath();
      context.moveTo(x, plot.bbox.top);
      context.lineTo(x, plot.bbox.top + plot.bbox.height);
      context.stroke();
      const [text, gap] = [`bound ${number(bound)}`, 5 * devicePixelRatio];
      const fits = x - gap - context.measureText(text).width > plot.bbox.left;
      Object.assign(context, { fillStyle: colour("bad"), textAlign: fits ? "right" : "left", textBaseline: "top" });
      context.fillText(text, x + (fits ? -gap : gap), plot.bbox.top + 4 * devicePixelRatio);
      context.restore();
    },
  };
}
