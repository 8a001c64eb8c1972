// The overview: four answers in one look, curves, shards, workers, events.

import { LineChart, spark } from "./charts.js";
import { CurveSection } from "./curve_section.js";
import { h, keep, setAttribute, setText } from "./dom.js";
import { HeatMap } from "./heat.js";
import { FACTS } from "./facts.js";
import { Table, link, meter, tag } from "./table.js";
import { charted, clockTime, drawn, duration, fact, heading, number, perSecond, rate, share, short, shown, whole } from "./words.js";

export const stateKind = { serving: "good", live: "good", finished: "", empty: "", absent: "warn", draining: "warn", restoring: "warn", expired: "bad", failed: "bad", "no answer": "bad", stuck: "bad", behind: "warn", fetching: "good", waiting: "good" };

export class Overview {
  constructor(job) {
    this.job = job;
    this.isByRank = true;
    this.answers = new Answers();
    this.notice = h("section", { class: "card notice", role: "alert", hidden: true }, h("h2", {}, "Problems"), h("ul"));
    this.curves = new CurveSection(job);
    this.speed = chartOf("job", "steps_per_s");
    this.traffic = new LineChart("Payload", drawn(fact("job", "received_bytes_per_s")));
    this.awaited = new HeatMap("Awaited, by worker");
    this.behind = chartOf("worker", "behind");
    this.latency = chartOf("shard", "latency_s");
    this.ages = new Ages();
    this.shards = new Table("Shards", SHARD_COLUMNS, { key: (shard) => shard.index, away: (shard) => shard.state === "no answer" });
    this.workers = new Table("Workers", WORKER_COLUMNS, { key: (worker) => worker.rank, away: (worker) => worker.state !== "live" });
    this.shardCount = h("small");
    this.workerCount = h("small");
    this.tables = new Table("Tables", TABLE_COLUMNS, { key: (table) => table.name });
    this.tableCard = h("section", { class: "card", hidden: true, "aria-label": "Sparse tables" }, h("header", {}, h("h2", {}, "Sparse tables")), this.tables.element);
    this.learners = new Table("Learners", LEARNER_COLUMNS, { key: (worker) => worker.rank, away: (worker) => worker.state !== "live" });
    this.learnerCard = h("section", { class: "card", hidden: true, "aria-label": "Learners" }, h("header", {}, h("h2", {}, "Learners")), this.learners.element);
    this.readers = new Table("Readers", READER_COLUMNS, { key: (reader) => reader.id, away: (reader) => reader.state === "idle" });
    this.lagging = h("ul", { class: "more", hidden: true, "aria-label": "Readers that lag" });
    this.readerCard = h("section", { class: "card", hidden: true, "aria-label": "Readers" }, h("header", {}, h("h2", {}, "Readers")), this.lagging, this.readers.element);
    this.waits = new Waits();
    this.events = new Events();
    this.elements = [
      h("h1", { class: "unseen" }, "Overview"),
      this.notice,
      this.answers.element,
      this.curves.element,
      h("section", { class: "grid", "aria-label": "Speed" }, this.speed.element, this.awaited.element, this.traffic.element, this.latency.element, this.behind.element, this.ages.element),
      h("section", { class: "card", "aria-label": "Shards" }, h("header", {}, h("h2", {}, "Shards"), this.shardCount), this.shards.element),
      h("section", { class: "card", "aria-label": "Workers" }, h("header", {}, h("h2", {}, "Workers"), this.workerCount), this.workers.element),
      this.learnerCard,
      this.tableCard,
      this.readerCard,
      h("div", { class: "grid" }, this.waits.element, this.events.element),
    ];
  }

