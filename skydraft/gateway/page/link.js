// Whether the gateway and its cloud are there: asked every few seconds, and at once when there is news.

import { health } from './api.js';
import { $ } from './dom.js';
import { worded } from './language.js';

const LONG = 1024; // tokens; shorter prompts are read before anyone looks
let timer = 0;

/** Shows the link from now on; `onBack` is called when a gateway that was lost is back. */
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
