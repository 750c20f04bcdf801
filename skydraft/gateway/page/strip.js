// The live strip beside the conversation: figures, rounds, shares, and the legend of origins.

import { outcomeKey, roundsChart, shareBar } from './chart.js';
import { $, eachFrame, make } from './dom.js';
import { ORIGINS, percent, shares, shown } from './figures.js';
import { say, worded } from './language.js';

const ROWS = ['calls', 'written', 'agreement', 'watched', 'speed', 'tokens', 'rounds'];
const EXPLAINED = ['calls', 'written', 'agreement', 'watched', 'rounds'];
const wide = matchMedia('(min-width: 1000px)');

function noteOf(row, { agreed, audited, audits }) {
  if (row === 'watched' && audits) return say('watched.note', { answers: audits.num_answers });
  return row === 'agreement' && audited ? say('agreement.note', { agreed, audited }) : null;
}

function table(columns) {
  const heads = columns.map(({ name }) => make('th', { scope: 'col' }, name));
  const shownRows = ROWS.filter((row) => row !== 'watched' || columns.some(({ figures }) => figures.audits));
  const rows = shownRows.map((row) => {
    const cells = columns.map(({ figures }) => make('td', { 'data-figure': row, title: noteOf(row, figures) }, shown[row](figures)));
    const note = EXPLAINED.includes(row) ? make('p', { class: 'note' }, say(`figure.${row}.note`)) : null;
    return make('tr', {}, make('th', { scope: 'row' }, say(`figure.${row}`), note), ...cells);
  });
  const corner = make('td', {});
  return [make('thead', {}, make('tr', {}, corner, ...heads)), make('tbody', {}, ...rows)];
}

function legendEntry(origin, share) {
  const sample = make('span', { class: `run ${origin}` }, say(`origin.${origin}`));
  const amount = make('span', { class: 'amount' }, share ? percent(share) : '');
  return [make('dt', {}, sample, amount), make('dd', {}, say(`meaning.${origin}`))];
}

export class Strip {
  #columns = [];
  #open = wide.matches;

  constructor() {
    this.draw = eachFrame(() => this.#draw());
    $('strip-toggle').addEventListener('click', () => this.#show(!this.#open));
    wide.addEventListener('change', () => this.#show(wide.matches));
    this.#show(wide.matches);
  }

  #show(open) {
    this.#open = open;
    $('strip-body').hidden = !open;
    $('strip-toggle').setAttribute('aria-expanded', String(open));
    this.draw();
  }

  /** Columns of the table: a name and figures each; the first `drawn` of them have charts. */
  set(columns, drawn) {
    this.#columns = columns;
    this.drawn = drawn;
    this.draw();
  }

  #draw() {
    const columns = this.#columns.map(({ word, figures }) => ({ name: say(word), figures }));
    if (!columns.length) return;
    this.#line(columns[0].figures);
    if (!this.#open) return;
    $('figures').replaceChildren(...table(columns));
    const charted = columns.slice(0, this.drawn);
    const parts = (chart) => charted.flatMap(({ name, figures }) => {
      const head = charted.length > 1 ? name : '';
      return [head ? make('p', { class: 'of' }, head) : null, chart(figures, head)].filter(Boolean);
    });
    $('charts').replaceChildren(...parts(roundsChart));
    $('shares').replaceChildren(...parts(shareBar));
    $('outcomes').replaceChildren(...outcomeKey());
    $('seen-choice').hidden = !columns.some(({ figures }) => figures.receipt?.servers.length);
    const [first] = charted;
    const used = shares(first.figures).filter(({ origin }) => charted.some(({ figures }) => figures.origins[origin]));
    const known = used.filter(({ origin }) => ORIGINS.includes(origin));
    $('legend').replaceChildren(...known.flatMap(({ origin, share }) => legendEntry(origin, charted.length === 1 && share)));
  }

  #line(figures) {
    if (!figures.tokens) {
      worded($('strip-line'), 'figures.idle');
      return;
    }
    const values = Object.fromEntries(ROWS.map((row) => [row, shown[row](figures)]));
    worded($('strip-line'), 'figures.line', values);
  }
}
