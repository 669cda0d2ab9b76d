/* The statistics page: asks for /stats.json once a second while it is looked at, and plots what it says.
 *
 * Rates are differences of counters over the server's own clock; shares are over the last ten seconds, since a single
 * second often holds too little. A server that restarted breaks the lines. */
import { $, apiKey, bindTheme, formatCount, formatPercent, formatSeconds, formatShort, h, icon } from "./common.js";
import { Plot } from "./plot.js";
import { getJson } from "./stream.js";

const KEPT_S = 900;
const WINDOW_S = 10;
const samples = [];
let isPaused = false;
let timer = 0;
let failures = 0;

const millis = (v) => (v < 1000 ? `${v && v < 10 ? v.toFixed(1) : Math.round(v)} ms` : formatSeconds(v / 1000));
const percentiles = (name) => ["p50", "p90", "p99"].map((p) => ({ name: p, value: (s) => s.latency[name]?.[p] ?? null }));

const PLOTS = [
  { title: "Requests", series: [{ name: "running", value: (s) => s.engine.n_running }, { name: "waiting", value: (s) => s.engine.n_waiting }],
    format: formatShort, most: 4 },
  { title: "Tokens a second", series: [{ name: "output", value: (s) => s.outputRate }, { name: "prompt", value: (s) => s.promptRate }], format: formatShort, most: 10 },
  { title: "Key-value cache", hint: "Blocks held by requests, and those that only the prefix cache holds", format: formatPercent, most: 1,
    series: [{ name: "in use", value: (s) => s.used }, { name: "cached", value: (s) => s.cached }] },
  { title: "Prefix cache", hint: "Share of prompt tokens that did not have to be run", series: [{ name: "hit rate", value: (s) => s.hitRate }], format: formatPercent, most: 1 },
  { title: "Drafts", hint: "Share of drafted tokens that became output", series: [{ name: "accepted", value: (s) => s.acceptance }], format: formatPercent, most: 1 },
  { title: "Time to the first token", series: percentiles("ttft_ms"), format: millis, most: 4 },
  { title: "Time between tokens", series: percentiles("itl_ms"), format: millis, most: 4 },
  { title: "Time of a whole request", series: percentiles("e2e_ms"), format: millis, most: 4 },
  { title: "Time in the queue", series: percentiles("queue_ms"), format: millis, most: 4 },
].map((p) => new Plot(p));

const TILES = [
  ["Running", (s) => formatCount(s.engine.n_running), (s) => `${formatCount(s.engine.n_waiting)} waiting`],
  ["Output", (s) => (s.outputRate === null ? "-" : formatShort(s.outputRate)), () => "tokens/s"],
  ["Prompts", (s) => (s.promptRate === null ? "-" : formatShort(s.promptRate)), () => "tokens/s"],
  ["Cache in use", (s) => formatPercent(s.used || 0), (s) => `${formatCount(s.engine.blocks_used)} of ${formatCount(s.engine.blocks)} blocks`],
  ["Requests so far", (s) => formatShort(s.server.requests), (s) => `${formatCount(s.server.refused_busy)} refused as too many`],
  ["Connections", (s) => formatCount(s.server.connections), (s) => `of these streaming: ${formatCount(s.server.active_streams)}`],
  ["Preempted", (s) => formatCount(s.engine.n_preempted), (s) => `${formatCount(s.engine.n_error)} failed`],
  ["Up for", (s) => formatSeconds(s.uptime_s), (s) => `version ${s.version}`],
].map(([name, value, note]) => ({ value, note, dd: h("dd"), small: h("small"), name }));

/* What is plotted, from what the server says and what it said before. */
function derive(raw) {
  const s = { ...raw, t: performance.now() / 1000, clock: Date.now(), latency: raw.latency || {}, outputRate: null, promptRate: null,
    hitRate: null, acceptance: null };
  const e = s.engine;
  s.used = e.blocks ? e.blocks_used / e.blocks : null;
  s.cached = e.blocks ? e.blocks_cached / e.blocks : null;
  const last = samples[samples.length - 1];
  if (last && last.uptime_s > s.uptime_s) samples.length = 0; /* another server, other counters */
  const before = samples[samples.length - 1];
  if (before && s.uptime_s > before.uptime_s && s.t - before.t < 30) {
    const dt = s.uptime_s - before.uptime_s;
    s.outputRate = (e.output_tokens - before.engine.output_tokens) / dt;
    s.promptRate = (e.prompt_tokens - before.engine.prompt_tokens) / dt;
    const from = samples.find((x) => x.t >= s.t - WINDOW_S) || before;
    const cached = e.cached_tokens - from.engine.cached_tokens;
    const prompt = e.prompt_tokens - from.engine.prompt_tokens + cached;
    if (prompt > 0) s.hitRate = cached / prompt;
    const drafts = e.draft_tokens - from.engine.draft_tokens;
    if (drafts > 0) s.acceptance = (e.accepted_tokens - from.engine.accepted_tokens) / drafts;
  }
  return s;
}

function draw() {
  const span = Number($("span").value);
  for (const plot of PLOTS) plot.update(samples, span);
  const last = samples[samples.length - 1];
  if (!last) return;
  for (const tile of TILES) {
    tile.dd.firstChild.textContent = tile.value(last) + " ";
    tile.small.textContent = tile.note(last);
  }
}

function setServer(state, text) {
  $("server").className = `server is-${state}`;
  if ($("server-text").textContent !== text) $("server-text").textContent = text;
  document.body.classList.toggle("is-stale", state === "down");
}

async function poll() {
  clearTimeout(timer);
  if (isPaused || document.hidden) return;
  let wait = 1000;
  try {
    const s = derive(await getJson("/stats.json"));
    samples.push(s);
    while (samples[0].t < s.t - KEPT_S) samples.shift();
    failures = 0;
    setServer(s.status === "ready" ? "ready" : "loading", s.status === "ready" ? s.model : `${s.model}, ${s.status}`);
    $("key-form").hidden = true;
    draw();
  } catch (error) {
    failures++;
    wait = Math.min(15000, 1000 * 2 ** Math.min(failures, 4));
    if (error.kind === "key") {
      setServer("loading", "API key needed");
      $("key-form").hidden = false;
      return;
    }
    setServer(error.kind === "loading" ? "loading" : "down", error.kind === "loading" ? "The server is not ready" : `${error.message} Trying again.`);
  }
  clearTimeout(timer);
  timer = setTimeout(poll, wait);
}

function showPause() {
  const label = isPaused ? "Go on" : "Pause";
  $("pause").replaceChildren(icon(isPaused ? "play" : "pause"));
  $("pause").title = label;
  $("pause").setAttribute("aria-label", label);
}

$("tiles").append(...TILES.map((t) => {
  t.dd.append("- ", t.small);
  return h("div", {}, h("dt", {}, t.name), t.dd);
}));
$("plots").append(...PLOTS.map((p) => p.el));
$("span").addEventListener("change", draw);
$("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  showPause();
  poll();
});
$("key-form").addEventListener("submit", (e) => {
  e.preventDefault();
  apiKey.set($("key").value.trim(), apiKey.isRemembered());
  poll();
});
document.addEventListener("visibilitychange", poll);
bindTheme($("theme"));
showPause();
poll();
