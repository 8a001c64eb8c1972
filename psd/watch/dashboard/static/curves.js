// The arithmetic of curves: smoothing, the points of several workers put together, round numbers on a logarithmic axis. Knows
// neither the page nor the job. Points are [x, y, ...] in the order of x; y is null where it was no number.

// An exponential moving average, debiased as TensorBoard's, so that it does not begin at 0. weight: 0, no smoothing, to below 1.
export function smoothed(points, weight) {
  if (!weight) return points;
  let last = 0, count = 0;
  return points.map(([x, y]) => {
    if (y === null) return [x, null];
    last = last * weight + y * (1 - weight);
    count += 1;
    return [x, last / (1 - weight ** count)];
  });
}

// No more points than there are columns: the mean of those that would fall on one; no number where one of them is none.
export function thinned(points, low, high, columns) {
  if (points.length <= columns) return points;
  const bins = new Map();
  for (const [x, y] of points) {
    const bin = Math.min(columns - 1, Math.floor(((x - low) / (high - low || 1)) * columns));
    const found = bins.get(bin) ?? [bin, 0, 0];
    bins.set(bin, [bin, y === null || found[1] === null ? null : found[1] + y, found[2] + 1]);
  }
  const width = (high - low) / columns;
  return [...bins.values()].map(([bin, sum, count]) => [low + (bin + 0.5) * width, sum === null ? null : sum / count]);
}

// True if all who have a value at some place have the same there, and there is such a place for two of them.
export function areAlike(series) {
  const known = new Map();
  let isShared = false;
  for (const { points } of series) for (const [x, y] of points) {
    if (!known.has(x)) known.set(x, y);
    else if (known.get(x) !== y) return false;
    else isShared = true;
  }
  return isShared;
}

// The mean of several lines, [x, y], and the band between the lowest and the highest, [x, low, high]; between its points a line
// is straight. Ends where the last of those ends that are about abreast: else the mean would jump to the foremost at its end.
export function together(series, columns = Infinity) {
  const all = series.map(({ points }) => points).filter((points) => points.length);
  if (!all.length) return { mean: [], band: [] };
  const low = Math.min(...all.map((points) => points[0][0])), high = Math.max(...all.map((points) => points.at(-1)[0]));
  const ends = all.map((points) => points.at(-1)[0]).filter((end) => end >= high - (high - low) / 10);
  const end = Math.min(...ends);
  const lines = all.map((points) => thinned(points, low, high, columns));
  const xs = [...new Set(lines.flatMap((points) => points.map(([x]) => x)))].filter((x) => x <= end).sort((a, b) => a - b);
  const values = lines.map((points) => valuesAt(points, xs));
  const mean = [], band = [];
  xs.forEach((x, index) => {
    const here = values.map((line) => line[index]).filter((value) => value !== undefined);
    const known = here.filter((value) => value !== null);
    if (here.length) mean.push([x, known.length === here.length ? known.reduce((a, b) => a + b) / known.length : null]);
    if (known.length) band.push([x, Math.min(...known), Math.max(...known)]);
  });
  return { mean, band };
}

// The values of a line at these places: undefined where it has none, before its beginning, after its end, and beside a gap.
function valuesAt(points, xs) {
  let next = 0;
  return xs.map((x) => {
    while (next < points.length && points[next][0] < x) next += 1;
    const after = points[next], before = points[next - 1];
    if (after === undefined) return undefined;
    if (after[0] === x) return after[1];
    if (before === undefined || before[1] === null || after[1] === null) return undefined;
    return before[1] + ((x - before[0]) / (after[0] - before[0])) * (after[1] - before[1]);
  });
}

// Round numbers between two positive ends on a logarithmic axis, at most some eight: powers of ten; 2 and 5 times those, if that
// is too few.
export function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / 6));
  const found = [];
  for (let power = first; power <= last; power += every) {
    for (const factor of last - first <= 3 ? [1, 2, 5] : [1]) found.push(Number(`${factor}e${power}`));
  }
  return found.filter((value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9));
}
