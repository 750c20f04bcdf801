// One answer on the page: its text with origins, its calls, its notices, what became of it, and its buttons.

import { Calls } from './calls.js';
import { copyButton } from './clipboard.js';
import { eachFrame, make, icon } from './dom.js';
import { Figures, ORIGINS, shown } from './figures.js';
import { worded } from './language.js';
import { Markdown } from './markdown.js';
import { sayMoney } from './money.js';
import { Thought } from './thought.js';

const AGAIN = 'M15.5 10a5.5 5.5 0 1 1-1.7-4M14 3v3.2h-3.2';

const ENDS = { length: 'meta.length', content_filter: 'meta.filtered' };

/** Origin, round and reason in words. */
function title(span, { origin, round, reason }) {
  const key = origin === 'chosen' ? 'run.chosen' : !reason || origin === 'cloud' ? 'run.title' : origin === 'edge-fallback' ? 'run.alone' : 'run.reason';
  worded(span, key, { origin: `@origin.${origin}`, meaning: `@meaning.${origin}`, round: round ?? '–', reason: `@reason.${reason}` }, 'wordTitle');
}

function runOf(part, text) {
  const { origin, round, token } = part;
  const span = make('span', { class: `run ${ORIGINS.includes(origin) || origin === 'chosen' ? origin : 'unknown'}`, tabindex: -1 }, text);
  span.classList.toggle('line-end', text.startsWith('\n'));
  span.classList.toggle('seen', Boolean(part.seen));
  Object.assign(span.dataset, { origin: origin ?? '', round: round ?? '', ...(token === undefined ? {} : { token }) });
  if (origin) title(span, part);
  return span;
}

export class Answer {
  chunks = []; // all that came of it: enough to show it again
  tokens = []; // {id, from, to, part} of each, where the gateway tells ids; `part` is what it says of their run
  #runs = []; // parts of the text: tokens, or else by origin, round and reason

  /** `branch` has the chunks of another answer that it begins with, and the ids of its first tokens. */
  constructor(mode, seed, does, branch = null) {
    Object.assign(this, { seed, does, branch });
    this.name = make('h3', { class: 'name' });
    this.body = make('div', { class: 'text', role: 'group', tabindex: -1 });
    this.markdown = new Markdown(this.body, (...part) => this.#put(...part));
    this.state = make('p', { class: 'state' });
    this.notices = make('ul', { class: 'notices' });
    this.failure = make('div', { class: 'failure', hidden: true });
    this.meta = make('p', { class: 'meta' });
    this.buttons = this.#makeButtons(does);
    this.foot = make('footer', { class: 'foot' }, this.meta, this.buttons);
    this.thought = new Thought();
    this.calls = new Calls((results) => does.results(this, results));
    const parts = [this.name, this.thought.element, this.body, this.calls.element, this.state, this.notices, this.failure, this.foot];
    this.element = make('article', { class: 'answer' }, ...parts);
    this.soon = eachFrame(() => does.follow(() => this.show()));
    this.setMode(mode);
    this.start();
    this.body.addEventListener('keydown', (event) => this.#walk(event));
    this.body.addEventListener('click', ({ target }) => this.#ask(target));
  }

  #makeButtons(does) {
    const button = (name, drawing, act) =>
      make('button', { type: 'button', class: `quiet ${name}`, onclick: act }, drawing && icon(drawing), worded(make('span'), name));
    this.copyButton = copyButton(() => this.text);
    this.againButton = button('regenerate', AGAIN, () => does.regenerate(this));
    this.chooseButton = button('choose', null, () => does.choose(this));
    return make('div', { class: 'acts' }, this.copyButton, this.againButton, this.chooseButton);
  }

  setMode(mode) {
    this.mode = mode;
    const args = { mode: `@mode.${mode}`, token: this.branch?.token };
    worded(this.name, this.branch ? 'branch' : `mode.${mode}`, args);
    worded(this.body, this.branch ? 'branch' : 'answer', args, 'wordLabel');
  }

  start() {
    this.text = '';
    this.error = null;
    this.chunks = [];
    this.tokens = [];
    this.#runs = [];
    this.figures = new Figures();
    this.markdown.clear();
    this.calls.clear();
    this.thought.clear();
    this.notices.replaceChildren();
    this.meta.replaceChildren();
    this.failure.hidden = true;
    this.#set('busy');
    worded(this.state, 'thinking');
    for (const chunk of this.branch?.chunks ?? []) this.take(chunk, 0);
  }

  #set(status) {
    this.status = status;
    this.element.dataset.status = status;
    this.body.setAttribute('aria-busy', String(status === 'busy'));
    this.state.hidden = status !== 'busy';
    this.buttons.hidden = status === 'busy';
    this.copyButton.hidden = !this.text;
  }

  /** Takes one chunk of the stream, which came `ms` after the request. */
  take({ choices, skydraft = {} }, ms) {
    const { delta = {}, finish_reason: reason = null } = choices?.[0] ?? {};
    const { begins, ...ours } = skydraft;
    const isChosenNext = skydraft.token_ids && !skydraft.before && this.tokens.length < this.branch?.ids.length;
    if (isChosenNext) this.#chosen((begins ?? '').slice(this.text.length)); // a part of a character begins nothing
    this.chunks.push({ choices: [{ delta, finish_reason: reason }], skydraft: ours, ms });
    if (delta.reasoning) this.#think(delta.reasoning);
    if (delta.content || skydraft.token_ids) this.#write(delta.content ?? '', skydraft);
    // What is not, or not all of it, in the answer's text: calls, as the model writes them.
    if (skydraft.text) this.#mark(skydraft.text, skydraft);
    if (delta.tool_calls) this.calls.take(delta.tool_calls);
    if (!skydraft.before) this.figures.take(skydraft, ms);
    if (skydraft.notice) this.notices.append(make('li', {}, skydraft.notice));
    if (skydraft.stats) this.figures.settle(skydraft.stats);
    if (skydraft.receipt) this.#sign(skydraft.receipt);
    if (skydraft.usage) this.figures.usage = skydraft.usage;
    if (reason) this.finishReason = reason;
  }

  /** The token that was chosen to stand here: its text comes with what follows it. */
  #chosen(text) {
    const part = { origin: 'chosen', before: true, token_ids: [this.branch.ids.at(-1)], token_chars: [[...text].length] };
    this.take({ choices: [{ delta: { content: text } }], skydraft: part }, 0);
  }

