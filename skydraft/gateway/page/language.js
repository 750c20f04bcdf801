// The page's texts in the chosen language. An element stores its key, so that a switch of language can translate it.

import { $ } from './dom.js';

const PLACES = {
  word: (element, text) => { element.textContent = text; },
  wordTitle: (element, text) => element.setAttribute('title', text),
  wordLabel: (element, text) => element.setAttribute('aria-label', text),
  wordPlaceholder: (element, text) => element.setAttribute('placeholder', text),
};
const MARKED = '[data-word],[data-word-title],[data-word-label],[data-word-placeholder]';
const load = async (name) => [name, await (await fetch(`/page/words/${name}.json`)).json()];
const WORDS = Object.fromEntries(await Promise.all(['en', 'zh'].map(load)));

let language = 'en';

/** The text of a key. `{name}` is filled from `args`, where "@key" means another key's text. */
export function say(key, args = {}) {
  const fill = (value) => (String(value).startsWith('@') ? say(value.slice(1)) : value);
  // Show a name without a text (a new mode, a new reason) as it is.
  const template = WORDS[language][key] ?? key.slice(key.indexOf('.') + 1);
  return template.replace(/\{(\w+)\}/g, (_, name) => fill(args[name] ?? ''));
}

/** Sets the text of `key` in `element`: as content, title, label or placeholder. */
export function worded(element, key, args = {}, place = 'word') {
  element.dataset[place] = key;
  element.dataset[`${place}Args`] = JSON.stringify(args);
  PLACES[place](element, say(key, args));
  return element;
}

/** Announces a text to screen readers. */
export const announce = (key, args) => worded($('announce'), key, args);

export function setLanguage(chosen) {
  language = chosen;
  document.documentElement.lang = chosen === 'zh' ? 'zh-CN' : 'en';
  for (const element of document.querySelectorAll(MARKED)) {
    for (const place of Object.keys(PLACES).filter((each) => element.dataset[each])) {
      worded(element, element.dataset[place], JSON.parse(element.dataset[`${place}Args`] ?? '{}'), place);
    }
  }
}
