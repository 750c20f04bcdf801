// Turns in their order, the requests that make their answers, and the browser's copy of it all.

import { Answer } from './answer.js';
import { chat, complete } from './api.js';
import { askToken } from './asking.js';
import { $, follow } from './dom.js';
import { headOf, keep, newId, turnsOf } from './kept.js';
import { announce } from './language.js';
import { read } from './settings.js';
import { Turn } from './turn.js';

const OPEN = 'skydraft.open'; // which conversation this tab shows
const LONGEST_TITLE = 80;
const KEEP_EVERY_MS = 2000; // while an answer comes

const newSeed = () => crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;

export class Conversation {
  turns = [];
  head = { id: newId() }; // what it is kept as
  keeping = Promise.resolve();
  #keptAt = 0;
  #running = new Map();

  constructor({ settings, onChange, onNews }) {
    Object.assign(this, { settings, onChange, onNews });
  }

  get busy() {
    return this.#running.size > 0;
  }

  /** Asks a text, a recording or both, or gives the results of calls. */
  send(asks, modes) {
    const seed = newSeed();
    const turn = this.#add(asks, modes.map((mode) => new Answer(mode, seed, this)));
    turn.element.scrollIntoView({ block: 'start' });
    for (const answer of turn.answers) this.#run(turn, answer);
  }

  #add(asks, answers) {
    const turn = new Turn(asks, answers, (...edited) => this.#edit(...edited));
    this.turns.push(turn);
    $('turns').append(turn.element);
    return turn;
  }

