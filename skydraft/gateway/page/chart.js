// The two small drawings: shares of tokens by origin, and one bar for each round.

import { draw, make } from './dom.js';
import { OUTCOMES, percent, shares } from './figures.js';
import { say } from './language.js';

const WIDTH = 272;
const MOST_ROUNDS = 40;
const HEIGHT = 56;
const GAP = 1.5;
const FULL = ['verified', 'written']; // bars without an outline
const LINE = '\u00a0'.repeat(100); // a line is drawn under text, be it only spaces; what is too much is cut off

/** A bar of shares; under each part runs the line that its words have in the text. */
export function shareBar(figures, name) {
  const parts = shares(figures).filter((part) => part.tokens);
  if (!parts.length) return make('p', { class: 'note' }, say('shares.none'));
  const list = parts.map((part) => `${say(`origin.${part.origin}`)} ${percent(part.share)}`).join(', ');
  const bar = make('div', { class: 'bar key', role: 'img' });
  bar.setAttribute('aria-label', `${name ? `${name}. ` : ''}${say('shares.label', { list })}`);
  for (const { origin, share } of parts) {
    const piece = make('span', { class: `piece ${origin}`, title: `${say(`origin.${origin}`)} ${percent(share)}` });
    piece.style.flexGrow = String(share);
    piece.append(make('span', { class: 'fill' }), make('span', { class: `run ${origin}` }, LINE));
    bar.append(piece);
  }
  return bar;
}

function barOf(record, x, width, most) {
  const height = Math.max(2, (record.num_committed / most) * HEIGHT);
  const args = {
    round: record.round,
    outcome: say(`outcome.${record.outcome}`),
    committed: record.num_committed,
    accepted: record.num_accepted,
    draft: record.num_draft,
    ms: Math.round(record.wall_ms ?? 0),
  };
  const inset = FULL.includes(record.outcome) ? 0 : 0.5; // half of the outline's width
  const box = { x: x + inset, y: HEIGHT - height + inset, width: width - 2 * inset, height: height - inset };
  const bar = draw('rect', { class: `round ${record.outcome}`, ...box });
  const title = record.outcome === 'verified' ? 'round.title' : 'round.title.unchecked';
  bar.append(draw('title', {}, say(title, args)));
  return bar;
}

function summary(rounds, recent) {
  const counts = Object.fromEntries(OUTCOMES.map((name) => [name, rounds.filter((r) => r.outcome === name).length]));
  return say('rounds.chart', { shown: recent.length, all: rounds.length, ...counts });
}

/** The last rounds, as high as the tokens that each added; full, pale, hollow or barred by what became of it. */
export function roundsChart(figures, name) {
  const { rounds } = figures;
  if (!rounds.length) return make('p', { class: 'note' }, say('rounds.none'));
  const recent = rounds.slice(-MOST_ROUNDS);
  const most = Math.max(...recent.map((record) => record.num_committed), 1);
  const pitch = Math.min(WIDTH / recent.length, 14);
  const svg = draw('svg', { class: 'chart', viewBox: `0 0 ${WIDTH} ${HEIGHT + 1}`, role: 'img' });
  svg.setAttribute('aria-label', `${name ? `${name}. ` : ''}${summary(rounds, recent)}`);
  svg.append(draw('line', { class: 'axis', x1: 0, x2: WIDTH, y1: HEIGHT + 0.5, y2: HEIGHT + 0.5 }));
  recent.forEach((record, at) => svg.append(barOf(record, at * pitch, Math.max(pitch - GAP, 1.5), most)));
  const caption = say('rounds.caption', { first: recent[0].round, last: recent.at(-1).round, most });
  return make('div', { class: 'plot' }, svg, make('p', { class: 'note' }, caption));
}

/** The key to the chart: one small bar of each kind. */
export function outcomeKey() {
  return OUTCOMES.map((name) => {
    const swatch = draw('svg', { viewBox: '0 0 10 10', 'aria-hidden': 'true' });
    const inset = FULL.includes(name) ? 0 : 0.5;
    const size = 10 - 2 * inset;
    swatch.append(draw('rect', { class: `round ${name}`, x: inset, y: inset, width: size, height: size }));
    return make('li', {}, swatch, say(`outcome.${name}`));
  });
}
