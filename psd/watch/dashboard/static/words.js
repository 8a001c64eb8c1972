// Numbers and times as people read them; the same words as psdctl's (psd/watch/words.py).

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${unit === 0 || count >= 100 ? count.toFixed(0) : count.toFixed(1)} ${units[unit]}`;
}

export const perSecond = (count) => `${bytes(count)}/s`;

export function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 120) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 120) return `${minutes} min ${whole % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function short(seconds) {
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toPrecision(3)} ms`;
  return duration(seconds);
}

// Three digits where three say enough; no exponent unless there has to be one.
export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e7 || size < 1e-4) return value.toExponential(2);
  if (size >= 100) return Math.round(value).toLocaleString("en");
  return value.toPrecision(3).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

export const whole = (value) => value.toLocaleString("en");
export const rate = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));
export const share = (value) => `${Math.round(value * 100)}%`;
export const seen = (seconds) => (seconds < 0 ? "never" : `${duration(seconds)} ago`);
export const clockTime = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
