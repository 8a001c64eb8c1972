// The page: which view is shown, light or dark, the link to the server, the token.

import { ShardPage, WorkerPage } from "./details.js";
import { h, setAttribute, setText } from "./dom.js";
import { Job } from "./job.js";
import { Overview } from "./overview.js";

const $ = (id) => document.getElementById(id);
const main = $("main");
let view = null, viewName = null, isDue = false;

const job = new Job(draw, showLink, askForToken);

function viewFor(path) {
  const found = /^#\/(shard|worker)\/(\d{1,6})$/.exec(path);
  if (!found) return new Overview(job);
  return found[1] === "shard" ? new ShardPage(job, Number(found[2])) : new WorkerPage(job, Number(found[2]));
}

// Draws with the next frame, once, however many looks have come; not at all while nobody sees the page.
function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    if (job.now) render();
  });
}

function render() {
  const path = /^#\/(shard|worker)\//.test(location.hash) ? location.hash : "#/";
  if (viewName !== path) {
    const isFirst = viewName === null;
    view = viewFor(path);
    viewName = path;
    main.replaceChildren(...view.elements);
    const isDetail = Boolean(view.head);
    $("crumbs").replaceChildren(...(isDetail ? [h("a", { href: "#/" }, "← Overview")] : []));
    if (!isFirst) { main.focus({ preventScroll: true }); window.scrollTo(0, 0); }
  }
  const { now } = job;
  $("run").replaceChildren(now.run_id || "no job yet", h("small", {}, now.consistency ? `${now.consistency}, ${now.reduction}` : ""));
  document.title = `${now.headline} · ${now.run_id || "psd"}`;
  view.update(Number(document.querySelector("input[name=range]:checked").value));
}

function showLink(state) {
  const words = { live: "live", lost: "connection lost, trying again", ended: "the dashboard has ended" };
  setText($("link"), words[state]);
  setAttribute($("link"), "data-is", state);
}

// -- the token ------------------------------------------------------------------------------------------------------------

function askForToken() {
  setText($("link"), "waiting for the token");
  main.hidden = true;
  $("enter").hidden = false;
  $("token").focus();
}

async function enter(token) {
  const reply = await fetch("/api/enter", { method: "POST", body: JSON.stringify({ token }) }).catch(() => null);
  if (reply?.ok) {
    $("enter").hidden = true;
    main.hidden = false;
    job.connect();
    return true;
  }
  setText($("refused"), reply ? (await reply.json()).error : "The dashboard does not answer.");
  return false;
}

$("enter").addEventListener("submit", (event) => {
  event.preventDefault();
  enter($("token").value);
});

// -- light and dark -------------------------------------------------------------------------------------------------------

const system = matchMedia("(prefers-color-scheme: dark)");
const stored = () => { try { return localStorage.getItem("psd-theme"); } catch { return null; } };

function applyTheme() {
  const theme = stored() ?? (system.matches ? "dark" : "light");
  setAttribute(document.documentElement, "data-theme", theme);
  setText($("theme"), theme === "dark" ? "Light" : "Dark");
  setAttribute($("theme"), "aria-label", `Use ${theme === "dark" ? "light" : "dark"} colours`);
  draw();
}

$("theme").addEventListener("click", () => {
  const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("psd-theme", other); } catch { document.documentElement.dataset.theme = other; }
  applyTheme();
});
system.addEventListener("change", applyTheme);

// -- begin ----------------------------------------------------------------------------------------------------------------

for (const range of document.querySelectorAll("input[name=range]")) range.addEventListener("change", draw);
window.addEventListener("hashchange", draw);
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
applyTheme();

const given = /^#token=(.+)$/.exec(location.hash);
if (given) {
  history.replaceState(null, "", location.pathname);  // so that it is in no bookmark and no picture of the screen
  enter(decodeURIComponent(given[1])).then((isIn) => { if (!isIn) askForToken(); });
} else {
  job.connect();
}
