// A heat map on a canvas, with named axes. The user chooses a cell by pointer, by touch or with the arrow keys.

const LEFT = 44; // room for the numbers of the rows
const BELOW = 38; // room for the numbers of the columns
const LEFT_OF_TEXTS = 76; // room for words instead
const BELOW_TEXTS = 80;
const TALLEST = 440; // CSS pixels of the cells
const WIDEST_CELL = 34;

const maps = new Set();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => maps.forEach((map) => map.draw()));

export class HeatMap {
  // `names` are the names of rows and columns. `chosen(row, column)` is called for the current cell; `pressed`, if it is
  // given, for the cell on which the user clicks, or presses Space or Enter.
  constructor(canvas, names, chosen, pressed) {
    Object.assign(this, { canvas, names, chosen, pressed, cell: null, picture: null });
    maps.add(this);
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.choose(this.at(event)));
    canvas.addEventListener("pointerdown", (event) => this.choose(this.at(event)));
    canvas.addEventListener("click", (event) => this.at(event) && this.pressed?.(...this.at(event)));
    canvas.addEventListener("keydown", (event) => this.typed(event));
  }

  // `picture`: rows, columns, value(i, j), hidden(i, j) and low, high: the values at the ends of the colours; 0 is in
  // the middle where low is negative. `extra`: {name, value(i)}, one more column, set apart. `rowTexts` and `columnTexts`
  // are words instead of numbers.
  show(picture) {
    this.picture = picture;
    if (this.cell && !(this.cell[0] < picture.rows && this.cell[1] < this.columns)) this.cell = null;
    this.draw();
  }

  get columns() {
    return this.picture.columns + (this.picture.extra ? 1 : 0);
  }

  choose(cell) {
    if (!cell || (this.cell && cell[0] === this.cell[0] && cell[1] === this.cell[1])) return;
    this.cell = cell;
    this.draw();
    this.chosen(...cell);
  }

  typed(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!this.picture || !(step || [" ", "Enter"].includes(event.key))) return;
    event.preventDefault(); // the page must not scroll
    const [i, j] = this.cell ?? [0, 0];
    if (!step) this.pressed?.(i, j);
    else this.choose([clamp(i + step[0], this.picture.rows), clamp(j + step[1], this.columns)]);
  }

  at({ offsetX, offsetY }) {
    if (!this.picture) return null;
    const [i, j] = [Math.floor(offsetY / this.size), this.columnAt(offsetX - this.left)];
    return i >= 0 && i < this.picture.rows && j >= 0 && j < this.columns ? [i, j] : null;
  }

  // Columns are adjacent, except the extra one, which is half a cell apart.
  columnAt(x) {
    const { columns } = this.picture;
    if (x < columns * this.size) return Math.floor(x / this.size);
    return x >= (columns + 0.5) * this.size ? Math.floor(x / this.size - 0.5) : -1;
  }

  xOf(column) {
    return this.left + (column + (column >= this.picture.columns ? 0.5 : 0)) * this.size;
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    if (!this.picture || !width) return; // hidden: it is drawn when it becomes visible
    const { rows, extra, rowTexts, columnTexts } = this.picture;
    const across = this.columns + (extra ? 0.5 : 0);
    this.left = rowTexts ? LEFT_OF_TEXTS : LEFT;
    this.size = Math.max(3, Math.min((width - this.left - 2) / across, TALLEST / rows, WIDEST_CELL));
    const [w, h] = [this.left + across * this.size + 2, rows * this.size + (columnTexts ? BELOW_TEXTS : BELOW)];
    const dense = devicePixelRatio || 1;
    Object.assign(this.canvas, { width: Math.ceil(w * dense), height: Math.ceil(h * dense) });
    Object.assign(this.canvas.style, { width: `${w}px`, height: `${h}px` });
    const context = this.canvas.getContext("2d");
    context.scale(dense, dense);
    const colours = palette();
    this.drawCells(context, colours);
    this.drawAxes(context, colours);
    if (this.cell) this.drawCell(context, colours);
  }

  drawCells(context, colours) {
    const { rows, value, hidden, low, high, extra } = this.picture;
    const gap = this.size > 8 ? 1 : 0;
    for (let i = 0; i < rows; i += 1) {
      for (let j = 0; j < this.columns; j += 1) {
        const [x, y] = [this.xOf(j), i * this.size];
        const own = j < this.picture.columns;
        if (own && hidden(i, j)) cross(context, x, y, this.size, colours);
        else {
          context.fillStyle = shade(own ? value(i, j) : extra.value(i), low, high, colours);
          context.fillRect(x, y, this.size - gap, this.size - gap);
        }
      }
    }
  }

  drawAxes(context, colours) {
    const { rows, columns, extra, rowTexts, columnTexts } = this.picture;
    context.fillStyle = colours.soft;
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const bottom = rows * this.size;
    context.textAlign = "center";
    const half = this.size / 2;
    for (const j of ticks(columns, this.size, columnTexts ? 13 : 22)) {
      if (columnTexts) upwards(context, columnTexts[j], this.xOf(j) + half + 4, bottom + 6);
      else context.fillText(j, this.xOf(j) + half, bottom + 14);
    }
    if (extra) context.fillText(extra.name, Math.min(this.xOf(columns) + half, this.xOf(columns) + this.size - 8), bottom + 14);
    const below = columnTexts ? BELOW_TEXTS - 7 : 31;
    context.fillText(this.names[1], this.left + (columns * this.size) / 2, bottom + below);
    context.textAlign = "right";
    for (const i of ticks(rows, this.size, 13)) context.fillText(rowTexts?.[i] ?? i, this.left - 5, i * this.size + half + 4);
    context.translate(10, bottom / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillText(this.names[0], 0, 0);
    context.rotate(Math.PI / 2);
    context.translate(-10, -bottom / 2);
  }

  drawCell(context, colours) {
    const [i, j] = this.cell;
    context.strokeStyle = colours.text;
    context.lineWidth = 2;
    context.strokeRect(this.xOf(j) - 0.5, i * this.size - 0.5 + 1, this.size, this.size - 1);
  }
}

