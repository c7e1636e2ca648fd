// Shows /status and refreshes it. Strings from the server become text, never markup.
import { Chart } from "./charts.js";
import { element } from "./elements.js";
import { gained, held, tenants } from "./tables.js";
import { bytes, count, duration, milliseconds, percent, ratio, timeOfDay } from "./words.js";

const EVERY = 5000; // milliseconds; the server samples as often
const PATIENCE = 4000;
const SOURCES = {
  history: "History",
  own: "Own text",
  siblings: "Siblings",
  namespace: "Other problems",
  twin: "Twins",
  model: "Workers' own drafter",
};
const LEVELS = { bad: "Broken", warn: "Attention", info: "Note" };
const at = (id) => document.getElementById(id);

const share = (part, whole) => (whole > 0 ? part / whole : null);
const lookups = (some) => some.lookups_hit + some.lookups_miss;

const charts = [
  ["Cache hit rate", percent, 1, [["hit_rate", ""]]],
  ["Tokens per step", ratio, 2, [["tokens_per_step", ""]]],
  ["Draft and accepted tokens per second", count, 10, [["draft_tokens", "draft"], ["accepted_tokens", "accepted"]]],
  ["Draft time per batch", milliseconds, 0.001, [["draft_p50", "median"], ["draft_p99", "99th percentile"]]],
  ["Running sessions", count, 10, [["sessions", ""]]],
  ["Memory of the index", bytes, 1 << 20, [["index_bytes", ""]]],
].map(([title, format, least, lines]) => new Chart(at("charts"), { title, format, least, lines }));

function tiles(status) {
  const { totals, gains } = status;
  const since = (value, of) => (value === null ? "none since the start" : `since the start: ${value} ${of}`);
  const part = (hits, all, unit) => since(all ? percent(hits / all) : null, `of ${count(all)} ${unit}`);
  return [
    ["known", "Cache hit rate", percent(gains.recent.known),
      part(totals.lookups_hit, lookups(totals), "sessions")],
    ["steps", "Tokens per step", ratio(gains.recent.tokens_per_step),
      since(gains.totals.steps ? ratio(gains.totals.tokens_per_step) : null, `in ${count(gains.totals.steps)} steps`)],
    ["accepted", "Acceptance rate", percent(gains.recent.acceptance),
      part(totals.accepted_tokens, totals.draft_tokens, "tokens")],
    ["sessions", "Running sessions", count(totals.sessions), `on ${count(totals.streams)} stream${totals.streams === 1 ? "" : "s"}`],
    ["memory", "Memory of the index", bytes(totals.index_bytes),
      `${percent(totals.index_bytes / status.memory_bytes)} of ${bytes(status.memory_bytes)}`],
    ["store", "Store", bytes(status.store_bytes), room(status)],
  ].map(([id, name, value, note]) => {
    const tile = element("div", "", element("dt", "", name), element("dd", "", value), element("dd", "quiet", note));
    tile.id = `tile-${id}`;
    return tile;
  });
}

// The size limit of the store and the free space on its disk. Redis may have no limit, and its disk is unknown.
function room(status) {
  const { store_bytes: held, store_limit_bytes: limit, disk_free_bytes: free, disk_size_bytes: size } = status;
  const parts = [];
  if (held !== null && limit !== null) parts.push(`${percent(held / limit)} of ${bytes(limit)}`);
  if (free !== null) parts.push(`${bytes(free)} free of ${bytes(size)}`);
  return parts.join("; ") || (held === null ? "unknown" : "no limit");
}

// The share that the store has of its limit, or of what it can have on its disk. null if unknown. What others have on the
// disk does not count: the label says how much is free.
function fullness({ store_bytes: held, store_limit_bytes: limit, disk_free_bytes: free }) {
  if (held === null) return null;
  if (free === null) return limit === null ? null : held / limit;
  return held / Math.min(limit ?? Infinity, held + free);
}

function meter(value, label, high = 1) {
  const made = element("meter");
  Object.assign(made, { min: 0, max: 1, high, value: value ?? 0 });
  made.setAttribute("aria-label", label);
  return made;
}

function hint({ level, title, text }) {
  return element("li", level, element("strong", "", `${LEVELS[level]}: ${title}`), element("p", "", text));
}