  update(range) {
    const { now, history } = this.job;
    this.answers.update(now, history);
    this.notice.hidden = now.problems.length === 0;
    keep(this.notice.lastElementChild, now.problems, (text) => text, () => h("li"), (item, text) => setText(item, text));
    const time = timeRange(history, range);
    const marks = this.job.checkpoints().map((event) => ({ x: event.at, name: event.text }));
    this.curves.update(range);
    const line = (column) => zip(history.at, history[column]);
    this.speed.update({ series: [{ name: "steps", points: line("steps_per_s") }], marks, ...time });
    this.traffic.update({ series: [{ name: "received", points: line("received_bytes_per_s") }, { name: "sent", points: line("sent_bytes_per_s") }], marks, ...time });
    this.latency.update({ series: perItem(history, "shard_latency_s", now.shards.map((shard) => `shard ${shard.index}`)), marks, ...time });
    this.behind.update({ series: perItem(history, "worker_behind", now.workers.map((worker) => `worker ${worker.rank}`)), ...time });
    this.awaited.update({ ranks: now.workers.map((worker) => worker.rank), times: history.at, rows: history.worker_awaited_share, ...time });
    this.ages.update(now);
    this.behind.element.hidden = now.consistency === "sync" && (!now.quorum || now.quorum >= now.world_size);
    this.shards.update(now.shards);
    this.workers.update(now.workers);
    setText(this.shardCount, `${now.shards.filter((shard) => shard.state === "serving").length} of ${now.shards.length} serving`);
    setText(this.workerCount, `${now.workers.filter((worker) => worker.state === "live").length} of ${now.world_size} live`);
    const learners = now.workers.filter((worker) => worker.local_steps != null);
    this.learnerCard.hidden = learners.length === 0;
    this.learners.update(learners);
    this.tableCard.hidden = now.tables.length === 0;
    this.tables.update(now.tables);
    this.readerCard.hidden = now.readers.length === 0;
    this.readers.update(now.readers);
    this.lagging.hidden = now.lagging.length === 0;
    keep(this.lagging, now.lagging, (text) => text, () => h("li"), (item, text) => setText(item, text[0].toUpperCase() + text.slice(1)));
    this.waits.update(now);
    this.events.update(this.job.events);
  }
}

export const chartOf = (of, name) => new LineChart(charted(fact(of, name)), drawn(fact(of, name)));

export const zip = (xs, ys) => (xs ?? []).map((x, index) => [x, ys?.[index] ?? null]);

export function perItem(history, column, names) {
  return names.map((name, index) => ({ name, points: (history.at ?? []).map((at, look) => [at, history[column][look]?.[index] ?? null]) }));
}

export function timeRange(history, range) {
  const times = history.at ?? [];
  if (!times.length) return { from: null, to: null };
  const to = times[times.length - 1];
  return { from: range ? Math.max(to - range, times[0]) : times[0], to };
}

class Answers {
  constructor() {
    this.state = h("p", { class: "big state" });
    this.stateMore = h("p", { class: "more" });
    this.orders = h("ul", { class: "more orders", "aria-label": "Orders of an operator" });
    this.progress = h("div", { class: "split progress", role: "progressbar", "aria-label": "Progress", "aria-valuemin": "0", hidden: true }, h("i"));
    this.progressMore = h("p", { class: "more" });
    this.speed = h("p", { class: "big" });
    this.speedMore = h("p", { class: "more" });
    this.spark = h("div");
    this.limit = h("p", { class: "say" });
    this.limitMore = h("p", { class: "more" });
    this.split = h("div", { class: "split", "aria-hidden": "true" }, h("i"));
    this.splitMore = h("p", { class: "more" });
    this.slow = h("div", { class: "chips" });
    this.slowMore = h("p", { class: "more" });
    const answer = (title, ...parts) => h("section", { class: "answer" }, h("h2", {}, title), ...parts);
    this.element = h("div", { class: "card answers" },
      answer("Is it training?", this.state, this.progress, this.progressMore, this.stateMore, this.orders),
      answer("How fast?", this.speed, this.speedMore, this.spark),
      answer("What limits it?", this.limit, this.limitMore, h("div", {}, this.split, this.splitMore)),
      answer("Who is slow?", this.slow, this.slowMore));
  }

