// The curves that workers log, and how a visitor wants them drawn: smoothed, the mean or each worker, beside earlier runs.

import { LineChart, colour } from "./charts.js";
import { areAlike, smoothed, together } from "./curves.js";
import { h, keep, setAttribute, setText } from "./dom.js";
import { keepSettings, settings } from "./settings.js";

const LINES_MAX = 8;
const EARLIER_MAX = 6;
const COLUMNS = 1000;

export class CurveSection {
  // rank: of the worker whose curves these are; null: of all.
  constructor(job, rank = null) {
    this.job = job;
    this.rank = rank;
    this.charts = new Map();
    this.grid = h("div", { class: "grid" });
    this.controls = new Controls(job, rank === null);
    this.element = h("section", { class: "curves", "aria-label": "Curves" }, this.controls.element, this.grid);
  }

  update(range) {
    const names = this.job.curveNames().filter((name) => this.rank === null || this.job.byRank(name).has(this.rank));
    this.element.hidden = names.length === 0;
    this.controls.update();
    keep(this.grid, names, (name) => name, (name) => this.chartOf(name).element, (_, name) => this.chartOf(name).update(this.dataOf(name, range)));
  }

  chartOf(name) {
    if (!this.charts.has(name)) this.charts.set(name, new LineChart(name, { isTime: false, isFromZero: false, canLog: true }));
    return this.charts.get(name);
  }

  // A curve along the steps, over the time shown.
  dataOf(name, range) {
    const since = range ? (this.job.now?.at ?? 0) - range : 0;
    const lines = [...this.job.byRank(name)]
      .map(([rank, points]) => ({ rank, name: `worker ${rank}`, points: points.filter((point) => point[2] >= since) }))
      .filter((each) => each.points.length);
    const marks = this.job.checkpoints().filter((event) => event.step !== null).map((event) => ({ x: event.step, name: event.text }));
    const steps = lines.flatMap(({ points }) => [points[0][0], points.at(-1)[0]]);
    const isShown = ([step]) => !range || (step >= Math.min(...steps) && step <= Math.max(...steps));
    const earlier = chosenOf(this.job).map((run) => ({ run, points: this.job.earlierCurve(run, name)?.filter(isShown) })).filter(({ points }) => points?.length)
      .map(({ run, points }, index) => ({ name: run, kind: "earlier", points: smoothed(points, settings.smoothing), colour: colour(2 + index) }));
    const { series, isNamed } = this.rank === null ? ofAll(lines) : ofOne(lines, this.rank);
    return { series: [...series, ...earlier], marks, isNamed };
  }
}

// The earlier runs that the visitor wants to see, as far as this job's log directory has them.
const chosenOf = (job) => [...settings.earlier].filter((name) => job.earlierRuns.some((run) => run.name === name)).slice(0, EARLIER_MAX);

// The raw line behind a smoothed one.
const raw = (points, of) => (settings.smoothing ? [{ name: "", kind: "raw", points, colour: of }] : []);

const smoothLines = (lines) => lines.map((each) => ({ ...each, points: smoothed(each.points, settings.smoothing) }));

function ofAll(lines) {
  if (lines.length > 1 && areAlike(lines)) {
    const { mean } = together(lines, COLUMNS);
    return { series: [...raw(mean, colour(0)), { name: `all ${lines.length} workers alike`, points: smoothed(mean, settings.smoothing), colour: colour(0) }], isNamed: true };
  }
  if (lines.length > 1 && (settings.isMean || lines.length > LINES_MAX)) {
    const { mean, band } = together(smoothLines(lines), COLUMNS);
    return { series: [...raw(together(lines, COLUMNS).mean, colour(0)), { name: `mean of ${lines.length} workers`, points: mean, band, colour: colour(0) }], isNamed: true };
  }
  const each = lines.flatMap((line, index) => [...raw(line.points, colour(index)), { name: line.name, points: smoothed(line.points, settings.smoothing), colour: colour(index) }]);
  return { series: each, isNamed: lines.length > 1 };
}

function ofOne(lines, rank) {
  const own = lines.filter((each) => each.rank === rank);
  if (!own.length) return { series: [], isNamed: false };
  const series = [...raw(own[0].points, colour(0)), { name: own[0].name, points: smoothed(own[0].points, settings.smoothing), colour: colour(0) }];
  if (lines.length === 1 || areAlike(lines)) return { series, isNamed: false };
  return { series: [...series, { name: `mean of ${lines.length} workers`, points: together(smoothLines(lines), COLUMNS).mean, colour: "var(--faint)" }], isNamed: true };
}

class Controls {
  constructor(job, isOfAll) {
    this.job = job;
    this.weight = h("output", {});
    this.slider = h("input", { type: "range", min: "0", max: "0.99", step: "0.01", "aria-label": "Smoothing of curves", oninput: () => this.change(() => { settings.smoothing = Number(this.slider.value); }) });
    const choice = (text, isMean) => h("button", { type: "button", class: "quiet", onclick: () => this.change(() => { settings.isMean = isMean; }) }, text);
    this.choices = [[choice("mean", true), true], [choice("each worker", false), false]];
    this.lines = h("div", { class: "choices", role: "group", "aria-label": "Lines of curves", hidden: !isOfAll }, ...this.choices.map(([button]) => button));
    this.runs = h("ul");
    this.earlier = h("details", { class: "earlier", hidden: true }, h("summary", {}, "Earlier runs"), this.runs);
    this.element = h("div", { class: "controls" }, h("label", {}, "smoothing ", this.slider, " ", this.weight), this.lines, this.earlier);
  }

  change(how) {
    how();
    keepSettings();
    this.job.onChange();
  }

  update() {
    if (Number(this.slider.value) !== settings.smoothing) this.slider.value = String(settings.smoothing);
    setText(this.weight, settings.smoothing ? settings.smoothing.toFixed(2) : "off");
    for (const [button, isMean] of this.choices) setAttribute(button, "aria-pressed", String(settings.isMean === isMean));
    this.earlier.hidden = this.job.earlierRuns.length === 0;
    const chosen = chosenOf(this.job);
    keep(this.runs, this.job.earlierRuns, (run) => run.name, (run) => this.choiceOf(run), (item, run) => {
      const box = item.querySelector("input");
      box.checked = chosen.includes(run.name);
      box.disabled = !box.checked && chosen.length >= EARLIER_MAX;
    });
  }

  choiceOf(run) {
    const box = h("input", { type: "checkbox", onchange: () => this.change(() => { if (!settings.earlier.delete(run.name)) settings.earlier.add(run.name); }) });
    return h("li", {}, h("label", {}, box, ` ${run.name}`, h("small", {}, new Date(run.begun_at * 1000).toLocaleString("en-GB"))));
  }
}
