// The dialog of a token: its origin, its round's cost, and each model's likeliest tokens in its place. Choosing one
// starts a new branch of the text.

import { $, make } from './dom.js';
import { percent } from './figures.js';
import { worded } from './language.js';

const JUDGED = ['accepted', 'recovered', 'bonus', 'cloud'];
let stopper = new AbortController();

$('token').addEventListener('close', () => stopper.abort());

/** A token's text with visible spaces and line breaks. */
const visible = (text) => text.replaceAll(' ', '␣').replaceAll('\n', '↵').replaceAll('\t', '⇥');

const note = (key, args) => worded(make('p', { class: 'note' }), key, args);

/** Whether to ask the large model about a token. A remote model is asked only about tokens that it has seen: checked at
 * once, or later together with a checked block. */
function mayAsk({ part: { origin, round, before } }, { rounds }) {
  const isAudited = rounds.some((record) => record.round > round && record.num_audited);
  return $('link').dataset.link === 'local' || JUDGED.includes(origin) || (!before && isAudited);
}

function facts({ part: { origin, round, reason, before }, forced }, { rounds }) {
  const say = (key, args) => worded(make('p'), key, args);
  const lines = [say('token.origin', { origin: `@origin.${origin}`, meaning: `@meaning.${origin}` })];
  if (forced) lines.push(say('token.forced'));
  const record = before ? null : rounds.find((each) => each.round === round);
  if (!record) return lines;
  const { num_committed: tokens, num_draft: draft, num_accepted: accepted, outcome } = record;
  const { wall_ms: ms, rtt_ms: rtt = 0, bytes_up: up = 0, bytes_down: down = 0 } = record;
  lines.push(say('token.round', { round, tokens, draft, accepted, ms: Math.round(ms) }), say(`outcome.${outcome}`));
  if (reason && draft) lines.push(say('token.reason', { reason: `@reason.${reason}` }));
  if (up || down) lines.push(say('token.link', { rtt: Math.round(rtt), up, down }));
  return lines;
}

/** One of the likeliest tokens: a button to continue with it, unless it ends the text. */
function entry({ id, token, logprob, ends }, isOwn, isBusy, onChoice) {
  const share = Math.exp(logprob);
  const bar = make('span', { class: 'bar', 'aria-hidden': 'true' });
  bar.style.width = `${100 * share}%`;
  const mark = isOwn ? 'token.here' : ends && 'token.ends';
  const words = mark ? worded(make('span', { class: 'note' }), mark) : '';
  const amount = make('span', { class: 'amount' }, percent(share));
  const parts = [make('span', { class: 'mono' }, visible(token)), words, amount, bar];
  if (ends) return make('p', {}, ...parts);
  const choose = () => {
    $('token').close();
    onChoice({ id, token: visible(token) });
  };
  return make('button', { disabled: isBusy, onclick: choose }, ...parts);
}

/** Opens the dialog of a token. `likeliest(mode, signal)` asks the gateway for one model's tokens in its place;
 * `onChoice({id, token})` continues the text with another token. */
export function askToken(answer, at, isBusy, likeliest, onChoice) {
  stopper = new AbortController();
  const { signal } = stopper;
  const token = answer.tokens[at];
  const fill = async (side, mode) => {
    const place = $(`token-${side}`);
    if (mode === 'cloud' && !mayAsk(token, answer.figures)) return place.replaceChildren(note('token.unjudged'));
    place.replaceChildren(note('thinking'));
    try {
      const [told] = (await likeliest(mode, signal)).skydraft.logprobs[side];
      const best = told.top_logprobs;
      const list = best.some(({ id }) => id === token.id) ? best : [...best, told]; // the text's own token comes last
      const entries = list.map((each) => make('li', {}, entry(each, each.id === token.id, isBusy, onChoice)));
      if (!signal.aborted) place.replaceChildren(make('ul', { class: 'likely' }, ...entries));
    } catch (error) {
      if (!signal.aborted) place.replaceChildren(note('token.unknown', { why: error.message }));
    }
    return undefined;
  };
  worded($('token-title'), 'token', { token: visible(answer.text.slice(token.from, token.to)) });
  $('token-facts').replaceChildren(...facts(token, answer.figures));
  fill('draft', 'edge');
  fill('target', 'cloud');
  $('token').showModal();
}
