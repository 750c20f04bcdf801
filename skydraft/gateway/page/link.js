// Whether the gateway and its cloud are there: asked every few seconds, and at once when there is news.

import { health } from './api.js';
import { $ } from './dom.js';
import { worded } from './language.js';

const EVERY_MS = 3000;

export class Link {
  #timer = 0;
  #asking = false;

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
    const state = await health().then(({ cloud }) => cloud, () => 'lost');
    this.#asking = false;
    if (state !== before) this.#show(state);
    if (state !== 'lost' && before === 'lost') this.onBack();
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.ask(), EVERY_MS);
  }

  #show(state) {
    $('link').dataset.link = state;
    worded($('link-words'), `link.${state}`);
    worded($('link'), `link.${state}`, {}, 'wordTitle');
  }
}