// Write a text that ends at a point, from below.
function upwards(context, text, x, y) {
  context.save();
  context.translate(x, y);
  context.rotate(-Math.PI / 2);
  context.textAlign = "right";
  context.fillText(text, 0, 0);
  context.restore();
}

function clamp(x, count) {
  return Math.max(0, Math.min(count - 1, x));
}

// Return numbers from 0 in equal steps, so that each text has `room` pixels.
function ticks(count, size, room) {
  const step = [1, 2, 4, 8, 16, 32].find((one) => one * size >= room) ?? 64;
  return Array.from({ length: Math.ceil(count / step) }, (_, i) => i * step);
}

function cross(context, x, y, size, colours) {
  context.strokeStyle = colours.line;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x + size * 0.3, y + size * 0.7);
  context.lineTo(x + size * 0.7, y + size * 0.3);
  context.stroke();
}

// The colours come from the style sheet, which has light and dark ones.
function palette() {
  const style = getComputedStyle(document.documentElement);
  const named = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    text: named("text"), soft: named("soft"), line: named("edge"), // also the colour of NaN
    up: ["heat-0", "heat-1", "heat-2"].map((name) => rgb(named(name))),
    down: ["heat-0", "cold-1", "cold-2"].map((name) => rgb(named(name))),
  };
}

// Return the colour of a value between `low` and `high`: from pale to strong, with another hue below 0.
function shade(value, low, high, { up, down, line }) {
  if (Number.isNaN(value)) return line;
  const most = Math.max(high, -low) || 1;
  const stops = value < 0 ? down : up;
  const at = Math.min(Math.abs(value) / most, 1) * (stops.length - 1);
  const below = Math.min(Math.floor(at), stops.length - 2);
  const mixed = stops[below].map((from, c) => Math.round(from + (stops[below + 1][c] - from) * (at - below)));
  return `rgb(${mixed.join(" ")})`;
}

function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}
