// Calls to the gateway. Whatever goes wrong becomes one ApiError, which knows the words for it.

import { $ } from './dom.js';
import { say, worded } from './language.js';

const KEY = 'skydraft.key';
let asking = null;

class ApiError extends Error {
  status = 0;
}

/** Asks the user for the API key, once for all requests that wait for it; whether there is a new one. */
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

/** One answer that comes whole. */
export const complete = async (body, signal) => (await post(body, signal)).json();

/** Yields the chunks of one answer; ends only after the gateway said that it is complete. */
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
    reader.cancel().catch(() => {}); // leaving early closes the connection, which is what stops the generation
  }
}
