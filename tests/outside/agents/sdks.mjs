// Clients of npm, each in a conversation of several turns with a tool; prints one line per client.
import Anthropic from "@anthropic-ai/sdk";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, streamText, tool } from "ai";
import assert from "node:assert";
import OpenAI from "openai";
import { z } from "zod";

const url = process.env.QLLM_TEST_URL;
const key = { baseURL: `${url}/v1`, apiKey: "none" };
const zones = { type: "object", properties: { zone: { type: "string" } }, required: ["zone"] };
const asked = "What time is it there?";

async function vercel(model, run) {
  let calls = 0;
  const time = tool({
    description: "The time.", inputSchema: z.object({ zone: z.string() }),
    execute: async ({ zone }) => `${++calls} o'clock ${zone}`,
  });
  const how = { model, prompt: asked, tools: { time_of: time }, stopWhen: isStepCount(5), maxRetries: 0 };
  const errors = [];
  const result = await run({ ...how, onError: ({ error }) => errors.push(error) });
  assert.deepEqual(errors, []);
  assert.equal((await result.steps).length, 3);
  return [calls, await result.text];
}

async function chat() {
  const client = new OpenAI({ ...key, maxRetries: 0 });
  const tools = [{ type: "function", function: { name: "time_of", parameters: zones } }];
  const messages = [{ role: "user", content: asked }];
  for (let calls = 0; ; ) {
    const stream = client.chat.completions.stream({ model: "tiny", messages, tools });
    const message = (await stream.finalChatCompletion()).choices[0].message;
    if (!message.tool_calls?.length) return [calls, message.content];
    messages.push(message);
    for (const call of message.tool_calls) {
      calls += 1;
      messages.push({ role: "tool", tool_call_id: call.id, content: "12:00" });
    }
  }
}

async function responses() {
  const client = new OpenAI({ ...key, maxRetries: 0 });
  const tools = [{ type: "function", name: "time_of", parameters: zones, strict: false }, { type: "web_search" }];
  const input = [{ role: "user", content: asked }];
  for (let calls = 0; ; ) {
    const found = await client.responses.stream({ model: "tiny", input, tools, store: false }).finalResponse();
    const made = found.output.filter((item) => item.type === "function_call");
    if (!made.length) return [calls, found.output_text];
    calls += made.length;
    input.push(...found.output, ...made.map((x) => ({ type: "function_call_output", call_id: x.call_id, output: "12:00" })));
  }
}

async function messages() {
  const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const tools = [{ name: "time_of", input_schema: zones }];
  const chat = [{ role: "user", content: asked }];
  for (let calls = 0; ; ) {
    const found = await client.messages.stream({ model: "tiny", max_tokens: 500, messages: chat, tools }).finalMessage();
    const uses = found.content.filter((block) => block.type === "tool_use");
    if (!uses.length) return [calls, found.content.map((block) => block.text).join("")];
    calls += uses.length;
    const results = uses.map((use) => ({ type: "tool_result", tool_use_id: use.id, content: "12:00" }));
    chat.push({ role: "assistant", content: found.content }, { role: "user", content: results });
  }
}

const models = {
  "openai-compatible": createOpenAICompatible({ name: "qllm", ...key })("tiny"),
  "openai chat": createOpenAI(key).chat("tiny"),
  "openai responses": createOpenAI(key).responses("tiny"),
  anthropic: createAnthropic(key)("tiny"),
};
const all = { chat, responses, messages };
for (const [name, model] of Object.entries(models)) {
  all[`vercel ${name}`] = () => vercel(model, generateText);
  all[`vercel ${name}, streamed`] = () => vercel(model, streamText);
}
for (const [name, run] of Object.entries(all)) {
  const [calls, text] = await run();
  console.log(JSON.stringify({ name, calls, text }));
}
