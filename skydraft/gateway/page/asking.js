// One token, asked: who wrote it, what its round cost, and what each model would have put there. One of these can take
// its place, in a new branch of the text.

import { $, make } from './dom.js';
import { percent } from './figures.js';
import { worded } from './language.js';

const JUDGED = ['accepted', 'recovered', 'bonus', 'cloud'];
const SIDES = [['draft', 'edge'], ['target', 'cloud']];

/** A token so that its spaces and line breaks are seen. */
export const visible = (text) => text.replaceAll(' ', '␣').replaceAll('\n', '↵').replaceAll('\t', '⇥');

/** Whether the large model may be asked of a token: one on another machine only of what it has judged, at once, or
 * later, with the tokens that came before a checked block. */
function mayAsk({ part: { origin, round, before } }, { rounds }) {
  return $('link').dataset.link === 'local' || JUDGED.includes(origin) || (!before && rounds.some((record) => record.round > round && record.num_audited));
}

export class Asking {
  #stopper = new AbortController();

  /** `likeliest(answer, at, mode, signal)` asks the gateway; `onBranch(answer, at, entry)` lets the text go on. */
  constructor({ likeliest, onBranch }) {
    Object.assign(this, { likeliest, onBranch });
    $('close-token').addEventListener('click', () => $('token').close());
    $('token').addEventListener('close', () => this.#stopper.abort());
  }

  open(answer, at, busy) {
    this.#stopper = new AbortController();
    const token = answer.tokens[at];
    worded($('token-title'), 'token', { token: visible(answer.text.slice(token.from, token.to)) });
    this.#tell(token, answer.figures);
    for (const [side, mode] of SIDES) {
      const place = $(`token-${side}`);
      place.replaceChildren();
      if (mode === 'cloud' && !mayAsk(token, answer.figures)) place.append(worded(make('p', { class: 'note' }), 'token.unjudged'));
      else this.#fill(place, answer, at, side, mode, busy);
    }
    $('token').showModal();
  }

  #tell({ part, forced }, { rounds }) {
    const { origin, round, reason, before } = part;
    const say = (key, args) => worded(make('p'), key, args);
    const lines = [say('token.origin', { origin: `@origin.${origin}`, meaning: `@meaning.${origin}` })];
    if (forced) lines.push(say('token.forced'));
    const record = before ? null : rounds.find((each) => each.round === round);
    if (record) {
      const { num_committed: tokens, num_draft: draft, num_accepted: accepted, wall_ms: ms, outcome } = record;
      const kind = outcome === 'verified' ? 'token.round' : 'token.round.unchecked';
      lines.push(say(kind, { round, tokens, draft, accepted, ms: Math.round(ms), outcome: `@outcome.${outcome}` }));
      lines.push(say({ verified: 'token.call', written: 'token.went-on' }[outcome] ?? 'token.no-call'));
      if (reason && draft) lines.push(say('token.reason', { reason: `@reason.${reason}` }));
      const { rtt_ms: rtt = 0, bytes_up: up = 0, bytes_down: down = 0 } = record;
      if (up || down) lines.push(say('token.link', { rtt: Math.round(rtt), up, down }));
    } else lines.push(say(origin === 'chosen' ? 'token.no-round' : 'token.before'));
    $('token-facts').replaceChildren(...lines);
  }

  async #fill(place, answer, at, side, mode, busy) {
    const { signal } = this.#stopper;
    place.append(worded(make('p', { class: 'note', role: 'status' }), 'token.asking'));
    try {
      const { logprobs } = (await this.likeliest(answer, at, mode, signal)).skydraft;
      if (!signal.aborted) place.replaceChildren(this.#list(answer, at, logprobs[side][0], busy));
    } catch (error) {
      if (signal.aborted) return;
      place.replaceChildren(worded(make('p', { class: 'note' }), 'token.unknown', { why: error.message }));
    }
  }

  /** The likeliest tokens, each a way for the text to go on; and at the end the one that stands there, if it is none. */
  #list(answer, at, told, busy) {
    const { id: own } = answer.tokens[at];
    const best = told.top_logprobs;
    const shown = best.some(({ id }) => id === own) ? best : [...best, told];
    return make('ul', { class: 'likely' }, ...shown.map((entry) => make('li', {}, this.#entry(answer, at, entry, entry.id === own, busy))));
  }

  #entry(answer, at, { id, token, logprob, ends }, isOwn, busy) {
    const share = Math.exp(logprob);
    const bar = make('span', { class: 'bar', 'aria-hidden': 'true' });
    bar.style.width = `${100 * share}%`;
    const text = make('span', { class: 'mono' }, visible(token));
    const parts = [text, make('span', { class: 'amount' }, percent(share)), bar];
    if (isOwn) parts.splice(1, 0, worded(make('span', { class: 'note' }), 'token.here'));
    if (ends) return make('p', {}, ...parts, worded(make('span', { class: 'note' }), 'token.ends'));
    const choose = () => {
      $('token').close();
      this.onBranch(answer, at, { id, token: visible(token) });
    };
    const button = make('button', { type: 'button', disabled: busy, onclick: choose }, ...parts);
    return worded(button, 'token.choose', { token: visible(token), share: percent(share) }, 'wordTitle');
  }
}
