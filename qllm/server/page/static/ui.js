// The live page: takes the server's messages and shows them. No framework, no build step.

import { Charts } from "./charts.js";
import { $, arrange, call, cells, count, drafted, events, ms, recell, residents } from "./page.js";
import { start as startTalk } from "./talk.js";
import { Timeline, trackOf } from "./timeline.js";

const TRACKS = ["LS", "BE"];
const MAX_PREEMPTIONS = 40;
const RATE_S = 2; // seconds over which a rate is computed
const WORDS = {
  ls: ["LS", "latency-sensitive: a person waits for the answer"],
  be: ["BE", "best-effort: a job that can wait"],
  pass: ["pass", "one run through the layers of the model, for the rows of one step"],
  layer: ["layer", "a pass does one layer after the other; between two of them, or between two experts of one, it may stop"],
  preempt: ["to preempt", "to stop a pass at a boundary because a more urgent request has arrived"],
  park: ["parked", "stopped at a boundary, its state kept; it goes on later with the same bits"],
  latency: ["stopped in", "from the arrival of the urgent request to the pass being parked"],
  back: ["back after", "how long the pass was parked before it went on where it had stopped"],
  ttft: ["TTFT", "time to first token, from arrival, queueing included"],
  target: ["target", "the TTFT that the request asks for (slo), or that the server promises (ls_slo)"],
  status: ["status", "waiting holds no KV yet; running takes part in passes; parked is in a pass that was stopped"],
  stops: ["stops", "how often a pass with the request was preempted"],
  kv: ["KV", "keys and values of the tokens so far, in blocks; a request waits until there are blocks for it"],
  segment: ["longest segment", "the longest work between two boundaries so far: an arrival waits no longer for a stop"],
  draft: ["drafted tokens", "proposed next tokens, which the model verifies several at once; accepted ones are those that it chooses too"],
  batch: ["batch", "a file of requests, one per line; each is served as BE"],
};

const timeline = new Timeline($("timeline"));
const charts = new Charts(Object.fromEntries(["ttft", "rate", "queue", "kv"].map((name) => [name, $(`chart-${name}`)])));
let engine = null; // id of the engine that the numbers belong to
let samples = []; // [engine's ms, LS tokens, BE tokens, preemptions, expert bytes]
let preemptions = []; // latest first
let firsts = new Map(); // TTFT of preempting requests, by request name
let isListStale = false;
let whole = null; // the last message that listed the requests
let kvFrac = 0;

// -- small things

function text(id, value) {
  if ($(id).textContent !== value) $(id).textContent = value; // unchanged text is not painted again
}

function state(kind, words) {
  $("state").dataset.state = kind;
  text("state", words);
  timeline.isLive = kind === "live";
  document.body.classList.toggle("is-down", kind !== "live");
}

function banner(head, words) {
  $("banner").hidden = !head;
  if (!head) return;
  const bold = document.createElement("b");
  bold.textContent = head;
  if ($("banner").textContent !== head + words) $("banner").replaceChildren(bold, words);
}

function chip(id, label, value) {
  if (!value || $(id).dataset.value === value) return;
  $(id).dataset.value = value;
  const bold = document.createElement("b");
  bold.textContent = value;
  $(id).replaceChildren(`${label} `, bold);
  $(id).hidden = false;
}

function noRow(columns, words) {
  const row = cells([words]);
  row.className = "none";
  row.cells[0].colSpan = columns;
  return row;
}

// -- messages

function take(message) {
  chip("model", "model", message.model);
  chip("policy", "policy", message.policy);
  if (message.down !== undefined) { showDown(message); return; }
  if (engine !== message.engine) {
    engine = message.engine;
    samples = [];
    firsts = new Map();
    timeline.clear();
  }
  banner("");
  state("live", "live");
  if (message.entries === undefined) {
    text("timeline-empty", "This engine's loop runs on the device and keeps no record of its passes.");
  } else {
    timeline.take(message);
    for (const entry of message.entries) takeEntry(entry, message.time_s - message.now_ms / 1000);
    takeNumbers(message);
  }
  $("timeline-empty").hidden = timeline.hasWork;
  if (message.counts) showWhole(message);
}

function takeEntry([what, at, ...rest], wallS) {
  if (what === "first") {
    const [track, name, ttft] = rest;
    charts.ttft(wallS + at / 1000, trackOf(track), Math.max(ttft, 0.01));
    firsts.set(name, ttft);
    if (firsts.size > 500) firsts.delete(firsts.keys().next().value);
    isListStale = true;
  } else if (what === "preempted") {
    const [latency, track, layer, rows, names, of, name] = rest;
    preemptions.unshift({ at, wallS: wallS + at / 1000, latency, track, layer, rows, names, of, name, engine });
    preemptions.length = Math.min(preemptions.length, MAX_PREEMPTIONS);
    isListStale = true;
  } else if (what === "held" && rest[3]) {
    const [until, track, layer] = rest;
    const found = preemptions.find((p) => Math.abs(p.at - at) < 0.02 && p.track === track && p.layer === layer);
    if (found) found.back = until - at;
    isListStale = true;
  }
}

