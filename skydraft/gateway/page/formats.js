// What an answer has to look like: tools that it may call and a schema that it has to fit, written as JSON by the user.

/** Tools from a list of functions, bare or as OpenAI wraps them. Throws what is no such list. */
export function toolsOf(text) {
  if (!text.trim()) return [];
  const list = JSON.parse(text);
  if (!Array.isArray(list) || !list.every((each) => each?.name || each?.function?.name)) throw new TypeError('no list of functions');
  return list.map((each) => (each.function ? each : { type: 'function', function: each }));
}

/** The format of answers that fit a schema; none without one. Throws what is no schema. */
export function formatOf(text) {
  if (!text.trim()) return undefined;
  const schema = JSON.parse(text);
  if (schema === null || typeof schema !== 'object' || Array.isArray(schema)) throw new TypeError('no schema');
  return { type: 'json_schema', json_schema: { name: 'answer', schema } };
}

/** The fields of a request that say so. What cannot be read is left out, as the settings say beside it. */
export function asked({ tools, toolChoice, schema }) {
  const read = (work, text) => {
    try {
      return work(text);
    } catch {
      return undefined;
    }
  };
  const found = read(toolsOf, tools) ?? [];
  return {
    ...(found.length ? { tools: found, tool_choice: toolChoice } : {}),
    response_format: read(formatOf, schema),
  };
}
