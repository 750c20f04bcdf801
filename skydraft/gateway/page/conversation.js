// Turns in their order, the requests that make their answers, and the browser's copy of it all.

import { Answer } from './answer.js';
import { chat, complete } from './api.js';
import { Asking } from './asking.js';
import { heard } from './audio.js';
import { $ } from './dom.js';
import { asked } from './formats.js';
import { askKey } from './key.js';
import { headOf, keep, turnsOf } from './kept.js';
import { Turn } from './turn.js';

const OPEN = 'skydraft.open'; // which conversation this tab shows
const LONGEST_TITLE = 80;
const KEEP_EVERY_MS = 2000; // while an answer comes

const newSeed = () => crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
const newId = () => `${Date.now()}-${newSeed()}`;

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
  keeping = Promise.resolve();
  #id = newId();
  #changed = {}; // when this tab last kept it
  #parted = new Set(); // conversations that another tab went on with, and this one under another id
  #keptAt = 0;
  #running = new Map();

  constructor({ settings, announce, onChange, onNews }) {
    Object.assign(this, { settings, announce, onChange, onNews });
    const likeliest = (answer, at, mode, signal) => complete(this.#question(answer, at, mode), signal);
    this.asking = new Asking({ likeliest, onBranch: (...branch) => this.#branch(...branch) });
  }

  get busy() {
    return this.#running.size > 0;
  }

  send(text, audio, modes) {
    this.#begin({ text, audio }, modes);
  }

  #begin(asks, modes) {
    const seed = newSeed();
    const turn = this.#add(asks, modes.map((mode) => new Answer(mode, seed, this.#does)));
    turn.element.scrollIntoView({ block: 'start' });
    for (const answer of turn.answers) this.#run(turn, answer);
  }

  #add(asks, answers) {
    const turn = new Turn(asks, answers, (...edited) => this.#edit(...edited));
    this.turns.push(turn);
    $('turns').append(turn.element);
    return turn;
  }

  /** Asks anew from here on. What followed stays in the list of conversations, as it was. */
  #edit(turn, text) {
    if (this.busy) return;
    const at = this.turns.indexOf(turn);
    if (at < this.turns.length - 1) this.#become(newId());
    for (const old of this.turns.splice(at)) old.element.remove();
    const asked = turn.answers.filter(({ branch }) => !branch);
    const modes = asked.length > 1 ? asked.map(({ mode }) => mode) : [this.settings.values.mode];
    this.send(text, turn.audio, modes);
  }

  // What the buttons of an answer do, and what it asks for.
  #does = {
    follow,
    isRendered: () => this.settings.values.rendered,
    retry: (answer) => this.#again(answer, answer.seed),
    regenerate: (answer) => this.#again(answer, newSeed()),
    results: (answer, results) => {
      if (this.busy) return;
      this.#choose(answer);
      this.#begin({ results }, [answer.mode]);
    },
    ask: (answer, at) => this.asking.open(answer, at, this.busy),
    choose: (answer) => {
      this.#choose(answer);
      this.#place();
      this.#keep();
    },
  };

  #choose(answer) {
    const turn = this.#turnOf(answer);
    turn.chosen = turn.answers.indexOf(answer);
  }

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

  /** All that was said before and in `turn`; a question that was never answered is left out. */
  history(turn, { system } = this.settings.values) {
    const messages = system.trim() ? [{ role: 'system', content: system.trim() }] : [];
    for (const past of this.turns.slice(0, this.turns.indexOf(turn))) {
      const answer = [past.answers[past.chosen], ...past.answers].find(({ isEmpty }) => !isEmpty);
      if (answer) messages.push(...past.messages, answer.message);
    }
    return [...messages, ...turn.messages];
  }

  /** A branch is asked as the answer was of which it is one. */
  #request(turn, answer) {
    const { system, temperature, maxTokens, tools, toolChoice, schema } = answer.branch ? answer.asks : this.settings.values;
    answer.asks = { system, temperature, maxTokens, tools, toolChoice, schema };
    const ids = answer.branch?.ids ?? [];
    return {
      model: answer.mode ? `skydraft-${answer.mode}` : 'skydraft',
      messages: this.history(turn, answer.asks),
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: Math.max(maxTokens - ids.length, 1),
      temperature,
      seed: answer.seed,
      ...asked(answer.asks),
      skydraft: { token_ids: true, ...(ids.length ? { continue_ids: ids } : {}) },
    };
  }

  /** Asks one model alone for the probabilities at a token's place. A bias holds the token, so its own comes too. */
  #question(answer, at, mode) {
    const { ids } = answer.before(at);
    return {
      model: `skydraft-${mode}`,
      messages: this.history(this.#turnOf(answer), answer.asks),
      max_tokens: 1,
      temperature: 0,
      logit_bias: { [answer.tokens[at].id]: 100 },
      skydraft: { logprobs: 5, continue_ids: ids, continue_as_prompt: true }, // asked, so never audited
    };
  }

  /** Lets the text go on from another token at the place of one. What followed stays in the list of conversations. */
  #branch(answer, at, { id, token }) {
    if (this.busy) return;
    const turn = this.#turnOf(answer);
    const place = this.turns.indexOf(turn);
    if (place < this.turns.length - 1) this.#become(newId());
    for (const old of this.turns.splice(place + 1)) old.element.remove();
    const { chunks, ids } = answer.before(at);
    const branch = new Answer(answer.mode, answer.seed, this.#does, { chunks, ids: [...ids, id], token, of: turn.answers.indexOf(answer) });
    branch.asks = answer.asks;
    turn.add(branch);
    this.#run(turn, branch);
    const isBelow = branch.element.getBoundingClientRect().top > window.innerHeight / 2; // a phone has no room beside
    branch.element.scrollIntoView({ block: isBelow ? 'start' : 'nearest' });
    branch.body.focus({ preventScroll: true });
  }

  async #run(turn, answer) {
    const stopper = new AbortController();
    this.#running.set(answer, stopper);
    this.#place();
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
    follow(() => this.#place());
    if (this.turns.includes(turn)) this.#keep();
    this.onNews();
  }

  async #attempt(turn, answer, signal, waited = false) {
    answer.start();
    this.#place();
    this.#keep();
    const began = performance.now();
    try {
      for await (const chunk of chat(this.#request(turn, answer), signal)) this.#take(answer, chunk, performance.now() - began);
    } catch (error) {
      if (error.status === 401 && (await askKey())) return this.#attempt(turn, answer, signal, waited);
      const isBusy = error.status === 503 && error.retryAfter !== null && error.code !== 'cloud_timeout'; // that one has waited
      if (!isBusy || waited) throw error;
      await pause(error.retryAfter, signal, (seconds) => answer.wait(seconds));
      return this.#attempt(turn, answer, signal, true);
    }
    return undefined;
  }

  #take(answer, chunk, ms) {
    answer.take(chunk, ms);
    if (chunk.skydraft?.notice) {
      this.announce('notice', { words: chunk.skydraft.notice });
      this.onNews();
    }
    this.onChange();
    if (performance.now() - this.#keptAt > KEEP_EVERY_MS) this.#keep();
  }

  stop() {
    for (const stopper of this.#running.values()) stopper.abort();
  }

  clear() {
    if (this.busy) this.#keep();
    this.stop();
    for (const { audio } of this.turns) if (audio) URL.revokeObjectURL(audio.url);
    this.turns = [];
    $('turns').replaceChildren();
    this.#become(newId());
    this.#place();
  }

  /** Shows all answers again, after a switch between Markdown and what was written. */
  show() {
    for (const answer of this.turns.flatMap(({ answers }) => answers)) answer.show();
  }

  #place() {
    const last = this.turns.at(-1);
    $('turns').classList.toggle('busy', this.busy);
    for (const turn of this.turns) {
      turn.answers.forEach((answer, at) =>
        answer.place({ last: turn === last, several: turn.answers.length > 1, chosen: turn.chosen === at }));
    }
    this.onChange();
  }

  // The browser's copy

  get id() {
    return this.#id;
  }

  #become(id, changed = 0) {
    this.#id = id;
    this.#changed = { [id]: changed };
    sessionStorage.setItem(OPEN, id);
  }

  /** Shows the conversation that this tab showed before a reload. */
  async reopen() {
    const id = sessionStorage.getItem(OPEN);
    if (id) await this.open(id, () => !this.turns.length); // unless a question was asked meanwhile
  }

  /** Shows a conversation that the browser keeps, if it does and `isWanted` still. */
  async open(id, isWanted = () => true) {
    const head = await headOf(id);
    const turns = head && (await turnsOf(id));
    if (!turns || !isWanted()) return;
    this.clear();
    this.#parted.delete(id);
    this.#become(id, head.changed);
    for (const { answers, audio, chosen, ...asks } of turns) {
      const shown = answers.map(({ mode, seed, branch }) => new Answer(mode, seed, this.#does, branch));
      this.#add({ ...asks, audio: audio && heard(audio) }, shown).chosen = chosen;
      shown.forEach((answer, at) => answer.restore(answers[at]));
    }
    this.#place();
    window.scrollTo(0, document.documentElement.scrollHeight);
  }

  /** Keeps the turns as they are now, after what is being kept already. */
  #keep() {
    const [id, turns] = [this.#id, this.turns.map((turn) => turn.kept)];
    this.#keptAt = performance.now();
    sessionStorage.setItem(OPEN, id);
    this.keeping = this.keeping.then(() => this.#keepAs(id, turns)).catch(() => this.announce('saved.failed'));
  }

  async #keepAs(id, turns) {
    if (this.#parted.has(id)) return; // what is here now was kept under another id since
    const before = await headOf(id);
    if (before && before.changed !== (this.#changed[id] ?? before.changed)) {
      this.#parted.add(id); // another tab went on with it
      this.#become(newId());
      return this.#keep();
    }
    const [{ text, audio }] = turns;
    const title = before?.title ?? (text || audio?.name || '–').slice(0, LONGEST_TITLE);
    const changed = Date.now();
    if (id === this.#id) this.#changed = { [id]: changed };
    return keep({ id, title, changed }, turns);
  }
}
