// The panel beside the conversation: figures of the last answers, and the legend of origins with their shares.

import { $, make } from './dom.js';
import { ORIGINS, percent, shown } from './figures.js';
import { worded } from './language.js';

const wide = matchMedia('(min-width: 1000px)');
const open = () => { $('strip').open = wide.matches; };
wide.addEventListener('change', open);
open();

function row(name, values) {
  const cells = values.map((each) => make('td', { 'data-figure': name }, each[name] ?? '–'));
  return make('tr', {}, worded(make('th', { scope: 'row' }), `figure.${name}`), ...cells);
}

function legendEntry(origin, columns) {
  const shares = columns.map(({ figures }) => percent((figures.origins[origin] ?? 0) / (figures.tokens || 1)));
  const sample = worded(make('span', { class: `run ${origin}` }), `origin.${origin}`);
  const head = make('dt', {}, sample, make('span', { class: 'amount' }, shares.join(' · ')));
  return [head, worded(make('dd'), `meaning.${origin}`)];
}

/** Shows the figures of answers. Each column has the key of a name, and figures. */
export function showFigures(columns) {
  const values = columns.map(({ figures }) => shown(figures));
  worded($('strip-line'), values[0].tokens ? 'figures.line' : 'figures', values[0]);
  const heads = columns.map(({ word }) => worded(make('th', { scope: 'col' }), word));
  const head = columns.length > 1 ? make('tr', {}, make('td'), ...heads) : '';
  const known = Object.keys(values[0]).filter((name) => values.some((each) => each[name] !== null));
  $('figures').replaceChildren(head, ...known.map((name) => row(name, values)));
  const used = ORIGINS.filter((origin) => columns.some(({ figures }) => figures.origins[origin]));
  $('legend').replaceChildren(...used.flatMap((origin) => legendEntry(origin, columns)));
}
