// One answer on the page: text with origins, calls, notices, final figures and buttons.

import { Calls } from './calls.js';
import { follow, icon, make } from './dom.js';
import { Figures, shown } from './figures.js';
import { worded } from './language.js';
import { Markdown, copyButton } from './markdown.js';

const ENDS = { length: 'meta.length', content_filter: 'meta.filtered' };

const lengthOf = (letters) => letters.join('').length; // in UTF-16 units; an emoji has two

export class Answer {
  text = '';
  chunks = []; // all received chunks, enough to show the answer again
  tokens = []; // {id, from, to, part} of each, if the gateway sends ids; `part` is the key `skydraft` of its chunk
  figures = new Figures();
  #runs = []; // parts of the text: single tokens, or one for each chunk
  #isDue = false;

  /** `branch` has the chunks of another answer with which this one begins, and their token ids. */
  constructor(mode, seed, conversation, branch = null) {
    Object.assign(this, { mode, seed, conversation, branch });
    const args = { mode: `@mode.${mode}`, token: branch?.token };
    const name = worded(make('h3', { class: 'name' }), branch ? 'branch' : `mode.${mode}`, args);
    this.body = make('div', { class: 'text', role: 'group', tabindex: -1 });
    worded(this.body, branch ? 'branch' : 'answer', args, 'wordLabel');
    this.markdown = new Markdown(this.body, (...part) => this.#put(...part));
    this.state = worded(make('p', { class: 'state' }), 'thinking');
    this.notices = make('ul', { class: 'notices', role: 'status' });
    this.failure = make('p', { class: 'failure', role: 'alert' });
    this.meta = make('p', { class: 'meta' });
    this.copyButton = copyButton(() => this.text);
    this.againButton = make('button', { class: 'quiet again', onclick: () => conversation.again(this) }, icon('again'));
    this.againButton.append(worded(make('span'), 'regenerate'));
    this.chooseButton = make('button', { class: 'quiet choose', onclick: () => conversation.choose(this) });
    this.buttons = make('div', { class: 'acts' }, this.copyButton, this.againButton, this.chooseButton);
    this.thought = make('div', { class: 'thought-text' });
    const thoughts = make('details', { class: 'thought' }, worded(make('summary'), 'thought'), this.thought);
    this.calls = new Calls((results) => conversation.giveResults(this, results));
    const foot = make('footer', { class: 'foot' }, this.meta, this.buttons);
    const parts = [thoughts, this.body, this.calls.element, this.state, this.notices, this.failure, foot];
    this.element = make('article', { class: 'answer' }, name, ...parts);
    this.#set('busy');
    for (const chunk of branch?.chunks ?? []) this.take(chunk, 0);
    this.body.addEventListener('keydown', (event) => this.#walk(event));
    this.body.addEventListener('click', ({ target }) => this.#ask(target));
    // For screen readers a token is a button while it has the focus, and text otherwise.
    for (const [event, role] of [['focusin', 'button'], ['focusout', null]]) {
      this.body.addEventListener(event, ({ target }) => { target.role = target.dataset.token ? role : target.role; });
    }
  }

  #set(status) {
    this.status = status;
    this.element.dataset.status = status;
    this.body.setAttribute('aria-busy', String(status === 'busy'));
    this.state.hidden = status !== 'busy';
    this.buttons.hidden = status === 'busy';
  }

  /** Adds one chunk of the stream, which came `ms` after the request. */
  take({ choices: [{ delta = {}, finish_reason: reason = null } = {}] = [], skydraft = {} }, ms) {
    const { begins = '' } = skydraft;
    const isChosenNext = skydraft.token_ids && !skydraft.before && this.tokens.length < this.branch?.ids.length;
    if (isChosenNext) this.#choose(begins.slice(this.text.length)); // the chosen token may be part of a character
    if (!skydraft.before) this.chunks.push({ choices: [{ delta, finish_reason: reason }], skydraft, ms });
    if (delta.reasoning) this.thought.append(delta.reasoning);
    if (delta.content || skydraft.token_ids) this.#write(delta.content ?? '', skydraft);
    if (delta.tool_calls) this.calls.take(delta.tool_calls);
    if (delta.reasoning || delta.content || delta.tool_calls) this.state.hidden = true;
    if (!skydraft.before) this.figures.take(skydraft, ms);
    if (skydraft.notice) this.notices.append(make('li', {}, skydraft.notice));
    this.finishReason = reason ?? this.finishReason;
    if (!this.#isDue) requestAnimationFrame(() => follow(() => this.show()));
    this.#isDue = true;
  }

  /** Adds the chosen token of a branch. Its text arrives with the next chunk. */
  #choose(text) {
    const chosen = { token_ids: [this.branch.ids.at(-1)], token_chars: [[...text].length] };
    this.take({ choices: [{ delta: { content: text } }], skydraft: { origin: 'chosen', before: true, ...chosen } }, 0);
  }

  #write(content, part) {
    const { token_ids: ids = [], token_chars: lengths = [] } = part;
    let from = this.text.length;
    this.text += content;
    const letters = [...content];
    const isWhole = !part.text && lengths.reduce((sum, length) => sum + length, 0) === letters.length;
    if (ids.length && isWhole && !this.asks?.tools?.trim()) {
      ids.forEach((id, index) => {
        const to = from + lengthOf(letters.splice(0, lengths[index]));
        // A token without characters is part of one. It is shown with the token that completes the character.
        if (to > from) this.#runs.push({ from, part, token: this.tokens.length });
        this.tokens.push({ id, from, to, part, forced: part.forced?.includes(index) });
        from = to;
      });
    } else if (content) this.#runs.push({ from, part });
  }

  /** Shows the text as Markdown, or as plain text. */
  show() {
    this.#isDue = false;
    this.markdown.show(this.text, this.conversation.settings.values.rendered);
    const first = this.body.querySelector('.run[tabindex="0"]') ?? this.body.querySelector('.run');
    if (first) first.tabIndex = 0;
  }

  /** Writes the letters at `at` in the text into an element, with a span for each run. */
  #put(element, at, letters) {
    let index = this.#runs.findLastIndex(({ from }) => from <= at);
    for (let begin = 0; begin < letters.length; index += 1) {
      const end = Math.min(letters.length, (this.#runs[index + 1]?.from ?? Infinity) - at);
      element.append(this.#span(this.#runs[index], letters.slice(begin, end)));
      begin = end;
    }
  }

  #span({ part: { origin }, token }, letters) {
    const names = { class: `run ${origin ?? ''}`, 'data-origin': origin, 'data-token': token };
    const span = make('span', { ...names, tabindex: -1 }, letters);
    const args = { origin: `@origin.${origin}`, meaning: `@meaning.${origin}` };
    return origin ? worded(span, 'token.origin', args, 'wordTitle') : span;
  }

  finish(how) {
    this.#set(how);
    this.show();
    const { tokens, stats, receipt, usage, firstSeconds } = this.figures;
    const say = (key, args) => this.meta.append(worded(make('span'), key, args));
    const first = (stats.ttft_ms != null ? stats.ttft_ms / 1000 : firstSeconds)?.toFixed(1);
    if (tokens) say('meta.done', { tokens, first });
    if (tokens) say('figures.line', shown(this.figures));
    if (stats.adapter) say('meta.adapter', { name: stats.adapter });
    if (stats.exact === false && stats.num_requests > 0) say('meta.inexact');
    if (receipt) this.#sayReceipt(say, receipt);
    if (usage?.cloud.tokens_in) this.#sayMoney(say, usage);
    if (how === 'done' && ENDS[this.finishReason]) say(ENDS[this.finishReason]);
    if (how === 'stopped') say('meta.stopped');
  }

  #sayReceipt(say, { servers, prompt_tokens: prompt, seen, rejected, bytes_up: bytes, audited }) {
    const told = seen.reduce((sum, { tokens: [first, end] }) => sum + end - first, 0);
    const args = { prompt, told, rejected: rejected.length, kb: (bytes / 1000).toFixed(1) };
    if (servers.length) say('meta.seen', { servers: servers.join(', '), ...args });
    else if (!audited) say('meta.unseen');
    if (audited) say('meta.audited');
  }

  #sayMoney(say, { edge, cloud }) {
    const counts = { edge: edge.completion_tokens, cloud: cloud.completion_tokens };
    say('meta.split', { ...counts, read: cloud.tokens_in, hit: cloud.tokens_hit, wrote: cloud.tokens_out });
    if (cloud.cost != null) say('meta.cost', { cost: cloud.cost.toPrecision(3) });
  }

