// A heat map: a row for each worker, time from left to right, the darker the longer others waited for it. On a canvas, because
// a hundred workers over ten minutes are more cells than a page should have elements.

import { h, setText } from "./dom.js";
import { clockTime, share } from "./words.js";

const LEFT = 36, RIGHT = 8, FOOT = 18;

export class HeatMap {
  constructor(title) {
    this.title = title;
    this.output = h("output");
    this.canvas = h("canvas", { class: "heat", role: "img", tabindex: "0" });
    const scale = h("i", { class: "scale" });
    scale.style.background = "linear-gradient(to right, var(--grid), var(--s1))";
    this.element = h("figure", { class: "card chart" },
      h("figcaption", {}, h("span", {}, title), this.output), this.canvas,
      h("div", { class: "key" }, h("span", {}, "never ", scale, " half of the time or more")));
    this.cursor = null;
    this.canvas.addEventListener("pointermove", (event) => this.pointAt(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointerleave", () => this.move(null));
    this.canvas.addEventListener("blur", () => this.move(null));
    this.canvas.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (event.key === "Escape") this.move(null);
      if (!by || !this.cells) return;
      event.preventDefault();
      const [column, row] = this.cursor ?? [this.columns - 1, -by[1]];
      this.move([Math.max(0, Math.min(this.columns - 1, column + by[0])), Math.max(0, Math.min(this.ranks.length - 1, row + by[1]))]);
    });
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  // times: of the looks. rows: for each look the shares of all workers.
  update({ ranks, times, rows, from, to }) {
    this.data = { ranks, times, rows, from, to };
    this.draw();
  }

  pointAt(x, y) {
    if (!this.cells) return;
    const column = Math.floor(((x - LEFT) / (this.width - LEFT - RIGHT)) * this.columns), row = Math.floor(y / this.rowHeight);
    const isInside = column >= 0 && column < this.columns && row >= 0 && row < this.ranks.length;
    this.move(isInside ? [column, row] : null);
  }

  move(cursor) {
    this.cursor = cursor;
    this.draw();
  }

  draw() {
    this.width = this.canvas.clientWidth;
    if (!this.data || !this.width || !this.data.ranks.length || !this.data.times.length) return;
    const { ranks, times, rows } = this.data;
    this.ranks = ranks;
    this.rowHeight = Math.max(3, Math.min(34, Math.floor(150 / ranks.length)));
    const height = this.rowHeight * ranks.length + FOOT;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const style = getComputedStyle(this.canvas);
    const [cold, hot, faint, ink] = ["--grid", "--s1", "--faint", "--ink"].map((name) => style.getPropertyValue(name).trim());
    const low = this.data.from ?? times[0], high = Math.max(this.data.to ?? times[times.length - 1], low + 1);
    const room = this.width - LEFT - RIGHT;
    this.columns = Math.max(1, Math.min(160, Math.floor(room / 4), Math.max(1, times.filter((at) => at >= low).length)));
    this.cells = ranks.map(() => new Array(this.columns).fill(null));
    this.at = (column) => low + ((column + 0.5) / this.columns) * (high - low);
    times.forEach((at, index) => {
      if (at < low) return;
      const column = Math.min(this.columns - 1, Math.floor(((at - low) / (high - low)) * this.columns));
      rows[index].forEach((value, row) => {
        if (row < ranks.length && value !== null) this.cells[row][column] = Math.max(this.cells[row][column] ?? 0, value);
      });
    });
    for (const row of this.cells) row.forEach((value, column) => {
      if (value === null && column) row[column] = row[column - 1] ?? null;  // a look came a little later than its column
    });
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.clearRect(0, 0, this.width, height);
    const cell = room / this.columns;
    this.cells.forEach((values, row) => values.forEach((value, column) => {
      if (value === null) return;
      const [x, y, w, tall] = [LEFT + column * cell, row * this.rowHeight, cell + 0.4, this.rowHeight - (this.rowHeight > 5 ? 1 : 0)];
      context.globalAlpha = 1;
      context.fillStyle = cold;
      context.fillRect(x, y, w, tall);
      context.globalAlpha = Math.min(1, value * 2);
      context.fillStyle = hot;
      context.fillRect(x, y, w, tall);
    }));
    context.globalAlpha = 1;
    context.fillStyle = faint;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    const every = Math.ceil(14 / this.rowHeight);
    ranks.forEach((rank, row) => { if (row % every === 0) context.fillText(`${rank}`, LEFT - 7, row * this.rowHeight + Math.min(this.rowHeight, 14) * 0.5 + 4); });
    context.textAlign = "left";
    context.fillText(clockTime(low), LEFT, height - 5);
    context.textAlign = "right";
    context.fillText(clockTime(high), this.width - RIGHT, height - 5);
    if (this.cursor && this.cursor[0] < this.columns && this.cursor[1] < ranks.length) {
      context.strokeStyle = ink;
      context.strokeRect(LEFT + this.cursor[0] * cell, this.cursor[1] * this.rowHeight + 0.5, cell, this.rowHeight - 1);
    }
    this.describe();
  }

  describe() {
    const now = this.data.rows[this.data.rows.length - 1];
    const worst = now.reduce((best, value, row) => ((value ?? 0) > (now[best] ?? 0) ? row : best), 0);
    const longest = now.length && now[worst] > 0.005 ? `longest for worker ${this.ranks[worst]}, ${share(now[worst])}` : "for nobody";
    this.canvas.setAttribute("aria-label", `${this.title}. Now ${longest}. Arrow keys move over it.`);
    if (!this.cursor || this.cursor[0] >= this.columns) { setText(this.output, longest); return; }
    const [column, row] = this.cursor;
    const value = this.cells[row][column];
    setText(this.output, `worker ${this.ranks[row]}: ${value === null ? "not known" : share(value)} at ${clockTime(this.at(column))}`);
  }
}
