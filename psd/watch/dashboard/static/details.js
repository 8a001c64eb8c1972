// The pages of one shard and of one worker.

import { LineChart } from "./charts.js";
import { h, keep, setAttribute, setText } from "./dom.js";
import { Ages, Events, curveData, perItem, stateKind, timeRange, zip } from "./overview.js";
import { Table } from "./table.js";
import { bytes, duration, number, rate, seen, share, short, whole } from "./words.js";

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
    this.rounds = new LineChart("Rounds per second", { format: rate, tick: number });
    this.cpu = new LineChart("Cores in use", { format: (value) => value.toFixed(2), tick: number });
    this.memory = new LineChart("Memory", { format: bytes, base: 1024 });
    this.latency = new LineChart("Time of a call, with waits", { format: short });
    this.ages = new Ages();
    this.calls = new Table("Calls", [
      { name: "Call", word: true, value: (c) => c.call },
      { name: "Per second", value: (c) => c.per_s, text: (c) => rate(c.per_s) },
      { name: "Time", value: (c) => c.mean_s, text: (c) => short(c.mean_s) },
      { name: "In all", value: (c) => c.count, text: (c) => whole(c.count) },
    ], { key: (c) => c.call });
    this.elements.push(
      h("section", { class: "grid", "aria-label": "Charts" }, this.rounds.element, this.cpu.element, this.latency.element, this.memory.element, this.ages.element),
      h("div", { class: "grid" }, h("section", { class: "card", "aria-label": "Calls" }, h("header", {}, h("h2", {}, "Calls")), this.calls.element), this.events.element));
  }

  update(range) {
    const { now, history, events } = this.job;
    const shard = now.shards[this.index];
    if (!shard) { this.show("", [], `This job has ${now.shards.length} shards.`); return; }
    const saved = shard.checkpoint;
    this.show(shard.state, [
      ["Address", shard.address],
      ["Up for", duration(shard.uptime_s)],
      ["Incarnation", shard.incarnation],
      ["Restarts", whole(shard.restarts)],
      ["Life cycle", shard.detail || shard.state],
      ["Parameters", bytes(shard.parameter_bytes)],
      ["State of the rule", bytes(shard.slot_bytes)],
      ["Blocks", whole(shard.blocks)],
      ["Rounds", whole(shard.rounds)],
      ["Memory", bytes(shard.memory_bytes)],
      ["Cores in use", shard.cpu_share.toFixed(2)],
      ["Processor time", duration(shard.cpu_s)],
      ["Received", bytes(shard.bytes_received)],
      ["Sent", bytes(shard.bytes_sent)],
      ["Pushes", whole(shard.pushes_accepted)],
      ["Late pushes", whole(shard.pushes_late)],
      ["Repeated pushes", whole(shard.pushes_duplicate)],
      ["Pulls", whole(shard.pulls)],
      ["Refused requests", whole(shard.requests_refused)],
      ["Workers' time in its calls", share(shard.in_calls_share)],
      ["Last checkpoint", saved?.name ? `${duration(saved.age_s)} ago, ${bytes(saved.bytes)} in ${duration(saved.took_s)}` : saved ? "none yet" : "none are taken"],
    ], shard.error || saved?.error || "");
    const time = timeRange(history, range);
    const one = (name, column) => ({ series: [{ name, points: this.column(column, this.index) }], ...time });
    this.rounds.update(one("rounds", "rounds"));
    this.cpu.update(one("cores", "cpu"));
    this.memory.update(one("memory", "memory"));
    this.latency.update(one("call", "latency"));
    this.ages.update(now, [shard]);
    this.calls.update(shard.calls);
    this.events.update(events.filter((event) => new RegExp(`\\bshard ${this.index}\\b`).test(event.text)));
  }
}

export class WorkerPage extends Detail {
  constructor(job, rank) {
    super(job, `Worker ${rank}`);
    this.rank = rank;
    this.speed = new LineChart("Steps per second", { format: rate, tick: number });
    this.awaited = new LineChart("Part of the time that others wait for it", { format: share });
    this.behind = new LineChart("Steps behind the foremost worker", { format: number });
    this.curves = new Map();
    this.curveGrid = h("section", { class: "grid", "aria-label": "Curves" });
    this.elements.push(this.curveGrid,
      h("section", { class: "grid", "aria-label": "Charts" }, this.speed.element, this.awaited.element, this.behind.element), this.events.element);
  }

  update(range) {
    const { now, history, events } = this.job;
    const index = now.workers.findIndex((worker) => worker.rank === this.rank);
    if (index < 0) { this.show("", [], `No worker ${this.rank} is known.`); return; }
    const worker = now.workers[index];
    this.show(worker.state, [
      ["Process", worker.pid ? `${worker.host}:${worker.pid}` : "–"],
      ["Last seen", seen(worker.last_seen_s)],
      ["Step", whole(worker.clock)],
      ["Steps per second", rate(worker.steps_per_s)],
      ["Steps behind", whole(worker.behind)],
      ["Others wait for it", `${share(worker.awaited_share)} of the time`],
      ["In all", duration(worker.awaited_s)],
      ["Lane", worker.lane || "–"],
    ], worker.waits);
    const time = timeRange(history, range);
    const mine = (column) => this.column(column, index);
    const usual = (history.rates ?? []).map((row) => median(row));
    this.speed.update({ series: [{ name: `worker ${this.rank}`, points: mine("rates") }, { name: "the median worker", points: zip(history.at, usual), colour: "var(--faint)" }], ...time });
    this.awaited.update({ series: [{ name: "awaited", points: mine("awaited") }], ...time });
    this.behind.update({ series: [{ name: "behind", points: mine("behind") }], ...time });
    const names = this.job.curveNames().filter((name) => this.job.byRank(name).has(this.rank));
    keep(this.curveGrid, names, (name) => name, (name) => this.curveOf(name).element, (_, name) => this.curveOf(name).update(curveData(this.job, name, range, this.rank)));
    this.curveGrid.hidden = names.length === 0;
    this.events.update(events.filter((event) => new RegExp(`\\bworker ${this.rank}\\b`).test(event.text)));
  }

  curveOf(name) {
    if (!this.curves.has(name)) this.curves.set(name, new LineChart(name, { isTime: false, isFromZero: false }));
    return this.curves.get(name);
  }
}

function median(values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : null;
}
