// The pages of one shard and of one worker.

import { CurveSection } from "./curve_section.js";
import { h, keep, setAttribute, setText } from "./dom.js";
import { FACTS } from "./facts.js";
import { Ages, Events, chartOf, stateKind, timeRange, zip } from "./overview.js";
import { Table } from "./table.js";
import { heading, rate, short, shown, whole } from "./words.js";

class Detail {
  constructor(job, title) {
    this.job = job;
    this.state = h("span", { class: "tag" });
    this.facts = h("dl", { class: "facts" });
    this.say = h("p", { class: "say" });
    this.head = h("section", { class: "card", "aria-label": title },
      h("header", {}, h("div", { class: "title" }, h("h1", {}, title), this.state)), this.say, this.facts);
    this.events = new Events();
    this.elements = [this.head];
  }

  show(state, facts, say) {
    setAttribute(this.state, "class", `tag ${stateKind[state] ?? ""}`);
    setText(this.state, state);
    setText(this.say, say);
    this.say.hidden = !say;
    keep(this.facts, facts, ([name]) => name, ([name]) => h("div", {}, h("dt", {}, name), h("dd")), (item, [, text]) => setText(item.lastElementChild, text));
  }

  column(name, index) {
    const { history } = this.job;
    return zip(history.at, (history[name] ?? []).map((row) => row[index] ?? null));
  }
}

export class ShardPage extends Detail {
  constructor(job, index) {
    super(job, `Shard ${index}`);
    this.index = index;
    this.charts = ["updates_per_s", "cpu_share", "latency_s", "memory_bytes"].map((name) => [name, chartOf("shard", name)]);
    this.ages = new Ages();
    this.calls = new Table("Calls", [
      { name: "Call", word: true, value: (c) => c.call },
      { name: "Per second", value: (c) => c.per_s, text: (c) => rate(c.per_s) },
      { name: "Time", value: (c) => c.mean_s, text: (c) => short(c.mean_s) },
      { name: "In all", value: (c) => c.count, text: (c) => whole(c.count) },
    ], { key: (c) => c.call });
    this.elements.push(
      h("section", { class: "grid", "aria-label": "Charts" }, ...this.charts.map(([, chart]) => chart.element), this.ages.element),
      h("div", { class: "grid" }, h("section", { class: "card", "aria-label": "Calls" }, h("header", {}, h("h2", {}, "Calls")), this.calls.element), this.events.element));
  }

  update(range) {
    const { now, history, events } = this.job;
    const shard = now.shards[this.index];
    if (!shard) { this.show("", [], `This job has ${now.shards.length} shards.`); return; }
    this.show(shard.state, [
      ["Address", shard.address],
      ["Incarnation", shard.incarnation],
      ["Life cycle", shard.detail || shard.state],
      ["Last checkpoint", shard.checkpoint_last || (shard.checkpoint_dir ? "none yet" : "none are taken")],
      ...numbersOf("shard", shard),
    ], shard.error || shard.checkpoint_error);
    const time = timeRange(history, range);
    for (const [name, chart] of this.charts) chart.update({ series: [{ name: `shard ${this.index}`, points: this.column(`shard_${name}`, this.index) }], ...time });
    this.ages.update(now, [shard]);
    this.calls.update(shard.calls);
    this.events.update(events.filter((event) => new RegExp(`\\bshard ${this.index}\\b`).test(event.text)));
  }
}

export class WorkerPage extends Detail {
  constructor(job, rank) {
    super(job, `Worker ${rank}`);
    this.rank = rank;
    this.speed = chartOf("worker", "steps_per_s");
    this.awaited = chartOf("worker", "awaited_share");
    this.behind = chartOf("worker", "behind");
    this.curves = new CurveSection(job, rank);
    this.elements.push(this.curves.element,
      h("section", { class: "grid", "aria-label": "Charts" }, this.speed.element, this.awaited.element, this.behind.element), this.events.element);
  }

  update(range) {
    const { now, history, events } = this.job;
    const index = now.workers.findIndex((worker) => worker.rank === this.rank);
    if (index < 0) { this.show("", [], `No worker ${this.rank} is known.`); return; }
    const worker = now.workers[index];
    this.show(worker.state, [
      ["Process", worker.pid ? `${worker.host}:${worker.pid}` : "–"],
      ["Transport", worker.transport || "–"],
      ...numbersOf("worker", worker),
    ], worker.waits);
    const time = timeRange(history, range);
    const mine = (column) => this.column(column, index);
    const usual = (history.worker_steps_per_s ?? []).map((row) => median(row));
    this.speed.update({ series: [{ name: `worker ${this.rank}`, points: mine("worker_steps_per_s") }, { name: "the median worker", points: zip(history.at, usual), colour: "var(--faint)" }], ...time });
    this.awaited.update({ series: [{ name: "awaited", points: mine("worker_awaited_share") }], ...time });
    this.behind.update({ series: [{ name: "behind", points: mine("worker_behind") }], ...time });
    this.curves.update(range);
    this.events.update(events.filter((event) => new RegExp(`\\bworker ${this.rank}\\b`).test(event.text)));
  }
}

// All numbers that are known of it; a time that has a share of its own in the catalogue is the one since the beginning.
function numbersOf(of, item) {
  const rows = FACTS[of].filter((row) => item[row.name] !== null);
  return rows.map((row) => [row.kind === "total" && row.unit === "s" ? `${heading(row)}, in all` : heading(row), shown(row, item)]);
}

function median(values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : null;
}
