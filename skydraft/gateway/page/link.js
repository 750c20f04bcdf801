// Whether the gateway and its cloud are there: asked every few seconds, and at once when there is news.

import { health } from './api.js';
import { $ } from './dom.js';
import { worded } from './language.js';

const EVERY_MS = 3000, READING_MS = 1000;
const LONG = 1024; // tokens; shorter prompts are read before anyone looks

export class Link {
  #timer = 0;
  #asking = false;
  #told = false; // that a prompt is being read

  constructor(onBack) {
    this.onBack = onBack;
    worded($('link-words'), 'link.asking');
    document.addEventListener('visibilitychange', () => this.ask());
  }

  async ask() {
    clearTimeout(this.#timer);
    if (document.hidden || this.#asking) return;
    this.#asking = true;
    const before = $('link').dataset.link;
    const { cloud: state, reading } = await health().catch(() => ({ cloud: 'lost' }));
    this.#asking = false;
    const isLong = reading?.of >= LONG;
    if (state !== before || isLong || this.#told) this.#show(state, isLong && reading);
    if (state !== 'lost' && before === 'lost') this.onBack();
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.ask(), isLong ? READING_MS : EVERY_MS);
  }

  #show(state, reading) {
    $('link').dataset.link = state;
    this.#told = Boolean(reading);
    if (reading) worded($('link-words'), 'link.reading', { percent: Math.floor(100 * reading.tokens / reading.of) });
    else worded($('link-words'), `link.${state}`);
    worded($('link'), `link.${state}`, {}, 'wordTitle');
  }
}
