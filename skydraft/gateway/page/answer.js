// One answer on the page: its runs of text by origin, its calls, its notices, what became of it, and its buttons.

import { Calls } from './calls.js';
import { make, icon } from './dom.js';
import { Figures, ORIGINS, shown } from './figures.js';
import { worded } from './language.js';

const COPY = 'M7 7V4h9v9h-3M4 7h9v9H4z';
const AGAIN = 'M15.5 10a5.5 5.5 0 1 1-1.7-4M14 3v3.2h-3.2';

/** Origin, round and reason in words. */
function title(span, { origin, round, reason }) {
  const key = !reason ? 'run.title' : origin === 'edge-fallback' ? 'run.alone' : 'run.reason';
  worded(span, key, { origin: `@origin.${origin}`, round: round ?? '–', reason: `@reason.${reason}` }, 'wordTitle');
}

function runOf(part, first) {
  const { origin, round, isCode } = part;
  const span = make('span', { class: `run ${ORIGINS.includes(origin) ? origin : 'unknown'}`, tabindex: first ? 0 : -1 });
  span.classList.toggle('code', isCode);
  Object.assign(span.dataset, { origin: origin ?? '', round: round ?? '' });
  if (origin) title(span, part);
  return span;
}

export class Answer {
  text = '';
  figures = new Figures();
  status = 'idle';
  error = null;
  #last = null;
  #line = ''; // the line being written, which may open or close a block of code
  #inCode = false;

  constructor(mode, seed, does) {
    this.mode = mode;
    this.seed = seed;
    this.name = make('h3', { class: 'name' });
    this.body = make('div', { class: 'text', role: 'group', tabindex: -1 });
    this.state = make('p', { class: 'state' });
    this.notices = make('ul', { class: 'notices' });
    this.failure = make('div', { class: 'failure', hidden: true });
    this.meta = make('p', { class: 'meta' });
    this.buttons = this.#makeButtons(does);
    this.foot = make('footer', { class: 'foot' }, this.meta, this.buttons);
    this.calls = new Calls((results) => does.results(this, results));
    const parts = [this.name, this.body, this.calls.element, this.state, this.notices, this.failure, this.foot];
    this.element = make('article', { class: 'answer' }, ...parts);
    this.does = does;
    this.setMode(mode);
    this.body.addEventListener('keydown', (event) => this.#walk(event));
  }

  #makeButtons(does) {
    const button = (name, drawing, act) =>
      make('button', { type: 'button', class: `quiet ${name}`, onclick: act }, drawing && icon(drawing), worded(make('span'), name));
    this.copyButton = button('copy', COPY, () => does.copy(this));
    this.againButton = button('regenerate', AGAIN, () => does.regenerate(this));
    this.chooseButton = button('choose', null, () => does.choose(this));
    return make('div', { class: 'acts' }, this.copyButton, this.againButton, this.chooseButton);
  }

  setMode(mode) {
    this.mode = mode;
    worded(this.name, `mode.${mode}`);
    worded(this.body, 'answer', { mode: `@mode.${mode}` }, 'wordLabel');
  }

  start(now) {
    this.text = '';
    this.error = null;
    this.#last = null;
    this.#line = '';
    this.#inCode = false;
    this.figures = new Figures();
    this.figures.start(now);
    this.body.replaceChildren();
    this.calls.clear();
    this.notices.replaceChildren();
    this.meta.replaceChildren();
    this.failure.hidden = true;
    this.#set('busy');
    worded(this.state, 'thinking');
  }

  #set(status) {
    this.status = status;
    this.element.dataset.status = status;
    this.body.setAttribute('aria-busy', String(status === 'busy'));
    this.state.hidden = status !== 'busy';
    this.buttons.hidden = status === 'busy';
    this.copyButton.hidden = !this.text;
  }

  /** Takes one chunk of the stream. */
  take(chunk, now) {
    const choice = chunk.choices?.[0];
    const part = chunk.skydraft ?? {};
    const { content, tool_calls: calls } = choice?.delta ?? {};
    if (content) this.#write(content, part);
    // What is not, or not all of it, in the answer's text: calls, as the model writes them.
    if (part.text) this.#mark(part.text, part);
    if (calls) this.calls.take(calls);
    this.figures.take(part, now);
    if (part.notice) this.notice(part.notice);
    if (part.stats) this.figures.settle(part.stats);
    if (choice?.finish_reason) this.finishReason = choice.finish_reason;
  }

  #write(content, part) {
    this.text += content;
    this.state.hidden = true;
    for (const piece of content.split(/(?<=\n)/)) {
      this.#line += piece;
      const isFence = this.#line.startsWith('```');
      this.#put(piece, { ...part, isCode: this.#inCode || isFence });
      if (piece.endsWith('\n')) {
        if (isFence) this.#inCode = !this.#inCode;
        this.#line = '';
      }
    }
  }

  #mark(text, part) {
    this.state.hidden = true;
    this.calls.element.hidden = false;
    const span = runOf(part, !this.calls.written.firstChild);
    span.append(text);
    this.calls.written.append(span);
  }

  #put(piece, part) {
    const last = this.#last;
    if (last && ['origin', 'round', 'reason', 'isCode'].every((name) => last.part[name] === part[name])) {
      last.node.appendData(piece);
      return;
    }
    const span = runOf(part, !last);
    const node = document.createTextNode(piece);
    span.append(node);
    this.body.append(span);
    this.#last = { part, node };
  }

  notice(words) {
    this.notices.append(make('li', {}, words));
  }

  wait(seconds) {
    this.state.hidden = false;
    worded(this.state, 'error.wait', { seconds });
  }

  finish(how) {
    this.#set(how);
    const { tokens, firstMs } = this.figures;
    const say = (key, args) => this.meta.append(worded(make('span'), key, args));
    if (tokens) say('meta.done', { tokens, speed: shown.speed(this.figures) });
    if (tokens && firstMs !== null) say('meta.first', { ms: Math.round(firstMs) });
    if (tokens && how === 'done') say('meta.calls', { calls: shown.calls(this.figures), written: shown.written(this.figures) });
    if (this.figures.inexact) say('meta.inexact');
    if (this.figures.cost != null) say('meta.cost', { cost: this.figures.cost.toPrecision(3) });
    if (how === 'done' && this.finishReason === 'length') say('meta.length');
    if (how === 'stopped') say('meta.stopped');
  }

  fail(error) {
    this.error = error;
    const retry = make('button', { type: 'button', class: 'plain retry', onclick: () => this.does.retry(this) });
    this.failure.replaceChildren(make('p', {}, error.message), worded(retry, 'retry'));
    this.failure.hidden = false;
    this.finish('failed');
  }

  get isEmpty() {
    return !this.text && !this.calls.list.length;
  }

  /** What it is in the next request. */
  get message() {
    const calls = this.calls.list;
    return { role: 'assistant', content: this.text || null, ...(calls.length ? { tool_calls: calls } : {}) };
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

  // One stop of the Tab key for the whole text; the arrows go from run to run.
  #walk(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const from = event.target.closest('.run');
    if (!step || !from) return;
    const to = step > 0 ? from.nextElementSibling : from.previousElementSibling;
    if (!to) return;
    event.preventDefault();
    from.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }
}
