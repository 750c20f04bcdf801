// A kept conversation as a file: Markdown to read, JSON to go on with.

import { say } from './language.js';

const contentOf = ({ choices: [{ delta }] }) => delta.content ?? '';

function callsOf(chunks) {
  const calls = [];
  for (const { index, function: { name, arguments: more = '' } } of chunks.flatMap(({ choices: [{ delta }] }) => delta.tool_calls ?? [])) {
    calls[index] ??= { name, arguments: '' };
    calls[index].arguments += more;
  }
  return calls;
}

function answerOf({ mode, seed, status, branch, chunks: own }) {
  const chunks = [...(branch?.chunks ?? []), ...own];
  return {
    mode,
    seed,
    status,
    // The answer that it begins like, and the token that stands in another one's place.
    branch: branch ? { of: branch.of, at: branch.ids.length - 1, token: branch.token } : undefined,
    content: chunks.map(contentOf).join(''),
    reasoning: chunks.map(({ choices: [{ delta }] }) => delta.reasoning ?? '').join('') || undefined,
    calls: callsOf(chunks),
    // The text again in its parts, each with its origin; what calls were made of is among them.
    parts: chunks.filter(({ skydraft }) => skydraft.origin)
      .map((chunk) => ({ text: chunk.skydraft.text ?? contentOf(chunk), origin: chunk.skydraft.origin, round: chunk.skydraft.round })),
    stats: chunks.findLast(({ skydraft }) => skydraft.stats)?.skydraft.stats ?? null,
  };
}

export function asJson({ title, changed }, turns) {
  const told = turns.map(({ text, audio, results, chosen, answers }) =>
    ({ text, audio, results, chosen, answers: answers.map(answerOf) }));
  return `${JSON.stringify({ title, changed: new Date(changed).toISOString(), turns: told }, null, 1)}\n`;
}

export function asMarkdown({ title }, turns) {
  const parts = [`# ${title}`];
  for (const { text, audio, results, answers } of turns) {
    const asked = [audio?.name, text, ...(results ?? []).map(({ content }) => content)].filter(Boolean);
    parts.push(`## ${say('you')}`, ...asked);
    for (const { mode, content, calls, branch } of answers.map(answerOf)) {
      const called = calls.map((call) => `\`\`\`json\n${JSON.stringify(call)}\n\`\`\``);
      parts.push(`## ${say(branch ? 'branch' : `mode.${mode}`, { mode: `@mode.${mode}`, token: branch?.token })}`, content, ...called);
    }
  }
  return `${parts.filter(Boolean).join('\n\n')}\n`;
}
