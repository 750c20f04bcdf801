// Questions and answers in their order, and the requests that make them.

import { Answer } from './answer.js';
import { chat } from './api.js';
import { player } from './composer.js';
import { asked } from './formats.js';
import { $, make } from './dom.js';
import { askKey } from './key.js';
import { worded } from './language.js';

const newSeed = () => crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;

/** What a turn asks: a question, or results of the calls before it. */
function askedBy(turn) {
  if (!turn.results) return [{ role: 'user', content: contentOf(turn) }];
  return turn.results.map(({ id, content }) => ({ role: 'tool', tool_call_id: id, content }));
}

function contentOf({ text, audio }) {
  if (!audio) return text;
  const heard = { type: 'input_audio', input_audio: { data: audio.data, format: audio.format } };
  return text ? [{ type: 'text', text }, heard] : [heard];
}

/** Keeps the end of the page in sight while it grows, unless the reader has gone up. */
function follow(grow) {
  const page = document.documentElement;
  const isAtEnd = window.scrollY + window.innerHeight > page.scrollHeight - 90;
  grow();
  if (isAtEnd) window.scrollTo(0, page.scrollHeight);
}

function pause(seconds, signal, each) {
  return new Promise((resolve, reject) => {
    const until = performance.now() + seconds * 1000;
    const step = () => {
      const left = Math.ceil((until - performance.now()) / 1000);
      if (signal.aborted) reject(new DOMException('stopped', 'AbortError'));
      else if (left <= 0) resolve();
      else {
        each(left);
        setTimeout(step, Math.min(250, until - performance.now()));
      }
    };
    step();
  });
}

export class Conversation {
  turns = [];
  #running = new Map();

  constructor({ settings, announce, onChange, onNews }) {
    Object.assign(this, { settings, announce, onChange, onNews });
  }

  get busy() {
    return this.#running.size > 0;
  }

  send(text, audio, modes) {
    this.#begin({ text, audio }, modes);
  }

  #begin(asks, modes) {
    const seed = newSeed();
    const turn = { ...asks, chosen: 0, answers: modes.map((mode) => new Answer(mode, seed, this.#does)) };
    turn.element = this.#drawTurn(turn);
    this.turns.push(turn);
    $('turns').append(turn.element);
    turn.element.scrollIntoView({ block: 'start' });
    for (const answer of turn.answers) this.#run(turn, answer);
  }

  #drawTurn({ text, audio, results, answers }) {
    const said = make('div', { class: 'said' }, worded(make('h3', { class: 'hidden' }), 'you'));
    if (audio) said.append(player(audio));
    if (text) said.append(make('p', {}, text));
    if (results) said.append(make('ul', { class: 'results' }, ...results.map(({ content }) => make('li', {}, content || '–'))));
    const side = make('div', { class: 'answers' }, ...answers.map(({ element }) => element));
    side.classList.toggle('several', answers.length > 1);
    return make('section', { class: 'turn' }, said, side);
  }

  // What the buttons of an answer do.
  #does = {
    copy: (answer) => this.#copy(answer),
    retry: (answer) => this.#again(answer, answer.seed),
    regenerate: (answer) => this.#again(answer, newSeed()),
    results: (answer, results) => {
      if (this.busy) return;
      const turn = this.#turnOf(answer);
      turn.chosen = turn.answers.indexOf(answer);
      this.#begin({ results }, [answer.mode]);
    },
    choose: (answer) => {
      const turn = this.#turnOf(answer);
      turn.chosen = turn.answers.indexOf(answer);
      this.#changed();
    },
  };

  #turnOf(answer) {
    return this.turns.find(({ answers }) => answers.includes(answer));
  }

  #again(answer, seed) {
    const turn = this.#turnOf(answer);
    if (this.#running.has(answer)) return;
    answer.seed = seed;
    // The mode may have been switched since; side by side each answer keeps its own.
    if (turn.answers.length === 1) answer.setMode(this.settings.values.mode);
    this.#run(turn, answer);
    answer.body.focus({ preventScroll: true }); // the button that was pressed is gone
  }

  async #copy(answer) {
    try {
      await navigator.clipboard.writeText(answer.text);
    } catch {
      copyBySelection(answer.text);
    }
    const words = answer.copyButton.lastChild;
    worded(words, 'copied');
    this.announce('announce.copied');
    setTimeout(() => worded(words, 'copy'), 1500);
  }

  /** All that was said before and in `turn`; a question that was never answered is left out. */
  history(turn) {
    const { system } = this.settings.values;
    const messages = system.trim() ? [{ role: 'system', content: system.trim() }] : [];
    for (const past of this.turns.slice(0, this.turns.indexOf(turn))) {
      const answer = [past.answers[past.chosen], ...past.answers].find(({ isEmpty }) => !isEmpty);
      if (answer) messages.push(...askedBy(past), answer.message);
    }
    return [...messages, ...askedBy(turn)];
  }

  #request(turn, answer) {
    const { temperature, maxTokens, ...formats } = this.settings.values;
    return {
      model: answer.mode ? `skydraft-${answer.mode}` : 'skydraft',
      messages: this.history(turn),
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: maxTokens,
      temperature,
      seed: answer.seed,
      ...asked(formats),
    };
  }

  async #run(turn, answer) {
    const stopper = new AbortController();
    this.#running.set(answer, stopper);
    this.#changed();
    try {
      await this.#attempt(turn, answer, stopper.signal);
      follow(() => answer.finish('done'));
      this.announce('announce.ready', { tokens: answer.figures.tokens });
    } catch (error) {
      if (error.name === 'AbortError') {
        answer.finish('stopped');
        this.announce('announce.stopped');
      } else {
        follow(() => answer.fail(error));
        this.announce('announce.failed', { message: error.message });
      }
    }
    this.#running.delete(answer);
    follow(() => this.#changed());
    this.onNews();
  }

  async #attempt(turn, answer, signal, waited = false) {
    answer.start(performance.now());
    this.#changed();
    try {
      for await (const chunk of chat(this.#request(turn, answer), signal)) this.#take(answer, chunk);
    } catch (error) {
      if (error.status === 401 && (await askKey())) return this.#attempt(turn, answer, signal, waited);
      if (error.status !== 503 || error.retryAfter === null || waited) throw error;
      await pause(error.retryAfter, signal, (seconds) => answer.wait(seconds));
      return this.#attempt(turn, answer, signal, true);
    }
    return undefined;
  }

  #take(answer, chunk) {
    follow(() => answer.take(chunk, performance.now()));
    if (chunk.skydraft?.notice) {
      this.announce('notice', { words: chunk.skydraft.notice });
      this.onNews();
    }
    this.onChange();
  }

  stop() {
    for (const stopper of this.#running.values()) stopper.abort();
  }

  clear() {
    this.stop();
    for (const { audio } of this.turns) if (audio) URL.revokeObjectURL(audio.url);
    this.turns = [];
    $('turns').replaceChildren();
    this.#changed();
  }

  #changed() {
    const last = this.turns.at(-1);
    for (const turn of this.turns) {
      turn.answers.forEach((answer, at) =>
        answer.place({ last: turn === last, several: turn.answers.length > 1, chosen: turn.chosen === at }));
    }
    this.onChange();
  }
}

// Pages without HTTPS have no clipboard of their own.
function copyBySelection(text) {
  const field = make('textarea', { class: 'hidden', 'aria-hidden': 'true' });
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand('copy');
  field.remove();
}