  update(now, history) {
    setText(this.state, now.headline);
    setAttribute(this.state, "data-is", now.state);
    const [first] = now.shards;
    const saved = first.checkpoint_last ? `checkpoint ${duration(first.checkpoint_age_s)} ago` : first.checkpoint_dir ? "no checkpoint yet" : "no checkpoints are taken";
    setText(this.stateMore, [now.consistency, now.quorum && now.quorum < now.world_size ? `quorum ${now.quorum}` : "", `${now.workers.filter((w) => w.state === "live").length} of ${now.world_size} workers`, saved].filter(Boolean).join(" · "));
    this.progress.hidden = this.progressMore.hidden = !now.total_steps;
    if (now.total_steps) {
      const part = Math.min(1, now.clock / now.total_steps);
      this.progress.firstElementChild.style.width = `${part * 100}%`;
      setAttribute(this.progress, "aria-valuemax", now.total_steps);
      setAttribute(this.progress, "aria-valuenow", now.clock);
      setText(this.progressMore, `${share(part)} of ${whole(now.total_steps)} steps${now.time_left_s === null ? "" : `, ${duration(now.time_left_s)} left`}`);
    }
    this.orders.hidden = now.orders.length === 0;
    keep(this.orders, now.orders, (text) => text, () => h("li"), (item, text) => setText(item, text));
    this.speed.replaceChildren(rate(now.steps_per_s), h("small", {}, " steps/s"));
    const aStep = now.steps_per_s > 0 ? `${short(1 / now.steps_per_s)} a step · ` : "";
    const samples = now.samples_per_s ? `${number(now.samples_per_s)} samples/s · ` : "";
    setText(this.speedMore, `${samples}${aStep}${perSecond(now.received_bytes_per_s)} received, ${perSecond(now.sent_bytes_per_s)} sent`);
    this.spark.replaceChildren(spark(history.steps_per_s ?? []));
    setText(this.limit, now.limit || (now.state === "finished" ? "Nothing any more" : "Nothing is measured while no steps are made"));
    const busiest = now.shards.reduce((a, b) => (b.cpu_share > a.cpu_share ? b : a));
    const inCalls = Math.max(...now.shards.map((shard) => shard.in_calls_share));
    this.split.parentElement.hidden = !now.limit;
    this.split.firstElementChild.style.width = `${100 - inCalls * 100}%`;
    setText(this.splitMore, `a worker's time: ${share(1 - inCalls)} its own, ${share(inCalls)} in calls`);
    setText(this.limitMore, busiest.cpu_share > 0 ? `the busiest shard, ${busiest.index}, uses ${share(busiest.cpu_share)} of a core` : "");
    const slow = now.workers.filter((worker) => now.slow.includes(worker.rank)).sort((a, b) => b.awaited_share - a.awaited_share);
    keep(this.slow, slow.slice(0, 8), (worker) => worker.rank, () => h("a", { class: "tag warn" }), (chip, worker) => {
      setAttribute(chip, "href", `#/worker/${worker.rank}`);
      setText(chip, worker.awaited_share >= 0.01 ? `worker ${worker.rank}: ${share(worker.awaited_share)}` : `worker ${worker.rank}: ${rate(worker.steps_per_s)} steps/s`);
    });
    const more = slow.length > 8 ? `and ${slow.length - 8} more` : slow.length ? "part of the time that others wait for it" : "Nobody";
    setText(this.slowMore, more);
    setAttribute(this.slowMore, "class", slow.length ? "more" : "say");
  }
}

// Columns of a table: those of the catalogue, the weightiest first.
function columns(of, rows, fills = {}) {
  return rows.map((row) => ({ name: heading(row), value: (item) => item[row.name] ?? 0, text: (item) => shown(row, item), fill: fills[row.name] }));
}

const live = (of) => FACTS[of].filter((row) => row.weight && row.table !== "learners").sort((a, b) => b.weight - a.weight);

const SHARD_COLUMNS = [
  { name: "Shard", word: true, value: (s) => s.index, fill: (cell, s) => link(cell, `#/shard/${s.index}`, `${s.index}`) },
  { name: "State", word: true, keep: true, value: (s) => s.state, fill: (cell, s) => tag(cell, s.detail ? `${s.state}, ${s.detail}` : s.state, stateKind[s.state] ?? "") },
  ...columns("shard", live("shard")),
  { name: "Address", word: true, value: (s) => s.address },
];

