// Anthropic's client for Node: messages with its helpers, beta routes, counts and models.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const { LLAMA, THINKER, VISION, AGENT, IMAGE } = process.env;
const KEY = "secret-key";
const client = (baseURL = LLAMA, apiKey = KEY) => new Anthropic({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const asked = { model: "tiny", messages, max_tokens: 60 };
const input_schema = {
  type: "object",
  properties: { a: { type: "integer" }, b: { type: "integer" } },
  required: ["a", "b"],
};
const tools = [{ name: "add", description: "Add.", input_schema, cache_control: { type: "ephemeral" } }];
const schema = {
  type: "object",
  properties: { is_it: { type: "boolean" }, other: { type: "boolean" } },
  required: ["is_it", "other"],
  additionalProperties: false,
};

const checks = {
  async chat_and_stream() {
    const system = [{ type: "text", text: "Be brief.", cache_control: { type: "ephemeral" } }];
    const answer = await client().messages.create({ ...asked, system, metadata: { user_id: "u" } });
    assert.ok(answer.usage.output_tokens);
    const stream = client().messages.stream({ ...asked, system });
    assert.equal(await stream.finalText(), answer.content[0].text);
    let text = "";
    for await (const event of await client().messages.create({ ...asked, system, stream: true }))
      if (event.type === "content_block_delta") text += event.delta.text;
    assert.equal(text, answer.content[0].text);
  },
  async stop() {
    const { content } = await client().messages.create(asked);
    const stop = content[0].text.slice(5, 7);
    const answer = await client().messages.create({ ...asked, stop_sequences: [stop] });
    assert.deepEqual([answer.stop_reason, answer.stop_sequence], ["stop_sequence", stop]);
  },
  async tools_required_and_named() {
    for (const choice of [{ type: "any" }, { type: "tool", name: "add" }]) {
      const answer = await client().messages.create({
        ...asked, tools, tool_choice: { ...choice, disable_parallel_tool_use: true },
      });
      assert.equal(answer.content[0].name, "add");
    }
  },
  async tools_auto_in_rounds() {
    const run = ({ a, b }) => `${a + b}`;
    const runner = client(AGENT).beta.messages.toolRunner({
      ...asked, tools: [{ ...tools[0], run, parse: (value) => value }], betas: ["x-1"], thread: false,
    });
    assert.equal((await runner).content.at(-1).text, "It is ['3'].");
    const stream = client(AGENT).messages.stream({ ...asked, tools });
    const message = await stream.finalMessage();
    assert.deepEqual(message.content.map((block) => block.type), ["thinking", "text", "tool_use"]);
    assert.deepEqual(message.content[2].input, { a: 0, b: 2 });
  },
  async structured_outputs() {
    const output_config = { format: { type: "json_schema", schema } };
    const answer = await client().messages.create({ ...asked, max_tokens: 200, output_config });
    assert.deepEqual(Object.keys(JSON.parse(answer.content[0].text)).sort(), ["is_it", "other"]);
    const parsed = await client().messages.parse({ ...asked, max_tokens: 200, output_config });
    assert.ok(parsed.content.length);
  },
  async images() {
    const source = { type: "base64", media_type: "image/png", data: IMAGE };
    const content = [{ type: "image", source }, { type: "text", text: "What?" }];
    const answer = await client(VISION).messages.create({
      ...asked, max_tokens: 9, messages: [{ role: "user", content }],
    });
    assert.ok(answer.usage.input_tokens + answer.usage.cache_read_input_tokens > 10);
  },
  async thinking() {
    const blocks = async (thinking) =>
      (await client(THINKER).messages.create({ ...asked, thinking })).content.map((b) => b.type);
    assert.deepEqual(await blocks({ type: "disabled" }), ["text"]);
    assert.deepEqual(await blocks({ type: "enabled", budget_tokens: 5 }), ["thinking", "text"]);
    assert.deepEqual(await blocks({ type: "adaptive" }), ["thinking"]);
  },
  async counts() {
    const { input_tokens } = await client().messages.countTokens({ model: "tiny", messages, tools });
    assert.ok(input_tokens > 2);
    const beta = await client().beta.messages.countTokens({ model: "tiny", messages, betas: ["x"] });
    assert.ok(beta.input_tokens > 2);
  },
  async errors() {
    const fails = async (call, kind) => assert.rejects(call, (error) => error instanceof kind);
    await fails(client(LLAMA, "wrong").messages.create(asked), Anthropic.AuthenticationError);
    await fails(client().messages.create({ ...asked, model: "x" }), Anthropic.NotFoundError);
    const long = [{ role: "user", content: "hi".repeat(2000) }];
    await fails(client().messages.create({ ...asked, messages: long }), Anthropic.BadRequestError);
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