  /** Removes what follows a turn. The list of conversations has it still, as it was. */
  #cutAfter(turn) {
    const removed = this.turns.splice(this.turns.indexOf(turn) + 1);
    for (const { element } of removed) element.remove();
    if (removed.length) this.#become({ id: newId() });
  }

  /** Asks anew from here on. */
  #edit(turn, text) {
    if (this.busy) return;
    this.#cutAfter(turn);
    this.turns.pop().element.remove();
    const modes = turn.answers.filter(({ branch }) => !branch).map(({ mode }) => mode);
    this.send({ text, audio: turn.audio }, modes.length > 1 ? modes : [this.settings.values.mode]);
  }

  #turnOf(answer) {
    return this.turns.find(({ answers }) => answers.includes(answer));
  }

  // What an answer's buttons and tokens do.

  /** Asks again: what failed with the same seed, anything else with another. */
  again(old) {
    const turn = this.#turnOf(old);
    // The mode may have been switched since; side by side each answer keeps its own.
    const mode = turn.answers.length === 1 ? this.settings.values.mode : old.mode;
    const answer = new Answer(mode, old.status === 'failed' ? old.seed : newSeed(), this, old.branch);
    answer.asks = old.asks;
    turn.replace(old, answer);
    this.#run(turn, answer);
    answer.body.focus({ preventScroll: true }); // the button that was pressed is gone
  }

  choose(answer) {
    const turn = this.#turnOf(answer);
    turn.chosen = turn.answers.indexOf(answer);
    this.#place();
    this.#keep();
  }

  giveResults(answer, results) {
    if (this.busy) return;
    this.choose(answer);
    this.send({ results }, [answer.mode]);
  }

  ask(answer, at) {
    const likeliest = (mode, signal) => complete(this.#question(answer, at, mode), signal);
    askToken(answer, at, this.busy, likeliest, (choice) => this.#branch(answer, at, choice));
  }

  /** All that was said before and in `turn`; a question that was never answered is left out. */
  #history(turn, { system }) {
    const messages = system.trim() ? [{ role: 'system', content: system.trim() }] : [];
    for (const past of this.turns.slice(0, this.turns.indexOf(turn))) {
      const answer = [past.answers[past.chosen], ...past.answers].find(({ isEmpty }) => !isEmpty);
      if (answer) messages.push(...past.messages, answer.message);
    }
    return [...messages, ...turn.messages];
  }

  /** A branch is asked as the answer was of which it is one. */
  #request(turn, answer) {
    if (!answer.branch) answer.asks = { ...this.settings.values };
    const { temperature, maxTokens, tools, schema } = answer.asks;
    const ids = answer.branch?.ids ?? [];
    return {
      model: answer.mode ? `skydraft-${answer.mode}` : 'skydraft',
      messages: this.#history(turn, answer.asks),
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: Math.max(maxTokens - ids.length, 1),
      temperature,
      seed: answer.seed,
      tools: read('tools', tools),
      response_format: read('schema', schema),
      skydraft: { token_ids: true, ...(ids.length ? { continue_ids: ids } : {}) },
    };
  }

  /** Asks one model alone for the probabilities at a token's place. A bias holds the token, so its own comes too. */
  #question(answer, at, mode) {
    const { ids } = answer.before(at);
    return {
      model: `skydraft-${mode}`,
      messages: this.#history(this.#turnOf(answer), answer.asks),
      max_tokens: 1,
      temperature: 0,
      logit_bias: { [answer.tokens[at].id]: 100 },
      skydraft: { logprobs: 5, continue_ids: ids, continue_as_prompt: true }, // asked, so never audited
    };
  }

  /** Lets the text go on from another token at the place of one. */
  #branch(answer, at, { id, token }) {
    if (this.busy) return;
    const turn = this.#turnOf(answer);
    const { chunks, ids } = answer.before(at);
    const branch = new Answer(answer.mode, answer.seed, this, { chunks, ids: [...ids, id], token });
    branch.asks = answer.asks;
    this.#cutAfter(turn);
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
    this.#keep();
    const began = performance.now();
    try {
      for await (const chunk of chat(this.#request(turn, answer), stopper.signal)) {
        answer.take(chunk, performance.now() - began);
        if (chunk.skydraft?.notice) this.onNews();
        this.onChange();
        if (performance.now() - this.#keptAt > KEEP_EVERY_MS) this.#keep();
      }
      follow(() => answer.finish('done'));
      announce('announce.ready', { tokens: answer.figures.tokens });
    } catch (error) {
      follow(() => (error.name === 'AbortError' ? answer.finish('stopped') : answer.fail(error)));
    }
    this.#running.delete(answer);
    follow(() => this.#place());
    if (this.turns.includes(turn)) this.#keep();
    this.onNews();
  }

  stop() {
    for (const stopper of this.#running.values()) stopper.abort();
  }

  clear() {
    if (this.busy) this.#keep();
    this.stop();
    this.turns = [];
    $('turns').replaceChildren();
    this.#become({ id: newId() });
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
      const [isLast, several] = [turn === last, turn.answers.length > 1];
      turn.answers.forEach((answer, at) => answer.place({ last: isLast, several, chosen: turn.chosen === at }));
    }
    this.onChange();
  }

  // The browser's copy

  #become(head) {
    this.head = head;
    sessionStorage.setItem(OPEN, head.id);
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
    this.#become(head);
    for (const { answers, chosen, ...asks } of turns) {
      const shown = answers.map(({ mode, seed, branch }) => new Answer(mode, seed, this, branch));
      this.#add(asks, shown).chosen = chosen;
      shown.forEach((answer, at) => answer.restore(answers[at]));
    }
    this.#place();
    window.scrollTo(0, document.documentElement.scrollHeight);
  }

  /** Keeps the turns as they are now, after what is being kept already. */
  #keep() {
    const [{ text, audio }] = this.turns;
    const [head, turns] = [this.head, this.turns.map((turn) => turn.kept)];
    head.title ??= (text || audio.name).slice(0, LONGEST_TITLE);
    this.#keptAt = performance.now();
    const kept = this.keeping.then(() => keep(head, turns)).then(() => sessionStorage.setItem(OPEN, this.head.id));
    this.keeping = kept.catch(() => announce('saved.failed'));
  }
}
