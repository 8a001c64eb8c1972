// Numbers and times as people read them, in the same words as psdctl's (psd/watch/words.py); numbers that are not known as "–".

import { FACTS } from "./facts.js";

const known = (format) => (value) => (value === null || value === undefined ? "–" : format(value));

export const bytes = known((count) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${unit === 0 || count >= 100 ? count.toFixed(0) : count.toFixed(1)} ${units[unit]}`;
});

export const perSecond = known((count) => `${bytes(count)}/s`);

export const duration = known((seconds) => {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 120) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 120) return `${minutes} min ${whole % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
});

export const short = known((seconds) => {
  if (seconds === 0) return "–";
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 0.9995) return `${(seconds * 1e3).toPrecision(3)} ms`; // 1000 ms would have an exponent
  return duration(seconds);
});

// Three digits where three say enough; no exponent unless there has to be one.
export const number = known((value) => {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e7 || size < 1e-4) return value.toExponential(2).replace(/\.?0+e/, "e");
  if (size >= 100) return Math.round(value).toLocaleString("en");
  return value.toPrecision(3).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
});

export const whole = known((value) => value.toLocaleString("en"));
export const rate = known((value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2)));
export const share = known((value) => `${Math.round(value * 100)}%`);
export const seen = known((seconds) => (seconds < 0 ? "never" : `${duration(seconds)} ago`));
export const clockTime = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

const BY_UNIT = { count: whole, bytes, s: short, share, per_s: rate, bytes_per_s: perSecond };
const BY_NAME = { last_seen_s: seen, checkpoint_timestamp_s: clockTime };

// A number of the catalogue (psd/contract/facts.py), of a job, shard, worker or table.
export const fact = (of, name) => FACTS[of].find((each) => each.name === name);
export const heading = ({ title }) => title[0].toUpperCase() + title.slice(1);
export const formatOf = ({ name, unit }) => (BY_NAME[name] ? known(BY_NAME[name]) : BY_UNIT[unit]);
export const shown = (row, item) => formatOf(row)(item[row.name]);

// How a chart of it is drawn, and what stands above it: always with the unit.
export function drawn(row) {
  const format = row.unit === "per_s" ? known((value) => `${rate(value)}/s`) : formatOf(row);
  const tick = { s: shortTick, per_s: number, count: number }[row.unit] ?? format;
  return { format, tick, base: row.unit.startsWith("bytes") ? 1024 : 1 };
}

export const charted = (row) => `${heading(row)}${row.name === "behind" ? ", in steps" : ""}`;

// A round time beside an axis.
const shortTick = (seconds) => (seconds === 0 ? "0 s" : short(seconds).replace(/\.0+(?= )/, ""));
