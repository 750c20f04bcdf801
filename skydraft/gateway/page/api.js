// Requests to the gateway. Every failure becomes an ApiError with a message for the user.

import { $ } from './dom.js';
import { say, worded } from './language.js';

const KEY = 'skydraft.key';
let asking = null;

class ApiError extends Error {
  status = 0;
}

/** Asks the user for the API key, once for all waiting requests. Returns whether there is a new key. */
function askKey() {
  asking ??= new Promise((resolve) => {
    worded($('key-why'), sessionStorage.getItem(KEY) ? 'key.refused' : 'key.why');
    $('key').value = $('key-dialog').returnValue = '';
    $('key-dialog').onclose = () => {
      const key = $('key-dialog').returnValue && $('key').value.trim();
      if (key) sessionStorage.setItem(KEY, key);
      asking = null;
      resolve(Boolean(key));
    };
    $('key-dialog').showModal();
  });
  return asking;
}

async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { 'Content-Type': 'application/json', ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { cache: 'no-store', headers, ...options }).catch((error) => {
    throw error.name === 'AbortError' ? error : new ApiError(say('error.network'));
  });
  if (response.ok) return response;
  if (response.status === 401 && (await askKey())) return ask(path, options);
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? say('error.status', { status: response.status });
  throw Object.assign(new ApiError(message), { status: response.status });
}

const post = (body, signal) => ask('/v1/chat/completions', { method: 'POST', body: JSON.stringify(body), signal });

export const health = async () => (await ask('/health', { signal: AbortSignal.timeout(4000) })).json();

export const models = async () => (await (await ask('/v1/models')).json()).skydraft;

/** One complete answer. */
export const complete = async (body, signal) => (await post(body, signal)).json();

/** Yields the chunks of one answer. Throws unless the gateway marks the end. */
export async function* chat(body, signal) {
  const reader = (await post(body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let held = '';
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError(say('error.cut'));
      const events = (held + value).split('\n\n');
      held = events.pop();
      for (const event of events.filter((each) => each.startsWith('data: '))) {
        if (event === 'data: [DONE]') return;
        const chunk = JSON.parse(event.slice(6));
        if (chunk.error) throw new ApiError(chunk.error.message);
        yield chunk;
      }
    }
  } catch (error) {
    if (signal.aborted) throw new DOMException('stopped', 'AbortError');
    throw error instanceof ApiError ? error : new ApiError(say('error.cut'));
  } finally {
    reader.cancel().catch(() => {}); // closing the connection early stops the generation
  }
}