  fail({ message }) {
    this.error = message;
    this.failure.textContent = message;
    this.finish('failed');
  }

  /** What a browser saves of it; `restore` shows it again. */
  get kept() {
    const { mode, seed, error, branch, asks, chunks, status } = this;
    return { mode, seed, error, branch, asks, chunks, status: status === 'busy' ? 'stopped' : status };
  }

  restore({ chunks, status, error, asks }) {
    this.asks = asks;
    for (const chunk of chunks) this.take(chunk, chunk.ms);
    if (status === 'failed') this.fail({ message: error });
    else this.finish(status);
  }

  get isEmpty() {
    return !this.text && !this.calls.list.length;
  }

  /** The answer as a message of the next request. */
  get message() {
    const [calls, thought] = [this.calls.list, this.thought.textContent];
    return { role: 'assistant', content: this.text || null, ...(calls.length ? { tool_calls: calls } : {}),
      ...(thought ? { reasoning_content: thought } : {}) };
  }

  /** Shows the buttons that apply at the answer's position. */
  place({ last, several, chosen }) {
    this.copyButton.hidden = !this.text;
    this.againButton.hidden = !last;
    this.chooseButton.hidden = !(several && last && !this.isEmpty);
    this.chooseButton.setAttribute('aria-pressed', String(chosen));
    worded(this.chooseButton, chosen ? 'chosen' : 'choose');
    this.element.classList.toggle('is-chosen', several && chosen);
    this.calls.open(last && this.status === 'done');
  }

