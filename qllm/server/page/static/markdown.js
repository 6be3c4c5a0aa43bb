// Markdown as elements. `marked` splits the text. Every text becomes a text node, so that HTML in
// an answer is never interpreted, and nothing is fetched.

import { lexer } from "./marked.esm.js";

const TAGS = {
  blockquote: "blockquote", codespan: "code", del: "del", em: "em", list_item: "li", paragraph: "p", strong: "strong",
};

function element(tag, tokens, text) {
  const made = document.createElement(tag);
  if (tokens) made.append(...tokens.map(node));
  else made.textContent = text;
  return made;
}

function link(token) {
  const shown = token.tokens && token.tokens.length ? token.tokens : [{ type: "text", text: token.text || token.href }];
  if (!/^(https?|mailto):/i.test(token.href)) return element("span", shown);
  const made = element("a", shown);
  made.href = token.href;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}

function table(token) {
  const made = document.createElement("table");
  for (const [tag, cells] of [["th", token.header], ...token.rows.map((row) => ["td", row])]) {
    const row = document.createElement("tr");
    row.append(...cells.map((cell) => element(tag, cell.tokens)));
    made.append(row);
  }
  return made;
}

function code(token) {
  const made = document.createElement("pre");
  made.tabIndex = 0; // it scrolls
  made.append(element("code", null, token.text));
  return made;
}

function list(token) {
  const made = element(token.ordered ? "ol" : "ul", token.items);
  if (token.ordered && token.start > 1) made.start = token.start;
  return made;
}

function node(token) {
  if (token.type === "space") return "";
  if (token.type === "br") return document.createElement("br");
  if (token.type === "hr") return document.createElement("hr");
  if (token.type === "code") return code(token);
  if (token.type === "codespan") return element("code", null, token.text);
  if (token.type === "heading") return element(`h${Math.min(6, token.depth + 2)}`, token.tokens);
  if (token.type === "link" || token.type === "image") return link(token);
  if (token.type === "list") return list(token);
  if (token.type === "table") return table(token);
  if (token.type === "text" && token.tokens) return element("span", token.tokens);
  if (TAGS[token.type]) return element(TAGS[token.type], token.tokens, token.text);
  if (token.type === "text" || token.type === "escape") return token.text;
  return token.raw; // HTML, and tokens of later releases
}

// Replace the content of an element by a text as Markdown.
export function show(box, text) {
  try {
    box.replaceChildren(...lexer(text, { gfm: true, breaks: true }).map(node));
  } catch { // nested so deep that the stack overflows
    box.textContent = text;
  }
}
