// The parts that all scripts share: elements, the server, rows of tables, words for numbers.

export const $ = (id) => document.getElementById(id);

export async function call(path, options = {}) {
  const key = $("key").value;
  const headers = { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...options.headers };
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  const error = new Error(body && body.error ? body.error.message : `HTTP ${answer.status}`);
  error.status = answer.status;
  throw error;
}

// Yields {id, data} of each server-sent event; EventSource cannot send a key. Comments are skipped.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const fields = Object.fromEntries(part.split("\n").map((line) => line.split(/: (.*)/s, 2)));
      if (fields.data && fields.data !== "[DONE]") yield { id: Number(fields.id), data: JSON.parse(fields.data) };
    }
  }
}

// A row of a table; each cell is a text, a number or an element.
export function cells(values) {
  const row = document.createElement("tr");
  for (const value of values) {
    const cell = document.createElement("td");
    cell.append(value instanceof Node ? value : String(value));
    row.append(cell);
  }
  return row;
}

// Update a row. Unchanged cells are not painted again and keep the keyboard's focus.
export function recell(row, values) {
  values.forEach((value, i) => {
    if (!(value instanceof Node) && row.cells[i].textContent !== String(value)) row.cells[i].textContent = value;
  });
}

// Show `rows` as the rows of a table's body. As few rows as possible are moved or made.
export function arrange(body, rows) {
  rows.forEach((row, i) => { if (body.rows[i] !== row) body.insertBefore(row, body.rows[i] ?? null); });
  while (body.rows.length > rows.length) body.lastElementChild.remove();
}

export function ms(value) {
  if (value === undefined || value === null) return "–";
  if (value >= 60_000) return `${Math.floor(value / 60_000)} min ${Math.round((value % 60_000) / 1000)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(value >= 10_000 ? 0 : 1)} s`;
  return `${value >= 100 ? value.toFixed(0) : +value.toFixed(1)} ms`;
}

// Drafted tokens per class and the accepted part, in words; an engine that drafts nothing has none.
export function drafted({ drafter, drafts }) {
  if (!drafts) return "";
  const words = Object.entries(drafts).map(([track, { accepted, rejected }]) => {
    const all = accepted + rejected;
    return `${track} ${all.toLocaleString("en")}${all ? `, ${Math.round((100 * accepted) / all)} % accepted` : ""}`;
  });
  return `drafted tokens (${drafter}): ${words.join("; ")}`;
}

export const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

// How many experts of a file are in memory, and what was read from it, in words; nothing without a file.
export function residents({ resident, experts, waiting, LS, BE, blocking } = {}) {
  if (!experts) return "";
  const gb = ({ bytes }) => `${(bytes / 1e9).toFixed(2)} GB`;
  const read = LS ? `from the file LS ${gb(LS)}, BE ${gb(BE)}` : `from the file ${gb(blocking)}`;
  const waits = waiting ? `; ${count(waiting, "pass", "passes")} waiting for it` : "";
  return `${resident} of ${experts} experts in memory, ${read}${waits}`;
}
