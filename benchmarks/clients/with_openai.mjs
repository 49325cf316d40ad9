// OpenAI's client for Node: chats, completions and responses, with its helpers.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const { LLAMA, THINKER, VISION, AGENT, IMAGE } = process.env;
const KEY = "secret-key";
const client = (url = LLAMA, apiKey = KEY) =>
  new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const chat = { model: "tiny", messages, max_tokens: 60, temperature: 0 };
const response = { model: "tiny", input: "hi", max_output_tokens: 60, temperature: 0 };
const Answer = z.object({ is_it: z.boolean(), other: z.boolean() });
const parameters = {
  type: "object",
  properties: { a: { type: "integer" }, b: { type: "integer" } },
  required: ["a", "b"],
};
const tools = [{ type: "function", function: { name: "add", parameters } }];

const checks = {
  async chat_and_stream() {
    const answer = await client().chat.completions.create(chat);
    assert.ok(answer.usage.completion_tokens);
    const options = { stream: true, stream_options: { include_usage: true } };
    let text = "", usage;
    for await (const chunk of await client().chat.completions.create({ ...chat, ...options })) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, answer.choices[0].message.content);
    assert.deepEqual(usage, answer.usage);
    const helper = client().chat.completions.stream({ ...chat, ...options });
    assert.equal((await helper.finalContent()), text);
  },
  async stop_n_logprobs() {
    const many = await client().chat.completions.create({
      ...chat, n: 3, temperature: 1, logprobs: true, top_logprobs: 2, seed: 1, stop: ["zz"],
    });
    assert.equal(many.choices.length, 3);
    assert.ok(many.choices[0].logprobs.content.length);
  },
  async tools_required_and_named() {
    for (const tool_choice of ["required", { type: "function", function: { name: "add" } }]) {
      const answer = await client().chat.completions.create({ ...chat, tools, tool_choice });
      assert.equal(answer.choices[0].message.tool_calls[0].function.name, "add");
    }
  },
  async tools_auto_in_rounds() {
    const runnable = {
      type: "function",
      function: { name: "add", parameters, parse: JSON.parse, function: ({ a, b }) => `${a + b}` },
    };
    for (const stream of [false, true]) {
      const runner = client(AGENT).chat.completions.runTools({ ...chat, stream, tools: [runnable] });
      assert.equal(await runner.finalContent(), "It is ['3'].");
    }
  },
  async structured_outputs() {
    const response_format = zodResponseFormat(Answer, "answer");
    const answer = await client().chat.completions.parse({ ...chat, max_tokens: 200, response_format });
    Answer.parse(answer.choices[0].message.parsed);
    const text = { format: zodTextFormat(Answer, "answer") };
    Answer.parse((await client().responses.parse({ ...response, max_output_tokens: 200, text })).output_parsed);
  },
  async responses() {
    const answer = await client().responses.create(response);
    assert.ok(answer.usage.output_tokens);
    let text = "";
    for await (const event of await client().responses.create({ ...response, stream: true }))
      if (event.type === "response.output_text.delta") text += event.delta;
    assert.equal(text, answer.output_text);
    const helper = client().responses.stream(response);
    assert.equal((await helper.finalResponse()).output_text, text);
    const input = [{ role: "user", content: "2 + 2?" }];
    const offered = [{ type: "function", name: "add", parameters, strict: false }];
    for (let number = 0; number < 2; number++) {
      const turn = await client(AGENT).responses.create({ ...response, input, tools: offered });
      const call = turn.output.find((item) => item.type === "function_call");
      const output = `${number + 2}`;
      input.push(...turn.output, { type: "function_call_output", call_id: call.call_id, output });
    }
    const last = await client(AGENT).responses.create({ ...response, input, tools: offered });
    assert.equal(last.output_text, "It is ['3'].");
  },
  async images() {
    const image_url = { url: `data:image/png;base64,${IMAGE}` };
    const content = [{ type: "text", text: "What?" }, { type: "image_url", image_url }];
    const asked = { ...chat, max_tokens: 9, messages: [{ role: "user", content }] };
    assert.ok((await client(VISION).chat.completions.create(asked)).usage.prompt_tokens > 10);
  },
  async thinking() {
    const answer = await client(THINKER).chat.completions.create(chat);
    assert.ok(answer.choices[0].message.reasoning_content);
    const off = await client(THINKER).chat.completions.create({ ...chat, reasoning_effort: "none" });
    assert.ok(off.choices[0].message.content);
    const none = await client(THINKER).responses.create({ ...response, reasoning: { effort: "none" } });
    assert.ok(none.output_text);
  },
  async completions_and_models() {
    const options = { model: "tiny", prompt: ["Once", "upon"], max_tokens: 5, echo: true, logprobs: 1 };
    const answer = await client().completions.create(options);
    assert.ok(answer.choices[1].text.startsWith("upon"));
    assert.equal((await client().models.list()).data[0].id, "tiny");
    assert.equal((await client().models.retrieve("tiny")).id, "tiny");
  },
  async errors() {
    const fails = async (call, kind) => assert.rejects(call, (error) => error instanceof kind);
    await fails(client(LLAMA, "wrong").chat.completions.create(chat), OpenAI.AuthenticationError);
    await fails(client().chat.completions.create({ ...chat, model: "x" }), OpenAI.NotFoundError);
    const long = [{ role: "user", content: "hi".repeat(2000) }];
    await fails(client().chat.completions.create({ ...chat, messages: long }), OpenAI.BadRequestError);
    await fails(client().embeddings.create({ model: "tiny", input: "hi" }), OpenAI.NotFoundError);
  },
};

const chosen = process.argv.slice(2);
for (const [check, run] of Object.entries(checks)) {
  if (chosen.length && !chosen.includes(check)) continue;
  let error = "";
  try {
    await run();
  } catch (caught) {
    error = `${caught?.name}: ${caught?.message}`.slice(0, 1500);
  }
  console.log(JSON.stringify({ check, error }).replace('{"check":', '{"check": '));
}