const WORKER_COLUMNS = [
  { name: "Rank", word: true, value: (w) => w.rank, fill: (cell, w) => link(cell, `#/worker/${w.rank}`, `${w.rank}`) },
  { name: "State", word: true, keep: true, value: (w) => w.state, fill: (cell, w) => tag(cell, w.state, stateKind[w.state] ?? "") },
  ...columns("worker", live("worker"), { awaited_share: (cell, w) => meter(cell, w.awaited_share) }),
  { name: "Process", word: true, value: (w) => `${w.host}:${w.pid}`, text: (w) => (w.pid ? `${w.host}:${w.pid}` : "–") },
  { name: "Transport", word: true, cut: true, value: (w) => w.transport, text: (w) => w.transport || "–" },
];

const LEARNER_COLUMNS = [
  { name: "Rank", word: true, value: (w) => w.rank, fill: (cell, w) => link(cell, `#/worker/${w.rank}`, `${w.rank}`) },
  ...columns("worker", FACTS.worker.filter((row) => row.table === "learners")),
];

const TABLE_COLUMNS = [{ name: "Table", word: true, value: (t) => t.name }, ...columns("table", FACTS.table)];

const READER_COLUMNS = [
  { name: "Reader", word: true, cut: true, value: (r) => r.name },
  { name: "State", word: true, keep: true, value: (r) => r.state, fill: (cell, r) => tag(cell, r.state, stateKind[r.state] ?? "") },
  ...columns("reader", live("reader")),
];

class Waits {
  constructor() {
    this.list = h("ul");
    this.none = h("p", { class: "none" });
    this.element = h("section", { class: "card", "aria-label": "Waits" }, h("header", {}, h("h2", {}, "Who waits for whom")), this.none, this.list);
  }

  update(now) {
    this.none.hidden = now.waiting.length > 0;
    const worst = now.workers.reduce((a, b) => (b.awaited_share > a.awaited_share ? b : a), { awaited_share: 0 });
    const inAll = now.slow.includes(worst.rank) ? `, but others wait for worker ${worst.rank} ${share(worst.awaited_share)} of the time` : "";
    setText(this.none, `At present nobody waits for longer than half a second${inAll}.`);
    keep(this.list, now.waiting, (_) => now.waiting.indexOf(_), () => h("li"), (item, text) => setText(item, text[0].toUpperCase() + text.slice(1)));
  }
}

export class Events {
  constructor() {
    this.list = h("ol", { class: "events", tabindex: "0", "aria-label": "Events, the newest first" });
    this.none = h("p", { class: "none" }, "Nothing is known to have happened.");
    this.element = h("section", { class: "card", "aria-label": "Events" }, h("header", {}, h("h2", {}, "Events")), this.none, this.list);
  }

  update(events) {
    this.none.hidden = events.length > 0;
    const shown = events.slice(-100).reverse();
    keep(this.list, shown, (event) => `${event.at} ${event.text}`, (event) => h("li", {}, h("time", {}, clockTime(event.at)), h("span", { class: event.level }, event.text)), () => {});
  }
}

// How old gradients were when they were applied: without rounds alone.
export class Ages {
  constructor() {
    this.bars = h("div", { class: "bars" });
    this.output = h("output");
    this.element = h("figure", { class: "card chart", hidden: true }, h("figcaption", {}, h("span", {}, "Age of gradients, in updates, since the start"), this.output), this.bars);
  }

  update(now, shards = now.shards) {
    const length = Math.max(0, ...shards.map((shard) => shard.ages.length));
    const sums = Array.from({ length }, (_, index) => shards.reduce((sum, shard) => sum + (shard.ages[index] ?? 0), 0));
    const all = sums.reduce((a, b) => a + b, 0);
    this.element.hidden = all === 0 || now.consistency === "sync";
    if (this.element.hidden) return;
    const names = sums.map((_, index) => (index < 3 ? `${index}` : `${(1 << (index - 2)) + 1}–${1 << (index - 1)}`));
    const top = Math.max(...sums);
    keep(this.bars, sums.map((count, index) => ({ count, name: names[index] })), (bar) => bar.name,
      () => h("div", {}, h("span"), h("i"), h("span")),
      (bar, { count, name }) => {
        setText(bar.children[0], share(count / all));
        bar.children[1].style.height = `${(count / top) * 110}px`;
        setText(bar.children[2], name);
      });
    let seenSoFar = 0;
    const middle = names[sums.findIndex((count) => (seenSoFar += count) >= all / 2)];
    setText(this.output, `half are at most ${middle.split("–").at(-1)}`);
  }
}
