// A tool loop: node loop.mjs CLIENT URL MODEL QUESTION CHOICE RESULT. Prints the cities asked for and the answer as JSON.

const [client, baseURL, model, question, choice, result] = process.argv.slice(2);
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
    const asked = { model, messages, tools, max_tokens: 512, tool_choice: turn ? 'auto' : choice };
    const { message } = (await openai.chat.completions.create({ ...asked, parallel_tool_calls: false })).choices[0];
    messages.push(message);
    if (!message.tool_calls) return message.content;
    for (const call of message.tool_calls) {
      const content = getWeather(JSON.parse(call.function.arguments));
      messages.push({ role: 'tool', tool_call_id: call.id, content });
    }
  }
  return null;
}

async function byAi() {
  const { generateText, tool, stepCountIs } = await import('ai');
  const { createOpenAICompatible } = await import('@ai-sdk/openai-compatible');
  const { z } = await import('zod');
  const get_weather = tool({
    description,
    inputSchema: z.object({ city: z.string() }),
    execute: async (given) => getWeather(given),
  });
  const { text } = await generateText({
    model: createOpenAICompatible({ name: 'skydraft', baseURL, apiKey: 'none' })(model),
    tools: { get_weather },
    prompt: question,
    maxOutputTokens: 512,
    stopWhen: stepCountIs(6),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? choice : 'auto' }),
  });
  return text;
}

const answer = await { openai: byOpenai, ai: byAi }[client]();
console.log(JSON.stringify({ cities, answer }));
