// Copying: a button, and a way for pages without HTTPS, which have no clipboard of their own.

import { $, icon, make } from './dom.js';
import { worded } from './language.js';

const DRAWING = 'M7 7V4h9v9h-3M4 7h9v9H4z';

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = make('textarea', { class: 'hidden', 'aria-hidden': 'true' });
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand('copy');
    field.remove();
  }
}

/** A button that copies what `text()` says then. */
export function copyButton(text) {
  const words = worded(make('span'), 'copy');
  const press = async () => {
    await copy(text());
    worded(words, 'copied');
    worded($('announce'), 'announce.copied');
    setTimeout(() => worded(words, 'copy'), 1500);
  };
  return make('button', { type: 'button', class: 'quiet copy', onclick: press }, icon(DRAWING), words);
}