function takeNumbers(message) {
  const { output_tokens: tokens } = message;
  samples.push([message.now_ms, tokens.LS, tokens.BE, message.num_preemptions, message.expert_bytes, message.ls_ns, message.be_ns]);
  while (samples.length > 2 && samples[1][0] < message.now_ms - 1000 * RATE_S) samples.shift();
  kvFrac = message.kv_blocks_used / message.kv_blocks;
}

// The rate per second of number `i` in the samples.
function rate(i) {
  const of = samples.filter((sample) => sample[i] !== undefined);
  if (of.length < 2) return 0;
  const [first, last] = [of[0], of[of.length - 1]];
  return Math.max(0, (1000 * (last[i] - first[i])) / Math.max(1, last[0] - first[0]));
}

const perSecond = (value) => (value >= 100 ? value.toFixed(0) : value.toFixed(value >= 10 || value === 0 ? 0 : 1));

// -- once a second

function showWhole(message) {
  whole = message;
  const sum = { waiting: 0, running: 0, parked: 0 };
  for (const track of TRACKS) {
    const counts = message.counts[track];
    for (const name of Object.keys(sum)) sum[name] += counts[name];
    const said = Object.entries(counts).filter(([, n]) => n).map(([name, n]) => `${n} ${name}`);
    text(`count-${track}`, said.join(", ") || "no requests");
    const ttft = message.ttft_ms[track];
    text(`ttft-${track}`, ttft ? ms(ttft.p50) : "–");
    const none = said.length ? "none has ended" : "nothing measured yet";
    text(`ttft-${track}-more`, ttft ? `p90 ${ms(ttft.p90)}, p99 ${ms(ttft.p99)}` : none);
    text(`rate-${track}`, perSecond(rate(TRACKS.indexOf(track) + 1)));
  }
  if (message.entries !== undefined) showEngine(message);
  charts.point([message.time_s, rate(1), rate(2), sum.waiting, sum.running, sum.parked, 100 * kvFrac]);
  text("chart-rate-now", TRACKS.map((track, i) => `${track} ${perSecond(rate(i + 1))}`).join(", "));
  text("chart-queue-now", `${sum.waiting} waiting, ${sum.running} running, ${sum.parked} parked`);
  text("chart-kv-now", `${(100 * kvFrac).toFixed(0)} %`);
  const [ls, be] = TRACKS.map((track) => message.ttft_ms[track]);
  text("chart-ttft-now", [ls && `LS ${ms(ls.p50)}`, be && `BE ${ms(be.p50)}`].filter(Boolean).join(", "));
  showRequests(message);
  if (isListStale) showPreemptions();
}

const percent = (part) => `${(100 * part).toFixed(part < 0.1 ? 1 : 0)} %`;

function showEngine(message) {
  text("kv-now", `${(100 * kvFrac).toFixed(0)} %`);
  text("kv-more", `${message.kv_blocks_used.toLocaleString("en")} of ${count(message.kv_blocks, "block")}`);
  text("preempt-rate", perSecond(rate(3)));
  text("preempt-total", message.num_preemptions ? `${message.num_preemptions.toLocaleString("en")} in all` : "none so far");
  const bytes = rate(4);
  const rings = Object.entries(message.ring_use || {}).map(([track, use]) => `${track} ${(100 * use).toFixed(0)} %`);
  const [longest, most] = [message.longest_segment_ms, message.max_segment_ms];
  const facts = [];
  const [ls, be] = [rate(5), rate(6)];
  const floor = message.min_be_share ? `, at least ${percent(message.min_be_share)}` : "";
  if (ls + be) facts.push(`BE has ${percent(be / (ls + be))} of the time${floor}`);
  if (bytes) facts.push(`experts read ${(bytes / 1e9).toFixed(2)} GB/s`);
  const drafts = drafted(message);
  if (drafts) facts.push(drafts);
  const experts = residents(message.experts);
  if (experts) facts.push(experts);
  for (const [name, one] of Object.entries(message.lossy || {})) {
    const may = one.open ? `may answer, at most ${percent(one.bound)} differ` : "may not answer";
    facts.push(`lossy ${name} ${may}, ${count(one.tokens, "token")}`);
  }
  if (rings.length) facts.push(`request rings ${rings.join(", ")}`);
  const isLong = most && longest > most;
  const segment = `longest segment ${ms(longest)}${most ? `, of ${ms(most)} declared` : ""}`;
  const bold = document.createElement("span");
  bold.className = isLong ? "bad" : "";
  bold.textContent = segment;
  const rest = facts.map((fact) => ` · ${fact}`).join("");
  if ($("engine-more").textContent !== segment + rest) $("engine-more").replaceChildren(bold, rest);
}

