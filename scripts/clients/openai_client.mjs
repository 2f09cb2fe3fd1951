// Acceptance of an OpenAI-compatible server by the official client for Node.
//
// usage: node openai_client.mjs BASE_URL [--model NAME] [--skip GROUP,GROUP]
//
// Asserts structure, determinism and headers, never what the text says: it
// runs over simulated engines and over real ones. The checks and the groups
// are those of openai_client.py.
import OpenAI from 'openai';
import { VERSION } from 'openai/version';
import assert from 'node:assert/strict';
import { parseArgs } from 'node:util';

const PROMPT = "Describe a lighthouse keeper's day, hour by hour, from the first light to the last lamp.";
const MESSAGES = [
  { role: 'system', content: 'You answer in plain words.' },
  { role: 'user', content: PROMPT + ' Zwölf Boxkämpfer 🥊 jagen “Viktor” \\ quer\tüber.' },
];
const booleanTool = (name, member) => ({
  type: 'function',
  function: {
    name,
    parameters: {
      type: 'object',
      properties: { [member]: { type: 'boolean' } },
      required: [member],
      additionalProperties: false,
    },
  },
});
const TOOLS = [booleanTool('weather_at', 'celsius'), booleanTool('tide_at', 'high')];
const FINISH = ['stop', 'length', 'tool_calls'];

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: { model: { type: 'string', default: '' }, skip: { type: 'string', default: '' } },
});
if (positionals.length !== 1) {
  console.error('usage: node openai_client.mjs BASE_URL [--model NAME] [--skip GROUP,GROUP]');
  process.exit(2);
}
// A retry inside the client would hide an answer that was wrong.
const client = new OpenAI({ baseURL: positionals[0], apiKey: 'none', maxRetries: 0, timeout: 120_000 });
let model = options.model;

const chat = (more = {}) =>
  client.chat.completions.create({ model, messages: MESSAGES, max_tokens: 24, temperature: 0, ...more });
const completion = (more = {}) =>
  client.completions.create({ model, prompt: PROMPT, max_tokens: 24, temperature: 0, ...more });

function usageAddsUp(usage, limit) {
  assert.ok(usage.prompt_tokens > 0);
  assert.ok(usage.completion_tokens > 0 && usage.completion_tokens <= limit);
  assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
}

// Joins a stream: texts and finish reasons by choice, the usage, how many pieces.
async function collect(stream, textOf) {
  const seen = { texts: {}, reasons: {}, usage: null, pieces: 0 };
  const ids = new Set();
  for await (const chunk of stream) {
    ids.add(chunk.id);
    if (chunk.usage) seen.usage = chunk.usage;
    for (const choice of chunk.choices) {
      assert.ok(!(choice.index in seen.reasons), 'a delta after the finish reason');
      const text = textOf(choice) ?? '';
      if (text) seen.pieces++;
      seen.texts[choice.index] = (seen.texts[choice.index] ?? '') + text;
      if (choice.finish_reason) seen.reasons[choice.index] = choice.finish_reason;
    }
  }
  assert.equal(ids.size, 1);
  return seen;
}
const collectChat = (stream) => collect(stream, (c) => c.delta.content);
const collectCompletion = (stream) => collect(stream, (c) => c.text);
const byIndex = (choices, textOf) => Object.fromEntries(choices.map((c) => [c.index, textOf(c)]));

async function refusal(kind, call) {
  let answer;
  try {
    answer = await call();
  } catch (error) {
    assert.ok(error instanceof kind, `no ${kind.name} but ${error.constructor.name}: ${error.message}`);
    return error;
  }
  assert.fail(`no ${kind.name} but ${JSON.stringify(answer)?.slice(0, 300)}`);
}

async function streamedTools(stream) {
  const calls = {};
  let reason = null;
  for await (const chunk of stream) {
    for (const choice of chunk.choices) {
      for (const delta of choice.delta.tool_calls ?? []) {
        const call = (calls[delta.index] ??= { name: '', arguments: '' });
        call.name += delta.function?.name ?? '';
        call.arguments += delta.function?.arguments ?? '';
      }
      reason = choice.finish_reason ?? reason;
    }
  }
  return { calls: Object.values(calls).map((c) => [c.name, JSON.parse(c.arguments)]), reason };
}

