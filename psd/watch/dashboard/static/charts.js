// Line charts: SVG, drawn anew with each look. Colours come from the style sheet, so that they follow light and dark.

import { h, s, setText } from "./dom.js";
import { clockTime, number, whole } from "./words.js";

const RIGHT = 8, TOP = 8, BOTTOM = 20, HEIGHT = 168;
const SERIES_MAX = 8;

export const colour = (index) => `var(--s${index % 8})`;

// Round numbers between two ends, some four of them.
export function ticks(low, high, count = 4) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

function timeTicks(low, high, count) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
  const step = steps.find((each) => (high - low) / each <= count) ?? 86400 * Math.ceil((high - low) / 86400 / count);
  const shift = new Date(high * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let at = Math.ceil((low - shift) / step) * step + shift; at <= high; at += step) found.push(at);
  return found;
}

// No more points than there are pixels: the mean of those that would fall on one.
function thinned(points, low, high, width) {
  if (points.length <= width) return points;
  const bins = new Map();
  for (const [x, y] of points) {
    const bin = Math.floor(((x - low) / (high - low || 1)) * width);
    const found = bins.get(bin);
    if (y === null) { if (!found) bins.set(bin, [x, null, 0]); }
    else if (!found || found[1] === null) bins.set(bin, [x, y, 1]);
    else { found[1] += y; found[2] += 1; found[0] = x; }
  }
  return [...bins.values()].map(([x, y, count]) => [x, y === null ? null : y / count]);
}

// Many lines become their mean and the band between the lowest and the highest.
function together(series) {
  const at = new Map();
  for (const { points } of series) for (const [x, y] of points) {
    if (y === null) continue;
    const found = at.get(x);
    if (!found) at.set(x, [y, y, y, 1]);
    else { found[0] = Math.min(found[0], y); found[1] += y; found[2] = Math.max(found[2], y); found[3] += 1; }
  }
  const rows = [...at].sort((a, b) => a[0] - b[0]);
  return {
    mean: { name: `mean of ${series.length}`, points: rows.map(([x, [, sum, , count]]) => [x, sum / count]) },
    band: rows.map(([x, [low, , high]]) => [x, low, high]),
  };
}