function source([name, { draft_tokens: drafted, accepted_tokens: accepted }]) {
  const part = share(accepted, drafted);
  const figure = drafted ? `${percent(part)} of ${count(drafted)}` : "nothing drafted";
  const item = element("li", "", element("span", "", SOURCES[name] ?? name), element("span", "quiet", figure));
  item.append(meter(part, `${SOURCES[name] ?? name}: ${figure}`));
  item.id = `source-${name}`;
  return item;
}

function shard({ name, address, me, state }) {
  const serves = state === "SERVING";
  const words = serves ? "serving" : state.startsWith("NOT_SERVING") ? "not serving" : state;
  const level = serves ? "good" : state.startsWith("not asked") || state.startsWith("its cert") ? "info" : "bad";
  const where = element("span", "", name, me ? " (this shard)" : "");
  if (name !== address) where.append(element("span", "quiet", ` ${address}`));
  const shown = element("span", `pill ${level}`, words.startsWith("UNAVAILABLE") || words.startsWith("DEADLINE") ? "does not answer" : words);
  shown.title = state;
  return element("li", "", where, shown);
}

function line({ time, level, event, details }) {
  const said = new Date(time);
  const when = element("time", "", Number.isNaN(said.getTime()) ? time : timeOfDay(said));
  when.dateTime = time;
  const tag = element("span", `tag ${level === "warning" ? "warn" : "bad"}`, level);
  return element("li", "", when, tag, event, ...(details ? [element("small", "", details)] : []));
}

function show(status) {
  document.title = `${status.shard} · HistoSpec`;
  at("shard").textContent = status.shard;
  at("about").textContent = `HistoSpec ${status.version} · up for ${duration(status.uptime_seconds)} · store: ${status.store}`;
  const broken = status.hints.some((some) => some.level === "bad");
  if (status.ready) state(...(broken ? ["serving, with faults", "bad"] : ["serving", "good"]));
  else state(...("drain" in status.waiting ? ["draining", "warn"] : ["opening", "info"]));
  at("hints").replaceChildren(...status.hints.map(hint));
  if (!status.hints.length) at("hints").append(element("li", "good", element("strong", "", "All is well")));
  at("tiles").replaceChildren(...tiles(status));
  at("tile-memory").children[1].after(meter(status.totals.index_bytes / status.memory_bytes, "Share of the budget", 0.9));
  const full = fullness(status);
  if (full !== null) at("tile-store").children[1].after(meter(full, "Share of the limit, or of the free space if that is less", 0.9));
  for (const chart of charts) chart.show(status.series, status.now);
  at("sources").replaceChildren(...Object.entries(status.sources).map(source));
  at("shards").replaceChildren(...status.shards.map(shard));
  at("shards-note").textContent = status.shards.length > 1 ? "Health as seen from this shard" : "--peers names no other shards";
  const more = status.namespaces_in_all - status.namespaces.length;
  at("gains").hidden = !status.namespaces_in_all;
  at("namespaces-note").textContent = !status.namespaces_in_all
    ? "None yet: the first session or ingest creates one"
    : more > 0 ? `The ${status.namespaces.length} largest of ${count(status.namespaces_in_all)}` : "Contents of the index";
  for (const table of [gained, held]) table.show(status.namespaces);
  at("sharing").hidden = !status.tenants.length;
  tenants.show(status.tenants);
  at("lines").replaceChildren(...status.lines.map(line));
  if (!status.lines.length) at("lines").append(element("li", "quiet", "None since the start"));
  at("main").setAttribute("aria-busy", "false");
}

function state(text, level) {
  if (at("state").textContent !== text) at("state").textContent = text; // so that a screen reader says it once
  at("state").className = `pill ${level}`;
}

let answered = null; // time of the last answer

async function look() {
  try {
    const answer = await fetch("status", { signal: AbortSignal.timeout(PATIENCE), cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    show(await answer.json());
    answered = new Date();
    at("away").hidden = true;
    at("main").classList.remove("stale");
    at("updated").textContent = `Updated ${timeOfDay(answered)}, every ${EVERY / 1000} seconds`;
  } catch (error) {
    const from = answered ? `; the numbers below are from ${timeOfDay(answered)}` : "";
    const text = `The server does not answer${from}. Retrying.`;
    if (at("away").textContent !== text) at("away").textContent = text;
    at("away").hidden = false;
    at("main").classList.add("stale");
    state("no answer", "bad");
  }
}

async function watch() {
  if (!document.hidden) await look();
  setTimeout(watch, EVERY);
}

document.addEventListener("visibilitychange", () => document.hidden || look());
watch();