  /** The beginning of a branch at a token: the tokens before it, as chunks and ids. */
  before(at) {
    const tokens = this.tokens.slice(0, at);
    const chunks = tokens.map(({ id, from, to, part: { origin, round, reason } }) => {
      const content = this.text.slice(from, to);
      const ours = { origin, round, reason, before: true, token_ids: [id], token_chars: [[...content].length] };
      return { choices: [{ delta: { content } }], skydraft: ours, ms: 0 };
    });
    if (chunks.length) chunks[0].choices[0].delta.reasoning = this.thought.textContent || undefined;
    return { chunks, ids: tokens.map(({ id }) => id) };
  }

  #ask(run) {
    if (this.status === 'busy' || run.dataset.token === undefined || !getSelection().isCollapsed) return;
    run.focus();
    this.conversation.ask(this, Number(run.dataset.token));
  }

  // Tab stops once at the text. The arrow keys go from token to token, and Enter opens its dialog.
  #walk(event) {
    const runs = [...this.body.querySelectorAll('.run')];
    const at = runs.indexOf(event.target);
    if (event.key === 'Enter' && at >= 0) {
      event.preventDefault();
      this.#ask(event.target);
    }
    const to = runs[at + { ArrowRight: 1, ArrowLeft: -1 }[event.key]];
    if (at < 0 || !to) return;
    event.preventDefault();
    [event.target.tabIndex, to.tabIndex] = [-1, 0];
    to.focus();
  }
}