// A request's latency target and its state, in words.
function target(row) {
  if (!row.ttft_target_ms) return ["–", ""];
  const isLate = (row.ttft_ms ?? row.age_ms) > row.ttft_target_ms;
  const isOpen = row.ttft_ms === null && !isLate;
  return [`${ms(row.ttft_target_ms)}${isLate ? " missed" : isOpen ? "" : " met"}`, isLate ? "bad" : isOpen ? "" : "good"];
}

const requestRows = new Map(); // by name

async function change({ id, name }, what) {
  try {
    await call(`/v1/requests/${encodeURIComponent(id)}`, {
      method: "PATCH",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(what),
    });
    text("requests-state", "");
  } catch (error) {
    text("requests-state", `${name}: ${error.message}`);
  }
}

// Buttons that pause a request or change its class; `row.now` is its last state from the server.
function changes(now) {
  const box = document.createElement("span");
  for (const act of ["pause", "class"]) {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.act = act;
    const what = () => (act === "pause" ? { paused: now.status !== "paused" } : { priority: trackOf(now.class) === "LS" ? "BE" : "LS" });
    button.addEventListener("click", () => change(now, what()));
    box.append(button, " ");
  }
  return box;
}

// A batch line has no id of a request, so its buttons do nothing.
function nameChanges(row, { id, name, status, class: of }) {
  const words = { pause: status === "paused" ? "go on" : "pause", class: trackOf(of) === "LS" ? "to BE" : "to LS" };
  for (const button of row.querySelectorAll("button")) {
    const word = words[button.dataset.act];
    if (button.textContent !== word) button.textContent = word;
    button.setAttribute("aria-label", `${word}: ${name}`);
    button.disabled = !id;
  }
}

function requestRow(r) {
  const isReading = !r.output_tokens && r.computed_tokens > 0 && r.computed_tokens < r.prompt_tokens;
  const out = isReading ? `${Math.floor((100 * r.computed_tokens) / r.prompt_tokens)} % read` : r.output_tokens;
  const [words, kind] = target(r);
  const values = [r.name, r.class, r.status, ms(r.age_ms), ms(r.ttft_ms), words, r.prompt_tokens, out, r.preemptions ?? "–"];
  let row = requestRows.get(r.name);
  if (!row) {
    const now = {};
    row = cells([...values, changes(now)]);
    row.now = now;
  }
  Object.assign(row.now, r);
  recell(row, values);
  nameChanges(row, r);
  row.cells[0].className = "name";
  row.cells[0].title = r.name;
  row.cells[1].className = `${trackOf(r.class)}-ink left`;
  row.cells[2].className = "left";
  row.cells[5].className = kind;
  return row;
}

function showRequests(message) {
  const total = Object.values(message.counts).flatMap(Object.values).reduce((a, b) => a + b, 0);
  text("requests-more", total > message.requests.length ? `${message.requests.length} of ${total}` : total ? String(total) : "");
  const rows = message.requests.map((r) => [r.name, requestRow(r)]);
  requestRows.clear();
  for (const [name, row] of rows) requestRows.set(name, row);
  if (rows.length) arrange($("requests"), rows.map(([, row]) => row));
  else if (!$("requests").querySelector(".none")) $("requests").replaceChildren(noRow(10, "No open requests."));
}

function place(p) {
  return `${p.track} ${Number.isInteger(p.layer) ? "before" : "in"} layer ${Math.floor(p.layer)}`;
}

function preemptionRow(p) {
  const values = [null, place(p), ms(p.latency), p.back === undefined ? "parked" : ms(p.back), p.name || "–", ms(firsts.get(p.name))];
  if (p.row) {
    recell(p.row, [p.row.firstChild, ...values.slice(1)]);
    return p.row;
  }
  const at = document.createElement("button");
  at.type = "button";
  at.className = "link";
  at.textContent = new Date(1000 * p.wallS).toLocaleTimeString([], { hour12: false });
  at.setAttribute("aria-label", `${at.textContent}: show it in the timeline`);
  at.addEventListener("click", () => {
    span(1000);
    hold(true);
    timeline.show(p.at);
    $("timeline-section").scrollIntoView({ block: "nearest" });
  });
  p.row = cells([at, ...values.slice(1)]);
  p.row.cells[1].className = `${p.track}-ink left`;
  p.row.cells[1].title = p.names.join(", ") + (p.names.length && p.rows > p.names.length ? ` and ${p.rows - p.names.length} more` : "");
  p.row.cells[4].className = "name";
  p.row.cells[4].title = p.name ? `${p.of} ${p.name}` : "";
  return p.row;
}