export class LineChart {
  // title: what is drawn. format: of values, tick: of those on the axis. isTime: along the day, else along steps. isFromZero: the
  // axis begins at 0. base: round numbers are round in units of its powers.
  constructor(title, { format = number, tick = format, isTime = true, isFromZero = true, base = 1 } = {}) {
    Object.assign(this, { title, format, tick, isTime, isFromZero, base });
    this.left = 44;
    this.output = h("output");
    this.plot = s("svg", { class: "plot", role: "img", tabindex: "0" });
    this.key = h("div", { class: "key" });
    this.element = h("figure", { class: "card chart" }, h("figcaption", {}, h("span", {}, title), this.output), this.plot, this.key);
    this.cursor = null;
    this.data = null;
    this.plot.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.plot.addEventListener("pointerleave", () => this.point(null));
    this.plot.addEventListener("blur", () => this.point(null));
    this.plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -8, ArrowRight: 8 }[event.key];
      if (event.key === "Escape") this.point(null);
      if (!step) return;
      event.preventDefault();
      this.point(Math.max(this.left, Math.min(this.width - RIGHT, (this.cursor ?? this.width - RIGHT) + step)));
    });
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  // series: [{name, points: [[x, y]], colour?}]; marks: [{x, name}]; from, to: ends of the axis, or null.
  update({ series, marks = [], from = null, to = null }) {
    this.data = { series, marks, from, to };
    this.draw();
  }

  point(x) {
    this.cursor = x === null ? null : x;
    this.drawCursor();
  }

  draw() {
    this.width = this.plot.clientWidth;
    if (!this.data || !this.width) return;
    const { marks } = this.data;
    let series = this.data.series.map((each) => ({ ...each, points: this.inRange(each.points) })).filter((each) => each.points.length);
    let band = [];
    if (series.length > SERIES_MAX) {
      const found = together(series);
      series = [found.mean];
      band = found.band;
    }
    const xs = series.flatMap(({ points }) => [points[0][0], points[points.length - 1][0]]);
    const low = this.data.from ?? Math.min(...xs), high = this.data.to ?? Math.max(...xs);
    const drawn = series.map((each) => ({ ...each, points: thinned(each.points, low, high, this.width - this.left - RIGHT) }));
    const ys = [...drawn.flatMap(({ points }) => points.map((point) => point[1]).filter((y) => y !== null)), ...band.flatMap((b) => [b[1], b[2]])];
    this.drawn = drawn;
    if (!ys.length) {
      this.plot.replaceChildren(s("text", { x: 8, y: HEIGHT / 2 }, "nothing yet"));
      this.plot.setAttribute("aria-label", `${this.title}: nothing yet`);
      this.scales = null;
      setText(this.output, "");
      return;
    }
    let bottom = ys.reduce((a, b) => Math.min(a, b)), top = ys.reduce((a, b) => Math.max(a, b));
    if (this.isFromZero) bottom = Math.min(0, bottom);
    if (top === bottom) { top += Math.abs(top) * 0.1 || 1; if (!this.isFromZero) bottom -= Math.abs(bottom) * 0.1 || 1; }
    const room = (top - bottom) * 0.06;
    top += room;
    if (!this.isFromZero) bottom -= room;
    const unit = this.base > 1 ? this.base ** Math.max(0, Math.floor(Math.log(Math.max(1, top)) / Math.log(this.base))) : 1;
    const levels = ticks(bottom / unit, top / unit).map((value) => value * unit);
    this.left = Math.max(36, 16 + 6.3 * Math.max(...levels.map((value) => this.tick(value).length)));
    const LEFT = this.left;
    const x = (value) => LEFT + ((value - low) / (high - low || 1)) * (this.width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - ((value - bottom) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
    this.scales = { x, y, low, high };
    this.plot.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const parts = [];
    for (const value of levels) {
      parts.push(s("line", { class: "grid-line", x1: LEFT, x2: this.width - RIGHT, y1: y(value), y2: y(value) }));
      parts.push(s("text", { x: LEFT - 7, y: y(value) + 4, "text-anchor": "end" }, this.tick(value)));
    }
    const count = Math.max(2, Math.floor((this.width - LEFT) / 90));
    for (const value of this.isTime ? timeTicks(low, high, count) : ticks(low, high, count)) {
      const text = this.isTime ? clockTime(value).slice(0, high - low > 1200 ? 5 : 8) : whole(Math.round(value));
      const anchor = x(value) > this.width - 30 ? "end" : x(value) < LEFT + 20 ? "start" : "middle";
      parts.push(s("text", { x: x(value), y: HEIGHT - 5, "text-anchor": anchor }, text));
    }
    parts.push(s("line", { class: "axis", x1: LEFT, x2: this.width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
    for (const mark of marks) {
      if (mark.x < low || mark.x > high) continue;
      const at = x(mark.x);
      parts.push(s("g", {}, s("title", {}, mark.name), s("line", { class: "mark", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }),
        s("path", { class: "mark-head", d: `M${at} ${TOP - 5}l4 5-4 5-4-5z` })));
    }
    if (band.length) {
      const up = band.map(([bx, blow]) => `${x(bx).toFixed(1)} ${y(blow).toFixed(1)}`);
      const down = band.map(([bx, , bhigh]) => `${x(bx).toFixed(1)} ${y(bhigh).toFixed(1)}`).reverse();
      parts.push(s("path", { class: "band", style: null, fill: colour(0), d: `M${[...up, ...down].join("L")}Z` }));
      parts.at(-1).style.fill = colour(0);
    }
    drawn.forEach((each, index) => {
      const line = s("path", { d: pathOf(each.points, x, y) });
      line.style.stroke = each.colour ?? colour(index);
      parts.push(line);
    });
    this.cross = s("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.plot.replaceChildren(...parts, this.cross);
    this.describe(ys);
    this.drawKey(drawn, band.length > 0);
    this.drawCursor();
  }

  inRange(points) {
    const { from, to } = this.data;
    return from === null ? points : points.filter((point) => point[0] >= from && (to === null || point[0] <= to));
  }

  describe(ys) {
    const last = this.drawn.map((each) => `${each.name} ${this.format(lastOf(each.points))}`).slice(0, SERIES_MAX);
    const range = `lowest ${this.format(ys.reduce((a, b) => Math.min(a, b)))}, highest ${this.format(ys.reduce((a, b) => Math.max(a, b)))}`;
    this.plot.setAttribute("aria-label", `${this.title}. Now ${last.join(", ")}; ${range}. Arrow keys move along it.`);
  }

  drawKey(series, hasBand) {
    const names = series.length > 1 || hasBand ? series : [];
    this.key.replaceChildren(...names.map((each, index) => {
      const line = h("i");
      line.style.background = each.colour ?? colour(index);
      return h("span", {}, line, each.name + (hasBand ? ", and from the lowest to the highest" : ""));
    }));
  }

  drawCursor() {
    if (!this.scales || !this.drawn?.length) return;
    const { low, high } = this.scales;
    if (this.cursor === null) {
      this.cross.setAttribute("visibility", "hidden");
      setText(this.output, this.drawn.slice(0, 2).map((each) => this.format(lastOf(each.points))).join(" · "));
      return;
    }
    const at = low + ((this.cursor - this.left) / (this.width - this.left - RIGHT)) * (high - low);
    const nearest = this.drawn.map((each) => each.points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a)));
    const where = nearest[0][0];
    this.cross.setAttribute("x1", this.scales.x(where));
    this.cross.setAttribute("x2", this.scales.x(where));
    this.cross.setAttribute("visibility", "visible");
    const values = nearest.slice(0, 3).map((point, index) => (this.drawn.length > 1 ? `${this.drawn[index].name} ` : "") + this.format(point[1]));
    setText(this.output, `${values.join(", ")} at ${this.isTime ? clockTime(where) : `step ${whole(where)}`}`);
  }
}

function lastOf(points) {
  for (let index = points.length - 1; index >= 0; index -= 1) if (points[index][1] !== null) return points[index][1];
  return null;
}

function pathOf(points, x, y) {
  let path = "", isDown = false;
  for (const [px, py] of points) {
    if (py === null) { isDown = false; continue; }
    path += `${isDown ? "L" : "M"}${x(px).toFixed(1)} ${y(py).toFixed(1)}`;
    isDown = true;
  }
  return path;
}

// A line without axes.
export function spark(values) {
  const shown = values.slice(-120);
  const top = Math.max(...shown, 1e-9);
  const d = shown.map((value, index) => `${index ? "L" : "M"}${((index / Math.max(1, shown.length - 1)) * 200).toFixed(1)} ${(29 - ((value ?? 0) / top) * 27).toFixed(1)}`).join("");
  return s("svg", { class: "spark", viewBox: "0 0 200 30", preserveAspectRatio: "none", "aria-hidden": "true" }, s("path", { d }));
}
