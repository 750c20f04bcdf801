// Words of the page in the language that is chosen. An element remembers its key, so that a switch can say it again.

import { WORDS } from './words.js';

const PLACES = {
  word: (element, text) => { element.textContent = text; },
  wordTitle: (element, text) => element.setAttribute('title', text),
  wordLabel: (element, text) => element.setAttribute('aria-label', text),
  wordPlaceholder: (element, text) => element.setAttribute('placeholder', text),
};
const MARKED = '[data-word],[data-word-title],[data-word-label],[data-word-placeholder]';

let language = 'en';

export const currentLanguage = () => language;

export function guessLanguage() {
  return (navigator.language || 'en').toLowerCase().startsWith('zh') ? 'zh' : 'en';
}

function argument(value) {
  return typeof value === 'string' && value.startsWith('@') ? say(value.slice(1)) : String(value ?? '');
}

/** The words of a key. `{name}` is filled from `args`, where "@key" stands for other words. */
export function say(key, args = {}) {
  // A name that we have no word for (a new mode, a new reason) is better shown as it is than hidden.
  const template = WORDS[language][key] ?? key.slice(key.indexOf('.') + 1);
  return template.replace(/\{(\w+)\}/g, (_, name) => argument(args[name]));
}

/** Says `key` in `element`: as its text, or as its title, label or placeholder. */
export function worded(element, key, args = {}, place = 'word') {
  element.dataset[place] = key;
  element.dataset[`${place}Args`] = JSON.stringify(args);
  PLACES[place](element, say(key, args));
  return element;
}

function repeat(element) {
  for (const [place, put] of Object.entries(PLACES)) {
    const key = element.dataset[place];
    if (key) put(element, say(key, JSON.parse(element.dataset[`${place}Args`] || '{}')));
  }
}

export function setLanguage(chosen) {
  language = chosen in WORDS ? chosen : 'en';
  document.documentElement.lang = language === 'zh' ? 'zh-CN' : 'en';
  document.querySelectorAll(MARKED).forEach(repeat);
}