function showPreemptions() {
  isListStale = false;
  const of = preemptions.filter((p) => p.engine === engine);
  if (of.length) arrange($("preemptions"), of.map(preemptionRow));
}

// -- an engine that is gone, a server that is gone

function showDown(message) {
  state("down", "stopped");
  const back = message.back_in_s ? ` It is expected back in ${count(message.back_in_s, "second")}.` : "";
  const open = message.num_open ? ` ${count(message.num_open, "request")} wait for it.` : "";
  const why = message.down.charAt(0).toUpperCase() + message.down.slice(1);
  banner("The engine has stopped.", ` ${why}.${back}${open}`);
  $("timeline-empty").hidden = true;
}

async function watch() {
  const model = new URLSearchParams(location.search).get("model"); // by default the first model
  const ofModel = model === null ? "" : `&model=${encodeURIComponent(model)}`;
  let since = 0;
  for (;;) {
    let againMs = 1000;
    if (document.hidden) await new Promise((resume) => { document.addEventListener("visibilitychange", resume, { once: true }); });
    const stop = new AbortController();
    const leave = () => { if (document.hidden) stop.abort(); }; // a hidden page makes no requests
    document.addEventListener("visibilitychange", leave);
    try {
      const answer = await call(`/ui/events?since=${since}${ofModel}`, { signal: stop.signal });
      for await (const { id, data } of events(answer)) {
        since = id || since;
        take(data);
      }
      state("down", "the server has ended the stream");
    } catch (error) {
      if (error.name === "AbortError") againMs = 0;
      else {
        againMs = 3000;
        state("down", error.status === 401 ? "needs a key" : "not connected");
        if (error.status === 401) $("key").placeholder = "needed";
        if (error.status === 401) banner("This server needs an API key.", " Type one at the top of the page.");
        else banner("No news.", ` ${error.message}; trying again.`);
      }
    }
    document.removeEventListener("visibilitychange", leave);
    await new Promise((resume) => { setTimeout(resume, againMs); wake = resume; });
  }
}

let wake = () => {};

// -- controls

function span(widthMs) {
  timeline.spanMs = widthMs;
  timeline.isDirty = true;
  for (const button of document.querySelectorAll("[data-span]")) button.setAttribute("aria-pressed", String(Number(button.dataset.span) === widthMs));
}

function hold(isHeld) {
  timeline.hold(isHeld ? timeline.edgeMs : null);
  $("hold").setAttribute("aria-pressed", String(isHeld));
  $("hold").textContent = isHeld ? "Go on" : "Hold";
}

const THEMES = { auto: "automatic", light: "light", dark: "dark" };

function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  localStorage.setItem("qllm-theme", name);
  $("theme").textContent = `Theme: ${THEMES[name]}`;
  $("theme").dataset.name = name;
  timeline.restyle();
  charts.make();
}

function tip(word) {
  const box = $("tip");
  if (!word) { box.hidden = true; return; }
  box.textContent = WORDS[word.dataset.word][1];
  box.hidden = false;
  const at = word.getBoundingClientRect();
  const left = Math.min(at.left, innerWidth - box.offsetWidth - 12);
  box.style.left = `${Math.max(8, left) + scrollX}px`;
  box.style.top = `${at.bottom + 6 + scrollY}px`;
}

function startWords() {
  for (const word of document.querySelectorAll("dfn")) {
    word.tabIndex = 0;
    word.setAttribute("aria-describedby", "tip");
    for (const on of ["mouseenter", "focus"]) word.addEventListener(on, () => tip(word));
    for (const off of ["mouseleave", "blur"]) word.addEventListener(off, () => tip(null));
  }
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip(null); });
  for (const [name, meaning] of Object.values(WORDS)) {
    const [term, words] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = name;
    words.textContent = meaning;
    $("words").append(term, words);
  }
}

$("key").value = sessionStorage.getItem("qllm-key") || "";
$("key").addEventListener("change", () => { sessionStorage.setItem("qllm-key", $("key").value); wake(); });
for (const button of document.querySelectorAll("[data-span]")) button.addEventListener("click", () => span(Number(button.dataset.span)));
$("hold").addEventListener("click", () => hold(timeline.heldAt === null));
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme(names[(names.indexOf($("theme").dataset.name) + 1) % names.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme($("theme").dataset.name));
theme(localStorage.getItem("qllm-theme") in THEMES ? localStorage.getItem("qllm-theme") : "auto");
setInterval(() => text("timeline-now", timeline.hasWork ? timeline.text() : ""), 5000);
startWords();
startTalk();
watch();
