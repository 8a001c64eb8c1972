// How a visitor wants curves drawn: kept in this browser, where it lets pages keep anything.

const PLACE = "psd-curves";

function stored() {
  try { return JSON.parse(localStorage.getItem(PLACE)) ?? {}; } catch { return {}; }
}

const found = stored();

// smoothing: weight of the past, 0 to 0.99. isMean: one line for all workers, else one for each. logs: names of the curves with a
// logarithmic axis. earlier: names of the earlier runs that are drawn, too.
export const settings = {
  smoothing: Math.min(0.99, Math.max(0, Number(found.smoothing) || 0)),
  isMean: found.isMean !== false,
  logs: new Set(Array.isArray(found.logs) ? found.logs : []),
  earlier: new Set(Array.isArray(found.earlier) ? found.earlier : []),
};

export function keepSettings() {
  try {
    localStorage.setItem(PLACE, JSON.stringify({ ...settings, logs: [...settings.logs], earlier: [...settings.earlier] }));
  } catch { /* they hold for as long as the page is open */ }
}
