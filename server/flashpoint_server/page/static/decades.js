// The errors of each tensor by decade, small: a bar a decade, as high as the logarithm of its count, and the bound.

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [120, 36];
const INFINITE = 309; // the decade of an infinite error; that of none is null

// A figure for each tensor, on one axis, and the words that say which.
export function decades(tensors) {
  const all = tensors.flatMap(({ histogram }) => histogram.map(({ exponent }) => exponent));
  const bounds = tensors.map(({ bound }) => Math.floor(Math.log10(bound))).filter(Number.isFinite);
  const finite = [...all.filter((exponent) => exponent !== null && exponent !== INFINITE), ...bounds];
  const [low, high] = [Math.min(...finite), Math.max(...finite)];
  const axis = Array.from({ length: high - low + 1 }, (_, i) => low + i);
  if (all.includes(null)) axis.unshift(null);
  if (all.includes(INFINITE)) axis.push(INFINITE);
  const ends = [all.includes(null) && "first: no error", all.includes(INFINITE) && "last: infinite"].filter(Boolean);
  return {
    figures: tensors.map((tensor) => figure(tensor, axis)),
    words: ["Errors by decade, counted in logarithms", `1e${low} to 1e${high + 1}`, ...ends, "line: the bound"]
      .join("; ").replaceAll("e-", "e−"),
  };
}

function figure({ name, histogram, bound }, axis) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true"); // its figures are in the table
  const step = WIDTH / axis.length;
  const most = Math.max(...histogram.map(({ count }) => Math.log1p(count)));
  for (const { exponent, count } of histogram) {
    const height = (Math.log1p(count) / most) * HEIGHT;
    const place = { x: axis.indexOf(exponent) * step, y: HEIGHT - height, width: step * 0.85, height };
    svg.append(shape("rect", place));
  }
  const decade = Math.log10(bound);
  if (Number.isFinite(decade)) {
    const x = (axis.indexOf(Math.floor(decade)) + decade - Math.floor(decade)) * step;
    svg.append(shape("line", { x1: x, x2: x, y1: 0, y2: HEIGHT }));
  }
  const element = document.createElement("figure");
  element.append(svg, Object.assign(document.createElement("figcaption"), { textContent: name }));
  return element;
}

function shape(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
