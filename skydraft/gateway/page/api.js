// Calls to the gateway. Whatever goes wrong becomes one ApiError, which knows the words for it.

import { say } from './language.js';
import { events } from './stream.js';

const KEY = 'skydraft.key';

export class ApiError extends Error {
  constructor(message, { status = 0, code = '', retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

export const apiKey = () => sessionStorage.getItem(KEY) ?? '';
export const setApiKey = (key) => sessionStorage.setItem(KEY, key);

function headers() {
  const key = apiKey();
  return { 'Content-Type': 'application/json', ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? say('error.status', { status: response.status });
  const seconds = Number.parseFloat(response.headers.get('Retry-After') ?? '');
  return new ApiError(message, {
    status: response.status,
    code: body?.error?.code,
    retryAfter: Number.isFinite(seconds) ? Math.min(Math.max(seconds, 0), 600) : null,
  });
}

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { cache: 'no-store', ...options });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ApiError(say('error.network'));
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

export async function health() {
  return (await ask('/health', { signal: AbortSignal.timeout(4000) })).json();
}

export async function models() {
  const listed = await (await ask('/v1/models', { headers: headers() })).json();
  return listed.skydraft;
}

/** Yields the chunks of one answer; ends only after the gateway said that it is complete. */
export async function* chat(body, signal) {
  const options = { method: 'POST', headers: headers(), body: JSON.stringify(body), signal };
  const response = await ask('/v1/chat/completions', options);
  const stream = events(response.body);
  for (;;) {
    const { value, done } = await next(stream, signal);
    if (done && value) return;
    if (done) throw new ApiError(say('error.cut'));
    if (value.error) throw new ApiError(value.error.message, { status: 200 });
    yield value;
  }
}

/** One answer that comes whole. */
export async function complete(body, signal) {
  return (await ask('/v1/chat/completions', { method: 'POST', headers: headers(), body: JSON.stringify(body), signal })).json();
}

async function next(stream, signal) {
  try {
    return await stream.next();
  } catch (error) {
    if (signal?.aborted) throw new DOMException('stopped', 'AbortError');
    throw error instanceof ApiError ? error : new ApiError(say('error.cut'));
  }
}
