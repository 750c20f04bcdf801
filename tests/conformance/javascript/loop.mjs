// A tool loop: node loop.mjs CLIENT URL MODEL QUESTION RESULT. Prints the cities asked for and the answer as JSON.

const [client, baseURL, model, question, result] = process.argv.slice(2);
const description = '查询一个城市今天的天气';
const cities = [];

function getWeather({ city }) {
  cities.push(city);
  return result;
}

async function byOpenai() {
  const { default: OpenAI } = await import('openai');
  const parameters = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] };
  const tools = [{ type: 'function', function: { name: 'get_weather', description, parameters } }];
  const messages = [{ role: 'user', content: question }];
  const openai = new OpenAI({ baseURL, apiKey: 'none' });
  for (let turn = 0; turn < 6; turn += 1) {
    const asked = { model, messages, tools, max_tokens: 512, parallel_tool_calls: false };
    const { message } = (await openai.chat.completions.create(asked)).choices[0];
    messages.push(message);
    if (!message.tool_calls) return message.content;
    for (const call of message.tool_calls) {
      const content = getWeather(JSON.parse(call.function.arguments));
      messages.push({ role: 'tool', tool_call_id: call.id, content });
    }
  }
  return null;
}

// Vercel's `ai` over chat completions, and as its OpenAI provider is out of the box: over `/v1/responses`.
async function modelOfAi(provider) {
  if (provider === 'compatible') {
    const { createOpenAICompatible } = await import('@ai-sdk/openai-compatible');
    return createOpenAICompatible({ name: 'skydraft', baseURL, apiKey: 'none' })(model);
  }
  const { createOpenAI } = await import('@ai-sdk/openai');
  return createOpenAI({ baseURL, apiKey: 'none' })(model);
}

async function byAi(provider) {
  const { generateText, tool, stepCountIs } = await import('ai');
  const { z } = await import('zod');
  const get_weather = tool({
    description,
    inputSchema: z.object({ city: z.string() }),
    execute: async (given) => getWeather(given),
  });
  const { text } = await generateText({
    model: await modelOfAi(provider),
    tools: { get_weather },
    prompt: question,
    maxOutputTokens: 512,
    stopWhen: stepCountIs(6),
  });
  return text;
}

const loops = { openai: byOpenai, ai: () => byAi('compatible'), 'ai-openai': () => byAi('openai') };
const answer = await loops[client]();
console.log(JSON.stringify({ cities, answer }));
