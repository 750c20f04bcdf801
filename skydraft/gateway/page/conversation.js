// The turns of a conversation, the requests for their answers, and the browser's copy of both.

import { Answer } from './answer.js';
import { chat, complete } from './api.js';
import { askToken } from './asking.js';
import { $, follow } from './dom.js';
import { headOf, keep, newId, turnsOf } from './kept.js';
import { announce } from './language.js';
import { read } from './settings.js';
import { Turn } from './turn.js';

const OPEN = 'skydraft.open'; // the key of the conversation that this tab shows
const LONGEST_TITLE = 80;
const KEEP_EVERY_MS = 2000; // interval of saving while an answer arrives

const newSeed = () => crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;

export class Conversation {
  turns = [];
  head = { id: newId() }; // id and title in the browser's store
  keeping = Promise.resolve();
  #keptAt = 0;
  #running = new Map();

  constructor({ settings, onChange, onNews }) {
    Object.assign(this, { settings, onChange, onNews });
  }

  get busy() {
    return this.#running.size > 0;
  }

  /** Sends a question (text, recording or both), or the results of calls. */
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

  /** Removes all turns after one. The saved conversation keeps them; this one gets a new id. */
  #cutAfter(turn) {
    const removed = this.turns.splice(this.turns.indexOf(turn) + 1);
    for (const { element } of removed) element.remove();
    if (removed.length) this.#become({ id: newId() });
  }

  /** Replaces a turn and all later ones by an edited question. */
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

  // Actions of an answer's buttons and tokens.

  /** Asks again: a failed answer with the same seed, any other with a new one. */
  again(old) {
    const turn = this.#turnOf(old);
    // A single answer uses the mode chosen now; answers side by side keep their own.
    const mode = turn.answers.length === 1 ? this.settings.values.mode : old.mode;
    const answer = new Answer(mode, old.status === 'failed' ? old.seed : newSeed(), this, old.branch);
    answer.asks = old.asks;
    turn.replace(old, answer);
    this.#run(turn, answer);
    answer.body.focus({ preventScroll: true }); // the pressed button no longer exists
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

  /** All messages up to `turn`, without earlier questions that have no answer. */
  #history(turn, { system }) {
    const messages = system.trim() ? [{ role: 'system', content: system.trim() }] : [];
    for (const past of this.turns.slice(0, this.turns.indexOf(turn))) {
      const answer = [past.answers[past.chosen], ...past.answers].find(({ isEmpty }) => !isEmpty);
      if (answer) messages.push(...past.messages, answer.message);
    }
    return [...messages, ...turn.messages];
  }

  /** The body of a request. A branch uses the settings of the answer that it comes from. */
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

  /** The body that asks one model for the probabilities at a token's place. A bias makes it report this token, too. */
  #question(answer, at, mode) {
    const { ids } = answer.before(at);
    return {
      model: `skydraft-${mode}`,
      messages: this.#history(this.#turnOf(answer), answer.asks),
      max_tokens: 1,
      temperature: 0,
      logit_bias: { [answer.tokens[at].id]: 100 },
      skydraft: { logprobs: 5, continue_ids: ids, continue_as_prompt: true }, // which also prevents an audit
    };
  }

  /** Continues the text in a branch, with another token in the place of one. */
  #branch(answer, at, { id, token }) {
    if (this.busy) return;
    const turn = this.#turnOf(answer);
    const { chunks, ids } = answer.before(at);
    const branch = new Answer(answer.mode, answer.seed, this, { chunks, ids: [...ids, id], token });
    branch.asks = answer.asks;
    this.#cutAfter(turn);
    turn.add(branch);
    this.#run(turn, branch);
    const isBelow = branch.element.getBoundingClientRect().top > window.innerHeight / 2; // phones show it below
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

  /** Shows all answers again, after a switch between Markdown and plain text. */
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

  /** Shows a saved conversation if it exists and is still wanted. */
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

  /** Saves the turns as they are now, after earlier saves have ended. */
  #keep() {
    const [{ text, audio }] = this.turns;
    const [head, turns] = [this.head, this.turns.map((turn) => turn.kept)];
    head.title ??= (text || audio.name).slice(0, LONGEST_TITLE);
    this.#keptAt = performance.now();
    const kept = this.keeping.then(() => keep(head, turns)).then(() => sessionStorage.setItem(OPEN, this.head.id));
    this.keeping = kept.catch(() => announce('saved.failed'));
  }
}
