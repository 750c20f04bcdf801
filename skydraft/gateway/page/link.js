// Shows whether the gateway and its cloud answer. Asks every few seconds, and at once after a notice.

import { health } from './api.js';
import { $ } from './dom.js';
import { worded } from './language.js';

const LONG = 1024; // tokens; shorter prompts are read too fast to show progress
let timer = 0;

/** Shows the state from now on, and calls `onBack` when a lost gateway is back. */
export async function watchLink(onBack) {
  clearTimeout(timer);
  if (document.hidden) return;
  const before = $('link').dataset.link;
  const { cloud, reading } = await health().catch(() => ({ cloud: 'lost' }));
  const isLong = reading?.of >= LONG;
  const percent = Math.floor((100 * reading?.tokens) / reading?.of);
  $('link').dataset.link = cloud;
  worded($('link-words'), isLong ? 'link.reading' : `link.${cloud}`, { percent });
  if (before === 'lost' && cloud !== 'lost') onBack();
  clearTimeout(timer);
  timer = setTimeout(() => watchLink(onBack), isLong ? 1000 : 3000);
}
