// Line charts: SVG, drawn anew with each look. Colours come from the style sheet, so that they follow light and dark.

import { logTicks, thinned, together } from "./curves.js";
import { h, s, setAttribute, setText } from "./dom.js";
import { keepSettings, settings } from "./settings.js";
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

export class LineChart {
  // title: what is drawn. format: of values, tick: of those on the axis. isTime: along the day, else along steps. isFromZero: the
  // axis begins at 0. base: round numbers are round in units of its powers. canLog: has a button for a logarithmic axis.
  constructor(title, { format = number, tick = format, isTime = true, isFromZero = true, base = 1, canLog = false } = {}) {
    Object.assign(this, { title, format, tick, isTime, isFromZero, base });
    this.left = 44;
    this.output = h("output");
    this.plot = s("svg", { class: "plot", role: "img", tabindex: "0" });
    this.key = h("div", { class: "key" });
    this.log = canLog ? h("button", { type: "button", class: "quiet log", title: "logarithmic axis", onclick: () => this.toggleLog() }, "log") : null;
    this.element = h("figure", { class: "card chart" }, h("figcaption", {}, h("span", {}, title), this.log, this.output), this.plot, this.key);
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

  // series: [{name, points: [[x, y]], band: [[x, low, high]]?, colour?, kind?}], kind "raw" or "earlier" for what lies behind and is
  // not spoken of; marks: [{x, name}]; from, to: ends of the axis, or null; isNamed: the key says even of one line what it is.
  update({ series, marks = [], from = null, to = null, isNamed = false }) {
    this.data = { series, marks, from, to, isNamed };
    this.draw();
  }

  toggleLog() {
    if (!settings.logs.delete(this.title)) settings.logs.add(this.title);
    keepSettings();
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
    const columns = Math.max(1, this.width - this.left - RIGHT);
    let series = this.data.series.map((each) => ({ ...each, points: this.inRange(each.points), band: this.inRange(each.band ?? []) })).filter((each) => each.points.length);
    if (series.length > SERIES_MAX && !this.data.isNamed) {
      const { mean, band } = together(series, columns);
      series = [{ name: `mean of ${series.length}`, points: mean, band }];
    }
    const values = (each) => [...each.points.map((point) => point[1]), ...each.band.flatMap((row) => [row[1], row[2]])].filter((y) => y !== null);
    const isLog = settings.logs.has(this.title) && this.log !== null && series.some((each) => values(each).some((y) => y > 0));
    if (this.log) setAttribute(this.log, "aria-pressed", String(settings.logs.has(this.title)));
    if (isLog) series = series.map(positive);
    const xs = series.flatMap(({ points }) => [points[0][0], points[points.length - 1][0]]);
    const low = this.data.from ?? Math.min(...xs), high = this.data.to ?? Math.max(...xs);
    const lost = this.isTime ? [] : series.flatMap((each) => (each.kind ? [] : each.points.filter(([, y]) => y === null).map(([x]) => x)));
    this.drawn = series.map((each) => ({ ...each, points: thinned(each.points, low, high, columns), colour: each.colour ?? colour(series.indexOf(each)) }));
    const ys = this.drawn.flatMap(values);
    if (!ys.length) {
      this.plot.replaceChildren(s("text", { x: 8, y: HEIGHT / 2 }, lost.length ? "no numbers" : "nothing yet"));
      this.plot.setAttribute("aria-label", `${this.title}: ${lost.length ? "no numbers" : "nothing yet"}`);
      this.scales = null;
      setText(this.output, "");
      return;
    }
    const { levels, y } = this.axis(ys.reduce((a, b) => Math.min(a, b)), ys.reduce((a, b) => Math.max(a, b)), isLog);
    this.left = Math.max(36, 16 + 6.3 * Math.max(...levels.map((value) => this.tick(value).length)));
    const LEFT = this.left;
    const x = (value) => LEFT + ((value - low) / (high - low || 1)) * (this.width - LEFT - RIGHT);
    this.scales = { x, y, low, high };
    this.plot.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const parts = [];
    for (const value of levels) {
      parts.push(s("line", { class: "grid-line", x1: LEFT, x2: this.width - RIGHT, y1: y(value), y2: y(value) }));
      parts.push(s("text", { x: LEFT - 7, y: y(value) + 4, "text-anchor": "end" }, this.tick(value)));
    }
    const count = Math.max(2, Math.floor((this.width - LEFT) / 90));
    if (!this.isTime) parts.push(s("text", { x: LEFT - 7, y: HEIGHT - 5, "text-anchor": "end" }, "step"));
    for (const value of this.isTime ? timeTicks(low, high, count) : ticks(low, high, count).filter(Number.isInteger)) {
      const text = this.isTime ? clockTime(value).slice(0, high - low > 1200 ? 5 : 8) : whole(value);
      const half = 3.4 * text.length;
      const anchor = x(value) > this.width - half ? "end" : x(value) < LEFT + half ? "start" : "middle";
      parts.push(s("text", { x: x(value), y: HEIGHT - 5, "text-anchor": anchor }, text));
    }
    parts.push(s("line", { class: "axis", x1: LEFT, x2: this.width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
    for (const mark of marks) {
      if (mark.x < low || mark.x > high) continue;
      const at = x(mark.x);
      parts.push(s("g", {}, s("title", {}, mark.name), s("line", { class: "mark", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }),
        s("path", { class: "mark-head", d: `M${at} ${TOP - 5}l4 5-4 5-4-5z` })));
    }
    for (const each of this.drawn.filter(({ band }) => band.length)) parts.push(filled("band", bandOf(thinnedBand(each.band, low, high, columns), x, y), each.colour));
    const behind = ["earlier", "raw", undefined];
    for (const each of [...this.drawn].sort((a, b) => behind.indexOf(a.kind) - behind.indexOf(b.kind))) {
      const line = s("path", { class: each.kind ?? "line", d: pathOf(each.points, x, y) });
      line.style.stroke = each.colour;
      parts.push(line);
    }
    for (const at of lostColumns(lost, x)) parts.push(s("path", { class: "lost", d: `M${at - 3} ${HEIGHT - BOTTOM - 3}l6 6m-6 0l6-6` }, s("title", {}, isLog ? "no positive number" : "no number")));
    this.cross = s("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.plot.replaceChildren(...parts, this.cross);
    this.told = this.drawn.filter((each) => !each.kind);
    if (!this.told.length) this.told = this.drawn.filter((each) => each.kind === "earlier");
    this.describe(ys, isLog);
    this.drawKey();
    this.drawCursor();
  }

  // The vertical axis between these ends: round numbers, and the place of a value.
  axis(lowest, highest, isLog) {
    const place = (share) => HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
    if (isLog) {
      const room = Math.max((Math.log10(highest) - Math.log10(lowest)) * 0.06, 0.02);
      const bottom = Math.log10(lowest) - room, top = Math.log10(highest) + room;
      const found = logTicks(10 ** bottom, 10 ** top);
      const levels = found.length > 1 ? found : ticks(10 ** bottom, 10 ** top).filter((value) => value > 0);
      return { levels, y: (value) => place((Math.log10(value) - bottom) / (top - bottom)) };
    }
    let bottom = this.isFromZero ? Math.min(0, lowest) : lowest, top = highest;
    if (top === bottom) { top += Math.abs(top) * 0.1 || 1; if (!this.isFromZero) bottom -= Math.abs(bottom) * 0.1 || 1; }
    const room = (top - bottom) * 0.06;
    top += room;
    if (!this.isFromZero) bottom -= room;
    const unit = this.base > 1 ? this.base ** Math.max(0, Math.floor(Math.log(Math.max(1, top)) / Math.log(this.base))) : 1;
    const levels = ticks(bottom / unit, top / unit).map((value) => value * unit);
    return { levels, y: (value) => place((value - bottom) / (top - bottom)) };
  }

  inRange(points) {
    const { from, to } = this.data;
    return from === null ? points : points.filter((point) => point[0] >= from && (to === null || point[0] <= to));
  }

  describe(ys, isLog) {
    const last = this.told.map((each) => `${each.name} ${this.format(lastOf(each.points))}`).slice(0, SERIES_MAX);
    const range = `lowest ${this.format(ys.reduce((a, b) => Math.min(a, b)))}, highest ${this.format(ys.reduce((a, b) => Math.max(a, b)))}`;
    this.plot.setAttribute("aria-label", `${this.title}${isLog ? ", on a logarithmic axis" : ""}. Now ${last.join(", ")}; ${range}. Arrow keys move along it.`);
  }

  drawKey() {
    const named = this.drawn.filter((each) => each.kind !== "raw");
    const isNeeded = named.length > 1 || this.data.isNamed || named.some((each) => each.band.length);
    this.key.replaceChildren(...(isNeeded ? named : []).map((each) => {
      const line = h("i");
      line.style.background = each.colour;
      return h("span", {}, line, each.name + (each.band.length ? ", and from the lowest to the highest" : ""));
    }));
  }

  drawCursor() {
    if (!this.scales || !this.told?.length) return;
    const { low, high } = this.scales;
    if (this.cursor === null) {
      this.cross.setAttribute("visibility", "hidden");
      setText(this.output, this.told.slice(0, 2).map((each) => this.value(each, each.points.at(-1)[0], lastOf(each.points))).join(" · "));
      return;
    }
    const at = low + ((this.cursor - this.left) / (this.width - this.left - RIGHT)) * (high - low);
    const nearest = this.told.map((each) => nearestTo(each.points, at));
    const where = nearest[0][0];
    this.cross.setAttribute("x1", this.scales.x(where));
    this.cross.setAttribute("x2", this.scales.x(where));
    this.cross.setAttribute("visibility", "visible");
    const values = nearest.slice(0, 3).map(([x, y], index) => (this.told.length > 1 ? `${this.told[index].name} ` : "") + this.value(this.told[index], x, y));
    setText(this.output, `${values.join(", ")} at ${this.isTime ? clockTime(where) : `step ${whole(Math.round(where))}`}`);
  }

  // A value of a line, and the range of those whose mean it is.
  value({ band }, x, y) {
    const [, low, high] = band.length ? nearestTo(band, x) : [x, y, y];
    return low === high ? this.format(y) : `${this.format(y)} (${this.format(low)} to ${this.format(high)})`;
  }
}

const nearestTo = (points, at) => points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));

// A line without what a logarithmic axis has no place for.
function positive(each) {
  const ys = [...each.points.map(([, y]) => y), ...each.band.map(([, low]) => low)].filter((y) => y !== null && y > 0);
  const least = ys.reduce((a, b) => Math.min(a, b), Infinity);
  return {
    ...each,
    points: each.points.map(([x, y]) => [x, y !== null && y > 0 ? y : null]),
    band: each.band.filter(([, , high]) => high > 0).map(([x, low, high]) => [x, low > 0 ? low : Math.min(least, high), high]),
  };
}

function thinnedBand(band, low, high, columns) {
  const lows = thinned(band.map(([x, y]) => [x, y]), low, high, columns), highs = thinned(band.map(([x, , y]) => [x, y]), low, high, columns);
  return lows.map(([x, y], index) => [x, y, highs[index][1]]);
}

function bandOf(band, x, y) {
  const up = band.map(([bx, low]) => `${x(bx).toFixed(1)} ${y(low).toFixed(1)}`);
  const down = band.map(([bx, , high]) => `${x(bx).toFixed(1)} ${y(high).toFixed(1)}`).reverse();
  return `M${[...up, ...down].join("L")}Z`;
}

function filled(kind, d, fill) {
  const path = s("path", { class: kind, d });
  path.style.fill = fill;
  return path;
}

// Places for marks of lost points, not more than can be told apart.
function lostColumns(lost, x) {
  return [...new Set(lost.map((at) => Math.round(x(at) / 8) * 8))];
}

function lastOf(points) {
  for (let index = points.length - 1; index >= 0; index -= 1) if (points[index][1] !== null) return points[index][1];
  return null;
}

function pathOf(points, x, y) {
  let path = "", isDown = false;
  points.forEach(([px, py], index) => {
    if (py === null) { isDown = false; return; }
    path += `${isDown ? "L" : "M"}${x(px).toFixed(1)} ${y(py).toFixed(1)}`;
    if (!isDown && (points[index + 1]?.[1] ?? null) === null) path += "m-2 0h4";  // a point alone
    isDown = true;
  });
  return path;
}

// A line without axes.
export function spark(values) {
  const shown = values.slice(-120);
  const top = Math.max(...shown, 1e-9);
  const d = shown.map((value, index) => `${index ? "L" : "M"}${((index / Math.max(1, shown.length - 1)) * 200).toFixed(1)} ${(29 - ((value ?? 0) / top) * 27).toFixed(1)}`).join("");
  return s("svg", { class: "spark", viewBox: "0 0 200 30", preserveAspectRatio: "none", "aria-hidden": "true" }, s("path", { d }));
}
