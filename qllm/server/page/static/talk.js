// The chat and the batches: the page's requests to the server, in addition to the feed.

import { show } from "./markdown.js";
import { $, call, cells, events, ms } from "./page.js";

const history = [];
let answering = null; // the AbortController of the answer being read

// -- chat

function say(className, text) {
  const p = document.createElement("div");
  p.className = className;
  p.textContent = text;
  const first = $("talk").querySelector(".empty");
  if (first) first.remove();
  $("talk").append(p);
  $("talk").scrollTop = $("talk").scrollHeight;
  return p;
}

// The body of the next request: the conversation with the chosen options.
function body() {
  const system = $("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...history] : history;
  const found = { messages, stream: true, stream_options: { include_usage: true }, service_tier: $("tier").value };
  if ($("temperature").value) found.temperature = Number($("temperature").value);
  return JSON.stringify(found);
}

// The speed of an answer, in words.
function speed(served, firstMs, lastMs, usage) {
  if (firstMs === null) return `${served}, no text`;
  const said = `${served}, first text after ${ms(firstMs)}`;
  const tokens = usage && usage.completion_tokens;
  return tokens > 1 && lastMs > firstMs ? `${said}, then ${((1000 * (tokens - 1)) / (lastMs - firstMs)).toFixed(1)} tokens/s` : said;
}

async function ask(text) {
  history.push({ role: "user", content: text });
  say("user", text);
  const box = say("assistant", "");
  const mine = (answering = new AbortController());
  $("stop").disabled = false;
  const start = performance.now();
  let [said, first, last, usage, isDrawn] = ["", null, null, null, true];
  const draw = () => {
    if (isDrawn) return;
    isDrawn = true;
    show(box, said);
    $("talk").scrollTop = $("talk").scrollHeight;
  };
  try {
    const answer = await call("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: body(),
      signal: mine.signal,
    });
    const served = answer.headers.get("x-qllm-priority");
    for await (const { data: chunk } of events(answer)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage || usage;
      const delta = chunk.choices[0] && chunk.choices[0].delta.content;
      if (!delta) continue;
      last = performance.now() - start;
      first ??= last;
      said += delta;
      if (isDrawn) requestAnimationFrame(draw); // draws all text that arrives until then
      isDrawn = false;
    }
    draw();
    say("note", speed(served, first, last, usage));
  } catch (error) {
    draw();
    if (mine === answering) say("note", error.name === "AbortError" ? "stopped" : error.message);
  }
  if (mine !== answering) return; // the conversation was cleared
  history.push({ role: "assistant", content: said });
  answering = null;
  $("stop").disabled = true;
}

function clear() {
  if (answering) answering.abort();
  answering = null;
  history.length = 0;
  $("stop").disabled = true;
  const empty = document.createElement("p");
  empty.className = "empty";
  empty.textContent = "Ask as LS and as BE, and look at the timeline.";
  $("talk").replaceChildren(empty);
  $("text").focus();
}

// -- batches

async function save(fileId) {
  const blob = await (await call(`/v1/files/${fileId}/content`)).blob();
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${fileId}.jsonl`;
  link.click();
  URL.revokeObjectURL(link.href);
}

function button(text, label, action) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.setAttribute("aria-label", label);
  made.addEventListener("click", () =>
    action().then(showBatches, (error) => { $("upload-state").textContent = error.message; }));
  return made;
}

function actions(batch) {
  const span = document.createElement("span");
  if (batch.output_file_id) span.append(button("output", `Output of ${batch.id}`, () => save(batch.output_file_id)), " ");
  if (batch.error_file_id) span.append(button("errors", `Errors of ${batch.id}`, () => save(batch.error_file_id)), " ");
  if (["validating", "in_progress"].includes(batch.status)) {
    span.append(button("cancel", `Cancel ${batch.id}`, () => call(`/v1/batches/${batch.id}/cancel`, { method: "POST" })));
  }
  return span;
}

// The reason of a batch's status, in words.
function reason(batch) {
  const { total, completed, failed } = batch.request_counts;
  const errors = (batch.errors && batch.errors.data) || [];
  if (errors.length) {
    const of = errors[0].line ? `line ${errors[0].line}: ` : "";
    return `${of}${errors[0].message}${errors.length > 1 ? `, and ${errors.length - 1} more` : ""}`;
  }
  if (batch.status === "in_progress") return `${total - completed - failed} of ${total} lines left; each is a BE request`;
  if (batch.status === "completed" && failed) return `${failed} lines have an error: see the file`;
  return "";
}

function batchRow(batch) {
  const { total, completed, failed } = batch.request_counts;
  const why = reason(batch);
  const status = document.createElement("span");
  status.append(batch.status.replace("_", " "));
  if (why) {
    const more = document.createElement("div");
    more.className = "note";
    more.textContent = why;
    status.append(more);
  }
  const row = cells([batch.id, status, `${completed} of ${total}`, failed, actions(batch)]);
  row.cells[0].className = "name";
  row.cells[0].title = batch.id;
  row.cells[1].className = "text";
  if (failed) row.cells[3].className = "bad";
  return row;
}

function noBatches(text) {
  const row = cells([text]);
  row.className = "none";
  row.cells[0].colSpan = 5;
  $("batches").replaceChildren(row);
}

let shown = "";
let isBusy = false;

async function showBatches() {
  let data;
  try {
    ({ data } = await (await call("/v1/batches?limit=10")).json());
  } catch (error) {
    const isOff = error.status === 404;
    if (isOff || error.status === 401) noBatches(isOff ? "Batches need a folder: qllm serve MODEL --state-dir DIR" : error.message);
    $("upload").hidden = isOff;
    return;
  }
  isBusy = data.some((batch) => ["validating", "in_progress", "finalizing", "cancelling"].includes(batch.status));
  const now = JSON.stringify(data);
  if (now === shown) return; // an unchanged table keeps the keyboard's focus
  shown = now;
  if (data.length) $("batches").replaceChildren(...data.map(batchRow));
  else noBatches("No batches yet.");
}

async function upload(file) {
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", file);
  const { id } = await (await call("/v1/files", { method: "POST", body: form })).json();
  const [line] = (await file.slice(0, 1 << 20).text()).split("\n", 1);
  let endpoint = "/v1/chat/completions";
  try { endpoint = JSON.parse(line).url || endpoint; } catch { /* the server says what is wrong */ }
  await call("/v1/batches", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ input_file_id: id, endpoint, completion_window: "24h" }),
  });
}

export function start() {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("text").value.trim();
    if (!text || answering) return;
    $("text").value = "";
    ask(text);
  });
  $("clear").addEventListener("click", clear);
  $("stop").addEventListener("click", () => answering && answering.abort());
  $("upload").addEventListener("submit", (event) => {
    event.preventDefault();
    $("upload-state").textContent = "uploading";
    upload($("file").files[0]).then(
      () => { $("upload-state").textContent = "started"; isBusy = true; return showBatches(); },
      (error) => { $("upload-state").textContent = error.message; });
  });
  $("key").addEventListener("change", showBatches);
  showBatches();
  let turns = 0;
  setInterval(() => {
    turns += 1;
    if (!document.hidden && (isBusy || turns % 5 === 0)) showBatches();
  }, 2000);
}
