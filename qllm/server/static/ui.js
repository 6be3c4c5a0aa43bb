"use strict";

const $ = (id) => document.getElementById(id);
const history = [];
let readAt = null; // expert bytes, and when
let answering = null; // the AbortController of the answer being read

$("key").value = sessionStorage.getItem("qllm-key") || "";

function headers(more) {
  const key = $("key").value;
  return { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...more };
}

async function call(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers(options.headers) });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new Error(body && body.error ? body.error.message : `HTTP ${answer.status}`);
}

// Yields the JSON of each server-sent event; EventSource cannot send a key.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function row(cells, className) {
  const tr = document.createElement("tr");
  for (const cell of cells) {
    const td = document.createElement("td");
    if (cell instanceof Node) td.append(cell);
    else td.textContent = cell;
    tr.append(td);
  }
  if (className) tr.className = className;
  return tr;
}

// -- what happens now

const ms = (value) => (value === undefined || value === null ? "-" : value.toFixed(1));

function show(now) {
  $("model").textContent = now.model;
  $("policy").textContent = now.policy;
  $("kv").value = now.kv_frac;
  $("kv-text").textContent = `${(100 * now.kv_frac).toFixed(0)} %`;
  $("segment").textContent = `${ms(now.longest_segment_ms)} ms`;
  const rings = Object.entries(now.ring_use).map(([n, use]) => `${n} ${(100 * use).toFixed(1)} %`);
  $("rings").textContent = rings.join(", ") || "-";
  const grown = readAt === null ? 0 : Math.max(0, now.expert_bytes - readAt.bytes);
  const seconds = readAt === null ? 1 : now.time_s - readAt.time_s;
  $("experts").textContent = `${(grown / seconds / 1e9).toFixed(2)} GB/s`;
  readAt = { bytes: now.expert_bytes, time_s: now.time_s };
  $("frames").replaceChildren(...now.frames.map((f) =>
    row([f.state, `${f.layer} of ${f.num_layers}`, f.op, f.op === "EXPERTS" ? f.units_done : "",
      f.rows, f.tokens], f.state)));
  for (const [name, found] of Object.entries(now.classes)) {
    const cells = $(name).querySelectorAll("td");
    const ttft = found.ttft_ms || {};
    [found.waiting, found.running, found.parked, ms(ttft.p50), ms(ttft.p90), ms(ttft.p99)].forEach(
      (value, i) => { cells[i].textContent = value; });
  }
  $("requests").replaceChildren(...now.requests.map((r) =>
    row([r.id, r.class, r.status, r.prompt_tokens, r.output_tokens], r.class)));
  $("num-preemptions").textContent = now.preemptions.total;
  const at = new Date(1000 * now.time_s).toLocaleTimeString();
  for (const latency of now.preemptions.new_ms) {
    const item = document.createElement("li");
    item.textContent = `${at}  a pass was parked ${latency.toFixed(2)} ms after the arrival`;
    $("preemption-list").prepend(item);
  }
  while ($("preemption-list").children.length > 100) $("preemption-list").lastChild.remove();
}

async function watch() {
  for (;;) {
    let again = 1000;
    try {
      const answer = await call("/ui/events");
      $("state").textContent = "live";
      for await (const now of events(answer)) show(now);
      $("state").textContent = "the server has ended the stream; trying again";
    } catch (error) {
      $("state").textContent = error.message;
      again = 3000;
    }
    await new Promise((resume) => { setTimeout(resume, again); });
  }
}

// -- chat

function say(className, text) {
  const p = document.createElement("p");
  p.className = className;
  p.textContent = text;
  $("talk").append(p);
  $("talk").scrollTop = $("talk").scrollHeight;
  return p;
}

async function ask(text) {
  history.push({ role: "user", content: text });
  say("user", text);
  const p = say("assistant", "");
  answering = new AbortController();
  $("stop").disabled = false;
  const start = performance.now();
  let first = null;
  let tier = "";
  try {
    const answer = await call("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ messages: history, stream: true, service_tier: $("tier").value }),
      signal: answering.signal,
    });
    tier = answer.headers.get("x-qllm-priority");
    for await (const chunk of events(answer)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices[0] && chunk.choices[0].delta.content;
      if (delta && first === null) first = performance.now() - start;
      if (delta) p.textContent += delta;
      $("talk").scrollTop = $("talk").scrollHeight;
    }
    say("note", `${tier}, first text after ${ms(first)} ms`);
  } catch (error) {
    say("note", error.name === "AbortError" ? "stopped" : error.message);
  }
  history.push({ role: "assistant", content: p.textContent });
  answering = null;
  $("stop").disabled = true;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || answering) return;
  $("text").value = "";
  ask(text);
});
$("stop").addEventListener("click", () => answering && answering.abort());
$("key").addEventListener("change", () => sessionStorage.setItem("qllm-key", $("key").value));

// -- batches

async function save(fileId) {
  const blob = await (await call(`/v1/files/${fileId}/content`)).blob();
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${fileId}.jsonl`;
  link.click();
  URL.revokeObjectURL(link.href);
}

function button(text, action) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", () =>
    action().then(showBatches, (error) => { $("upload-state").textContent = error.message; }));
  return made;
}

function actions(batch) {
  const span = document.createElement("span");
  if (batch.output_file_id) span.append(button("output", () => save(batch.output_file_id)));
  if (batch.error_file_id) span.append(button("errors", () => save(batch.error_file_id)));
  if (["validating", "in_progress"].includes(batch.status)) {
    span.append(button("cancel", () => call(`/v1/batches/${batch.id}/cancel`, { method: "POST" })));
  }
  return span;
}

async function showBatches() {
  try {
    const { data } = await (await call("/v1/batches?limit=10")).json();
    $("batches").replaceChildren(...data.map((b) => row([b.id, b.status, b.request_counts.total,
      b.request_counts.completed, b.request_counts.failed, actions(b)])));
  } catch (error) {
    $("upload-state").textContent = error.message;
  }
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

$("upload").addEventListener("submit", (event) => {
  event.preventDefault();
  $("upload-state").textContent = "uploading";
  upload($("file").files[0]).then(
    () => { $("upload-state").textContent = "started"; showBatches(); },
    (error) => { $("upload-state").textContent = error.message; });
});

watch();
showBatches();
setInterval(showBatches, 3000);