const checks = [
  ['chat', 'models are listed', async () => {
    const page = await client.models.list();
    assert.equal(page.object, 'list');
    assert.ok(page.data.some((m) => m.id === model));
    assert.ok(page.data.every((m) => m.object === 'model'));
  }],

  ['chat', 'chat has the right shape', async () => {
    const answer = await chat();
    assert.equal(answer.object, 'chat.completion');
    assert.match(answer.id, /^chatcmpl-/);
    assert.equal(answer.model, model);
    assert.deepEqual(answer.choices.map((c) => c.index), [0]);
    assert.equal(answer.choices[0].message.role, 'assistant');
    assert.ok(answer.choices[0].message.content);
    assert.ok(FINISH.includes(answer.choices[0].finish_reason));
    usageAddsUp(answer.usage, 24);
  }],

  ['chat', 'chat is deterministic', async () => {
    const [first, second] = [await chat(), await chat()];
    assert.equal(first.choices[0].message.content, second.choices[0].message.content);
    assert.notEqual(first.id, second.id);
  }],

  ['chat', 'chat streamed is chat not streamed', async () => {
    const whole = await chat();
    const seen = await collectChat(await chat({ stream: true, max_tokens: 24 }));
    assert.deepEqual(seen.texts, { 0: whole.choices[0].message.content });
    assert.deepEqual(seen.reasons, { 0: whole.choices[0].finish_reason });
    assert.equal(seen.usage, null);
    assert.ok(seen.pieces > 4, `only ${seen.pieces} pieces`);
  }],

  ['chat', 'chat stream carries usage when asked', async () => {
    const whole = await chat();
    const seen = await collectChat(await chat({ stream: true, stream_options: { include_usage: true } }));
    usageAddsUp(seen.usage, 24);
    assert.equal(seen.usage.prompt_tokens, whole.usage.prompt_tokens);
    assert.equal(seen.usage.completion_tokens, whole.usage.completion_tokens);
  }],

  ['chat', "the client's own stream helper", async () => {
    const whole = await chat();
    const runner = client.chat.completions.stream({ model, messages: MESSAGES, max_tokens: 24, temperature: 0 });
    const final = await runner.finalChatCompletion();
    assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
  }],

  ['completions', 'completion streamed and not', async () => {
    const whole = await completion();
    assert.equal(whole.object, 'text_completion');
    assert.match(whole.id, /^cmpl-/);
    assert.ok(whole.choices[0].text);
    usageAddsUp(whole.usage, 24);
    const seen = await collectCompletion(await completion({ stream: true, stream_options: { include_usage: true } }));
    assert.deepEqual(seen.texts, { 0: whole.choices[0].text });
    assert.deepEqual(seen.reasons, { 0: whole.choices[0].finish_reason });
    usageAddsUp(seen.usage, 24);
  }],

  ['completions', 'token ids are a prompt', async () => {
    const prompt = Array.from({ length: 80 }, (_, i) => 100 + i);
    const whole = await completion({ prompt });
    assert.equal(whole.usage.prompt_tokens, prompt.length);
    const seen = await collectCompletion(await completion({ prompt, stream: true }));
    assert.deepEqual(seen.texts, { 0: whole.choices[0].text });
  }],

  ['many', 'two choices at once', async () => {
    // An engine may refuse n above 1 at temperature 0: a seed keeps it repeatable.
    const more = { n: 2, temperature: 0.8, seed: 11 };
    const want = byIndex((await chat(more)).choices, (c) => c.message.content);
    assert.deepEqual(Object.keys(want), ['0', '1']);
    assert.deepEqual(byIndex((await chat(more)).choices, (c) => c.message.content), want);
    assert.deepEqual((await collectChat(await chat({ ...more, stream: true }))).texts, want);
    const texts = byIndex((await completion(more)).choices, (c) => c.text);
    assert.deepEqual(Object.keys(texts), ['0', '1']);
    assert.deepEqual((await collectCompletion(await completion({ ...more, stream: true }))).texts, texts);
  }],

  ['many', 'many at once', async () => {
    const messages = (i) => [{ role: 'user', content: `${PROMPT} ${i}` }];
    const want = [];
    for (let i = 0; i < 4; i++) want.push((await chat({ messages: messages(i) })).choices[0].message.content);
    const got = await Promise.all(Array.from({ length: 24 }, async (_, i) => {
      if (i % 2) return (await collectChat(await chat({ messages: messages(i % 4), stream: true }))).texts[0];
      return (await chat({ messages: messages(i % 4) })).choices[0].message.content;
    }));
    assert.deepEqual(got, Array.from({ length: 24 }, (_, i) => want[i % 4]));
  }],

  ['tools', 'a tool call when one is required', async () => {
    const more = { tools: TOOLS, tool_choice: 'required', max_tokens: 128 };
    const { message, finish_reason } = (await chat(more)).choices[0];
    assert.equal(finish_reason, 'tool_calls');
    assert.ok(message.tool_calls.every((c) => c.id && c.type === 'function'));
    const want = message.tool_calls.map((c) => [c.function.name, JSON.parse(c.function.arguments)]);
    assert.ok(want.length > 0 && want.every(([name]) => ['weather_at', 'tide_at'].includes(name)));
    const { calls, reason } = await streamedTools(await chat({ ...more, stream: true }));
    assert.deepEqual(calls, want);
    assert.equal(reason, 'tool_calls');
  }],

  ['tools', 'the tool that is named', async () => {
    const more = { tools: TOOLS, tool_choice: { type: 'function', function: { name: 'tide_at' } }, max_tokens: 128 };
    const { message } = (await chat(more)).choices[0];
    const want = message.tool_calls.map((c) => [c.function.name, JSON.parse(c.function.arguments)]);
    assert.deepEqual(want.map(([name]) => name), ['tide_at']);
    assert.deepEqual((await streamedTools(await chat({ ...more, stream: true }))).calls, want);
  }],

  ['embeddings', 'embeddings have the right shape', async () => {
    const answer = await client.embeddings.create({ model, input: ['first light', 'last lamp'] });
    assert.deepEqual(answer.data.map((d) => d.index), [0, 1]);
    assert.ok(answer.data.every((d) => d.embedding.length > 0 && d.embedding.every(Number.isFinite)));
    assert.equal(answer.data[0].embedding.length, answer.data[1].embedding.length);
  }],

  ['responses', 'responses streamed and not', async () => {
    const more = { model, input: PROMPT, max_output_tokens: 24, temperature: 0 };
    const whole = await client.responses.create(more);
    assert.equal(whole.object, 'response');
    assert.ok(whole.output_text);
    let [text, last] = ['', ''];
    for await (const event of await client.responses.create({ ...more, stream: true })) {
      if (event.type === 'response.output_text.delta') text += event.delta;
      last = event.type;
    }
    assert.equal(text, whole.output_text);
    assert.ok(['response.completed', 'response.incomplete'].includes(last), last);
  }],

  ['headers', 'request id comes back', async () => {
    for (const stream of [false, true]) {
      const name = `acceptance-js-${process.pid}-${Date.now()}-${stream}`;
      const { data, response } = await client.chat.completions
        .create({ model, messages: MESSAGES, max_tokens: 4, stream }, { headers: { 'X-Request-Id': name } })
        .withResponse();
      assert.equal(response.headers.get('x-request-id'), name);
      assert.ok(response.headers.get('x-sluice-worker'));
      assert.match(response.headers.get('x-sluice-rank') ?? '', /^\d+$/);
      assert.match(response.headers.get('x-sluice-cached-tokens') ?? '', /^\d+$/);
      if (stream) for await (const chunk of data) assert.ok(chunk.id.includes(name), chunk.id);
      else assert.ok(data.id.includes(name), data.id);
    }
  }],

  ['errors', 'unknown model is not found', async () => {
    for (const stream of [false, true]) {
      const error = await refusal(OpenAI.NotFoundError, () => chat({ model: 'no-such-model', stream }));
      assert.equal(error.status, 404);
      assert.equal(error.code, 'model_not_found');
      assert.ok(error.message.includes('no-such-model') && error.message.includes(model), error.message);
      assert.equal(error.headers.get('x-sluice-reason'), 'unknown_model');
      assert.ok(error.requestID);
    }
  }],

  ['errors', "an engine's own fields are refused", async () => {
    for (const field of [{ kv_transfer_params: { do_remote_prefill: true } }, { bootstrap_room: 1 }]) {
      for (const call of [chat, completion]) {
        for (const stream of [false, true]) {
          const error = await refusal(OpenAI.BadRequestError, () => call({ ...field, stream }));
          assert.equal(error.type, 'invalid_request_error');
          assert.ok(error.message.includes(Object.keys(field)[0]), error.message);
          assert.equal(error.headers.get('x-sluice-reason'), 'forbidden_field');
        }
      }
    }
    assert.ok((await chat()).choices[0].message.content);
  }],

  ['errors', 'wrong types are refused', async () => {
    await refusal(OpenAI.BadRequestError, () => chat({ messages: 'not a list' }));
    await refusal(OpenAI.BadRequestError, () => chat({ max_tokens: 'many' }));
  }],

  ['abort', 'a stream left early harms nothing', async () => {
    const want = (await chat()).choices[0].message.content;
    for (let i = 0; i < 3; i++) {
      const stream = await chat({ stream: true, max_tokens: 512, ignore_eos: true });
      let chunks = 0;
      for await (const _ of stream) if (++chunks === 3) stream.controller.abort();
      assert.ok(chunks < 512, `${chunks} chunks after the abort`);
    }
    assert.equal((await chat()).choices[0].message.content, want);
  }],
];

const skip = options.skip.split(',').filter(Boolean);
for (const group of skip) {
  if (!checks.some(([g]) => g === group)) {
    console.error(`no such group: ${group}`);
    process.exit(2);
  }
}
console.log(`npm openai ${VERSION}`);
try {
  model ||= (await client.models.list()).data[0].id;
} catch (error) {
  console.log(`  FAIL the server lists a model: ${error}\n0 passed, 1 failed`);
  process.exit(1);
}
let [passed, failed] = [0, 0];
for (const [group, name, run] of checks) {
  if (skip.includes(group)) continue;
  try {
    await run();
    passed++;
    console.log(`  ok   ${name}`);
  } catch (error) {
    failed++;
    console.log(`  FAIL ${name}: ${error.stack ?? error}`);
  }
}
console.log(`${passed} passed, ${failed} failed`);
process.exit(failed || !passed ? 1 : 0);