  #think(text) {
    this.thought.take(text);
    this.state.hidden = true;
    this.soon();
  }

  #write(content, part) {
    const { origin, round, reason, token_ids: ids = [], token_chars: lengths = [] } = part;
    if (content) this.thought.end();
    const last = this.#runs.at(-1);
    let from = this.text.length;
    this.text += content;
    const letters = [...content];
    if (ids.length && !part.text && !this.asks?.tools?.trim() && lengths.reduce((sum, length) => sum + length, 0) === letters.length) {
      let at = 0;
      ids.forEach((id, index) => {
        const to = from + letters.slice(at, (at += lengths[index])).join('').length;
        // One that adds no character yet is a part of one: it is shown with the token that completes it.
        if (to > from) this.#runs.push({ from, to, origin, round, reason, token: this.tokens.length });
        this.tokens.push({ id, from, to, part, forced: part.forced?.includes(index) });
        from = to;
      });
    } else if (!content) {
      return;
    } else if (last && last.origin === origin && last.round === round && last.reason === reason) last.to = this.text.length;
    else this.#runs.push({ from, to: this.text.length, origin, round, reason });
    this.state.hidden = true;
    this.soon();
  }

  /** Splits runs where a server's knowledge of the text begins or ends; the receipt counts whole characters. */
  #sign(receipt) {
    this.figures.receipt = receipt;
    if (this.calls.written.firstChild) return; // the text is not all that was written
    const letters = [...this.text];
    const place = (count) => letters.slice(0, count).join('').length;
    const seen = receipt.seen.map(({ chars }) => chars.map(place));
    this.#runs = this.#runs.flatMap((run) => {
      const cuts = [run.from, ...seen.flat().filter((at) => at > run.from && at < run.to), run.to];
      return cuts.slice(1).map((to, at) =>
        ({ ...run, from: cuts[at], to, seen: seen.some(([first, end]) => first <= cuts[at] && to <= end) }));
    });
    this.markdown.clear();
  }

  #mark(text, part) {
    this.state.hidden = true;
    this.calls.element.hidden = false;
    this.calls.written.append(runOf(part, text));
    this.calls.written.firstChild.tabIndex = 0;
  }

  /** Shows the text as Markdown, or as it was written. */
  show() {
    this.markdown.show(this.text, this.does.isRendered());
    const first = this.body.querySelector('.run[tabindex="0"]') ?? this.body.querySelector('.run');
    if (first) first.tabIndex = 0;
  }

  /** Writes a part of the text into an element, a span for each of its runs, or `as` in place of it all. */
  #put(element, from, to, as) {
    let at = this.#runs.findLastIndex((run) => run.from <= from);
    for (let begin = from; begin < to; at += 1) {
      const end = Math.min(this.#runs[at].to, to);
      element.append(runOf(this.#runs[at], as ?? this.text.slice(begin, end)));
      if (as) return;
      begin = end;
    }
  }

  wait(seconds) {
    this.state.hidden = false;
    worded(this.state, 'error.wait', { seconds });
  }

  finish(how) {
    this.#set(how);
    this.thought.end();
    this.show();
    const { tokens, firstMs, calls } = this.figures;
    const say = (key, args) => this.meta.append(worded(make('span'), key, args));
    if (tokens) say('meta.done', { tokens, speed: shown.speed(this.figures) });
    if (tokens && firstMs !== null) say('meta.first', { seconds: (firstMs / 1000).toFixed(1) });
    if (tokens && how === 'done') {
      const times = Math.round(calls);
      say(['meta.none', 'meta.one'][times] ?? 'meta.calls', { times, written: shown.written(this.figures) });
    }
    if (this.figures.adapter) say('meta.adapter', { name: this.figures.adapter });
    if (this.figures.inexact) say('meta.inexact');
    if (this.figures.receipt) this.#sayReceipt(say, this.figures.receipt);
    sayMoney(say, this.figures);
    if (how === 'done' && ENDS[this.finishReason]) say(ENDS[this.finishReason]);
    if (how === 'stopped') say('meta.stopped');
  }

  #sayReceipt(say, { servers, prompt_tokens: prompt, seen, rejected, bytes_up: bytes, audited }) {
    const told = seen.reduce((sum, { tokens: [first, end] }) => sum + end - first, 0);
    const args = { servers: servers.join(', '), prompt, told, rejected: rejected.length, kb: (bytes / 1000).toFixed(1) };
    if (servers.length || !audited) say(servers.length ? 'meta.seen' : 'meta.unseen', args);
    if (audited) say('meta.audited');
  }

  fail(error) {
    this.error = error.message;
    const retry = make('button', { type: 'button', class: 'plain retry', onclick: () => this.does.retry(this) });
    this.failure.replaceChildren(make('p', {}, error.message), worded(retry, 'retry'));
    this.failure.hidden = false;
    this.finish('failed');
  }

  /** What a browser keeps of it; `restore` shows it again. */
  get kept() {
    const { mode, seed, error, branch, asks } = this;
    const chunks = this.chunks.slice(branch?.chunks.length ?? 0);
    return { mode, seed, error, branch, asks, chunks, status: this.status === 'busy' ? 'stopped' : this.status };
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

  /** What it is in the next request. */
  get message() {
    const calls = this.calls.list;
    return { role: 'assistant', content: this.text || null, ...(calls.length ? { tool_calls: calls } : {}),
      ...(this.thought.text ? { reasoning_content: this.thought.text } : {}) };
  }

  /** Which buttons make sense where the answer stands. */
  place({ last, several, chosen }) {
    this.againButton.hidden = !last || (this.status === 'failed' && !this.text); // there is a button to try again
    this.chooseButton.hidden = !(several && last && !this.isEmpty);
    this.calls.open(last && this.status === 'done');
    this.chooseButton.setAttribute('aria-pressed', String(chosen));
    worded(this.chooseButton.lastChild, chosen ? 'chosen' : 'choose');
    this.element.classList.toggle('is-chosen', several && chosen);
    this.copyButton.hidden = !this.text;
  }

  /** The beginning of a branch at a token: chunks with the tokens before it, and their ids. */
  before(at) {
    const parts = [];
    for (const token of this.tokens.slice(0, at)) {
      const { origin, round, reason } = token.part;
      const last = parts.at(-1);
      if (last?.part === token.part) last.tokens.push(token);
      else parts.push({ part: token.part, tokens: [token], ours: { origin, round, reason, before: true } });
    }
    const chunks = parts.map(({ tokens, ours }) => {
      const texts = tokens.map(({ from, to }) => this.text.slice(from, to));
      const named = { token_ids: tokens.map(({ id }) => id), token_chars: texts.map((text) => [...text].length) };
      return { choices: [{ delta: { content: texts.join('') } }], skydraft: { ...ours, ...named }, ms: 0 };
    });
    if (chunks.length) chunks[0].choices[0].delta.reasoning = this.thought.text || undefined;
    return { chunks, ids: this.tokens.slice(0, at).map(({ id }) => id) };
  }

  #ask(run) {
    if (this.status === 'busy' || run.dataset.token === undefined || !getSelection().isCollapsed) return;
    run.focus();
    this.does.ask(this, Number(run.dataset.token));
  }

  // One stop of the Tab key for the whole text; the arrows go from run to run, and Enter asks about it.
  #walk(event) {
    if (event.key === 'Enter' && event.target.closest('.run')) {
      event.preventDefault();
      this.#ask(event.target);
    }
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const from = event.target.closest('.run');
    if (!step || !from) return;
    const runs = [...this.body.querySelectorAll('.run')];
    const to = runs[runs.indexOf(from) + step];
    if (!to) return;
    event.preventDefault();
    from.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }
}
