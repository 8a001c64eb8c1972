// The job as the server tells it: everything, then each look; everything anew when some of it is gone. Keeps the past bounded,
// as the server does.

const MOMENTS_MAX = 1500;
const POINTS_MAX = 8192;
const POINTS_MIN = 512;
const ALL_POINTS_MAX = 131072;
const EVENTS_MAX = 500;

export class Job {
  constructor(onChange, onLink, onToken) {
    this.now = null;
    this.history = {};
    this.events = [];
    this.curves = new Map();
    this.earlierRuns = [];
    this.earlier = new Map();  // by name of the run: its curves; null while they are on their way, or if there are none
    this.listedFor = null;  // the run beside which the earlier runs were listed
    this.onChange = onChange;
    this.onLink = onLink;
    this.onToken = onToken;
    this.source = null;
    this.attempts = 0;
    this.hasEnded = false;  // the server has said so; the browser tries again all the same
  }

  async connect() {
    this.source?.close();
    this.source = null;
    const attempt = ++this.attempts;
    const reply = await fetch("/api/enter").catch(() => null);
    const isRefused = reply?.ok && !(await reply.json()).is_admitted;
    if (attempt !== this.attempts) return;
    if (isRefused) this.onToken();
    else this.listen();
  }

  listen() {
    const source = new EventSource("/api/stream");
    this.source = source;
    source.addEventListener("job", (event) => { this.takeAll(JSON.parse(event.data)); this.onLink("live"); this.onChange(); });
    source.addEventListener("look", (event) => { this.takeLook(JSON.parse(event.data)); this.onLink("live"); this.onChange(); });
    source.addEventListener("end", () => { this.hasEnded = true; });
    source.addEventListener("error", () => {
      this.onLink(this.hasEnded ? "ended" : "lost");
      // A stream that was refused says nothing of the reason.
      if (source.readyState === EventSource.CLOSED) setTimeout(() => { if (source === this.source) this.connect(); }, 2000);
    });
  }

  takeAll(all) {
    this.hasEnded = false;
    this.now = all.now;
    this.history = all.history;
    this.events = all.events;
    this.curves = new Map(Object.entries(all.curves).map(([name, points]) => [name, keyed(points)]));
    if (this.now) this.listEarlier();
  }

  takeLook(look) {
    this.now = look.now;
    this.listEarlier();
    const columns = Object.entries(look.moment);
    for (const [name, value] of columns) (this.history[name] ??= []).push(value);
    if (this.history.at.length > MOMENTS_MAX) {
      const kept = thinned(this.history.at.map((at, index) => [0, at, index]));
      for (const [name] of columns) this.history[name] = kept.map(([, , index]) => this.history[name][index]);
    }
    this.events.push(...look.events);
    this.events.splice(0, Math.max(0, this.events.length - EVENTS_MAX));
    for (const [name, ...point] of look.points) {
      if (!this.curves.has(name)) this.curves.set(name, new Map());
      const points = this.curves.get(name);
      const key = `${point[0]} ${point[1]}`;
      points.delete(key);
      points.set(key, point);
      const limit = Math.max(POINTS_MIN, Math.min(POINTS_MAX, ALL_POINTS_MAX / this.curves.size));
      if (points.size > limit) this.curves.set(name, keyed(thinned([...points.values()])));
    }
  }

  // The curves' names, losses first.
  curveNames() {
    const isLoss = (name) => /loss/i.test(name);
    return [...this.curves.keys()].sort((a, b) => isLoss(b) - isLoss(a) || a.localeCompare(b));
  }

  // Points of one curve by rank: [step, value, at], in the order of the steps.
  byRank(name) {
    const ranks = new Map();
    for (const [rank, step, value, at] of this.curves.get(name)?.values() ?? []) {
      if (!ranks.has(rank)) ranks.set(rank, []);
      ranks.get(rank).push([step, value, at]);
    }
    for (const points of ranks.values()) points.sort((a, b) => a[0] - b[0]);
    return new Map([...ranks].sort((a, b) => a[0] - b[0]));
  }

  // Asks which runs were before the present one, whenever that is another one.
  async listEarlier() {
    if (this.listedFor === this.now.run_id) return;
    this.listedFor = this.now.run_id;
    const found = await fetchJson("/api/runs");
    this.earlierRuns = found?.runs ?? [];
    this.earlier = new Map();
    this.onChange();
  }

  // The mean of an earlier run's workers, [step, value]; undefined if it has no such curve, or is not read yet: then it is asked for.
  earlierCurve(run, name) {
    if (!this.earlier.has(run) && this.earlierRuns.some((each) => each.name === run)) this.readEarlier(run);
    return this.earlier.get(run)?.[name];
  }

  async readEarlier(run) {
    const kept = this.earlier;
    kept.set(run, null);
    kept.set(run, (await fetchJson(`/api/run?name=${encodeURIComponent(run)}`))?.curves ?? null);
    this.onChange();
  }

  checkpoints() {
    return this.events.filter((event) => event.kind === "checkpoint" && event.level === "info");
  }
}

// Points [rank, place, ...] with fewer of each rank in the older half, evenly spaced; as psd/watch/history.py does.
function thinned(points) {
  const half = points.length >> 1;
  const spans = new Map();
  for (const [rank, place] of points.slice(0, half)) {
    const [low, high, count] = spans.get(rank) ?? [place, place, 0];
    spans.set(rank, [Math.min(low, place), Math.max(high, place), count + 1]);
  }
  const last = new Map();
  return points.filter(([rank, place], index) => {
    if (index >= half) return true;
    const [low, high, count] = spans.get(rank);
    if (last.has(rank) && Math.abs(place - last.get(rank)) < (4 / 3) * (high - low) / count) return false;
    last.set(rank, place);
    return true;
  });
}

async function fetchJson(address) {
  const reply = await fetch(address).catch(() => null);
  return reply?.ok ? reply.json() : null;
}

function keyed(points) {
  return new Map(points.map((point) => [`${point[0]} ${point[1]}`, point]));
}
