// A heat map on a canvas, with named axes. The user chooses a cell by pointer, by touch or with the arrow keys.

import { number } from "./text.js";

const LEFT = 44; // room for the numbers of the rows
const BELOW = 38; // room for the numbers of the columns
const LEFT_OF_TEXTS = 76; // room for words instead
const BELOW_TEXTS = 80;
const TALLEST = 440; // CSS pixels of the cells
const WIDEST_CELL = 34;
const LINE = 13; // CSS pixels of a line of text

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
  // the middle where low is negative. `extra`: {name, value(i)}, one more column, set apart; `below`: {name, value(j), high},
  // one more row, set apart, with colours from 0 to its own `high`. `rowTexts` and `columnTexts` are words instead of
  // numbers; `firstRow` is the number of the first row. `marked`: a cell with a frame of its own.
  show(picture) {
    this.picture = picture;
    if (this.cell && !this.has(...this.cell)) this.cell = null;
    this.draw();
  }

  get columns() {
    return this.picture.columns + (this.picture.extra ? 1 : 0);
  }

  get rows() {
    return this.picture.rows + (this.picture.below ? 1 : 0);
  }

  // Return whether there is such a cell: the additional row and column have none in common.
  has(i, j) {
    return i < this.rows && j < this.columns && !(i === this.picture.rows && j === this.picture.columns);
  }

  choose(cell) {
    if (!cell || !this.has(...cell) || (this.cell && cell[0] === this.cell[0] && cell[1] === this.cell[1])) return;
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
    else this.choose([clamp(i + step[0], this.rows), clamp(j + step[1], this.columns)]);
  }

  at({ offsetX, offsetY }) {
    if (!this.picture) return null;
    const { rows, columns, extra, below } = this.picture;
    const [i, j] = [cellAt(offsetY, rows, this.tall, below), cellAt(offsetX - this.left, columns, this.size, extra)];
    return i >= 0 && j >= 0 && this.has(i, j) ? [i, j] : null;
  }

  xOf(column) {
    return this.left + (column + (column >= this.picture.columns ? 0.5 : 0)) * this.size;
  }

  yOf(row) {
    return (row + (row >= this.picture.rows ? 0.5 : 0)) * this.tall;
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    if (!this.picture || !width) return; // hidden: it is drawn when it becomes visible
    const { extra, below, rowTexts, columnTexts } = this.picture;
    const [across, down] = [this.columns + (extra ? 0.5 : 0), this.rows + (below ? 0.5 : 0)];
    this.left = rowTexts ? LEFT_OF_TEXTS : LEFT;
    this.size = Math.max(3, Math.min((width - this.left - 2) / across, TALLEST / down, WIDEST_CELL));
    this.tall = rowTexts ? Math.max(this.size, LINE) : this.size; // each row has its word
    this.bottom = down * this.tall;
    const [w, h] = [this.left + across * this.size + 2, this.bottom + (columnTexts ? BELOW_TEXTS : BELOW)];
    const dense = devicePixelRatio || 1;
    Object.assign(this.canvas, { width: Math.ceil(w * dense), height: Math.ceil(h * dense) });
    Object.assign(this.canvas.style, { width: `${w}px`, height: `${h}px` });
    const context = this.canvas.getContext("2d");
    context.scale(dense, dense);
    const colours = palette();
    this.drawCells(context, colours);
    this.drawAxes(context, colours);
    if (this.picture.marked) this.drawFrame(context, colours.accent, ...this.picture.marked);
    if (this.cell) this.drawFrame(context, colours.text, ...this.cell);
  }

  drawCells(context, colours) {
    const { rows, columns, value, hidden, low, high, extra, below } = this.picture;
    const gap = this.size > 8 ? 1 : 0;
    for (let i = 0; i < this.rows; i += 1) {
      for (let j = 0; j < this.columns; j += 1) {
        if (!this.has(i, j)) continue;
        const [x, y] = [this.xOf(j), this.yOf(i)];
        if (i < rows && j < columns && hidden(i, j)) cross(context, x, y, this.size, colours);
        else {
          const colour = i < rows ? shade(j < columns ? value(i, j) : extra.value(i), low, high, colours)
            : shade(below.value(j), 0, below.high, colours);
          context.fillStyle = colour;
          context.fillRect(x, y, this.size - gap, this.tall - gap);
        }
      }
    }
  }

  drawAxes(context, colours) {
    const { rows, columns, extra, below, rowTexts, columnTexts, firstRow = 0 } = this.picture;
    context.fillStyle = colours.soft;
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const { bottom } = this;
    context.textAlign = "center";
    const half = this.size / 2;
    for (const j of ticks(columns, this.size, columnTexts ? 13 : 22)) {
      if (columnTexts) upwards(context, columnTexts[j], this.xOf(j) + half + 4, bottom + 6);
      else context.fillText(j, this.xOf(j) + half, bottom + 14);
    }
    if (extra) context.fillText(extra.name, Math.min(this.xOf(columns) + half, this.xOf(columns) + this.size - 8), bottom + 14);
    context.fillText(this.names[1], this.left + (columns * this.size) / 2, bottom + (columnTexts ? BELOW_TEXTS - 7 : 31));
    context.textAlign = "right";
    const nameRow = (i, name) => context.fillText(name, this.left - 5, this.yOf(i) + this.tall / 2 + 4);
    for (const i of ticks(rows, this.tall, LINE)) nameRow(i, rowTexts?.[i] ?? firstRow + i);
    if (below) nameRow(rows, below.name);
    if (bottom < context.measureText(this.names[0]).width) return; // no room
    context.translate(10, bottom / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillText(this.names[0], 0, 0);
    context.rotate(Math.PI / 2);
    context.translate(-10, -bottom / 2);
  }

  drawFrame(context, colour, i, j) {
    context.strokeStyle = colour;
    context.lineWidth = 2;
    context.strokeRect(this.xOf(j) - 0.5, this.yOf(i) + 0.5, this.size, this.tall - 1);
  }
}

// Return the cell at a place, or −1. Cells are adjacent, except the one behind them, if there is one: it is half a cell apart.
function cellAt(place, count, size, more) {
  const at = Math.floor(place / size);
  if (at < count) return at;
  return more && Math.floor(place / size - 0.5) === count ? count : -1;
}

// Write the values at the ends of the colours beside the bar of a `.scale`.
export function scaleOf(element, low, high) {
  const [from, to] = element.querySelectorAll("[data-end]");
  [from.textContent, to.textContent] = [number(low), number(high)];
  element.querySelector("i").className = low < 0 ? "both" : "";
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
    text: named("text"), soft: named("soft"), accent: named("accent"), line: named("edge"), // also the colour of NaN
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
