// What the user chose, remembered in this browser, and the panel to choose it in.

import { $ } from './dom.js';
import { formatOf, toolsOf } from './formats.js';
import { guessLanguage, setLanguage, worded, currentLanguage } from './language.js';

const NAME = 'skydraft.settings';
const DEFAULTS = {
  mode: '', secondMode: '', compare: false, temperature: 0, maxTokens: 512, system: '',
  theme: 'system', language: '', coloured: true, rendered: true, seen: false, tools: '', toolChoice: 'auto', schema: '',
};

function remembered() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(NAME) ?? '{}') };
  } catch {
    return { ...DEFAULTS };
  }
}

export class Settings {
  constructor(onLanguage, onRendered) {
    this.values = remembered();
    Object.assign(this, { onLanguage, onRendered });
    if (!this.values.language) this.values.language = guessLanguage();
    this.#wire();
    this.#apply();
  }

  set(changes) {
    Object.assign(this.values, changes);
    localStorage.setItem(NAME, JSON.stringify(this.values));
    this.#apply();
  }

  #apply() {
    const { theme, language, coloured, temperature, maxTokens, system } = this.values;
    document.documentElement.dataset.theme = theme;
    document.body.classList.toggle('coloured', coloured);
    if (language !== currentLanguage() || !this.spoken) {
      this.spoken = true;
      setLanguage(language);
      this.#languageButton();
      this.onLanguage();
    }
    $('theme-choice').value = theme;
    $('language-choice').value = language;
    $('coloured').checked = coloured;
    document.body.classList.toggle('shows-seen', this.values.seen);
    $('seen').checked = this.values.seen;
    $('rendered').checked = this.values.rendered;
    $('temperature').value = temperature;
    $('temperature-value').textContent = Number(temperature).toFixed(2);
    if (document.activeElement !== $('max-tokens')) $('max-tokens').value = maxTokens;
    if (document.activeElement !== $('system')) $('system').value = system;
    $('tool-choice').value = this.values.toolChoice;
    this.#applyJson('tools', toolsOf);
    this.#applyJson('schema', formatOf);
  }

  /** Shows what was written, and whether it can be used. */
  #applyJson(name, read) {
    const field = $(name);
    if (document.activeElement !== field) field.value = this.values[name];
    let isRead = true;
    try {
      read(this.values[name]);
    } catch {
      isRead = false;
    }
    field.setAttribute('aria-invalid', String(!isRead));
    $(`${name}-note`).hidden = isRead;
  }

  #languageButton() {
    const button = worded($('language'), 'language.other');
    button.lang = currentLanguage() === 'zh' ? 'en' : 'zh-CN';
    worded(button, 'language.switch', {}, 'wordTitle');
  }

  #wire() {
    const dark = matchMedia('(prefers-color-scheme: dark)');
    $('theme').addEventListener('click', () => {
      const isDark = this.values.theme === 'system' ? dark.matches : this.values.theme === 'dark';
      this.set({ theme: isDark ? 'light' : 'dark' });
    });
    $('language').addEventListener('click', () => this.set({ language: currentLanguage() === 'zh' ? 'en' : 'zh' }));
    $('theme-choice').addEventListener('change', (event) => this.set({ theme: event.target.value }));
    $('language-choice').addEventListener('change', (event) => this.set({ language: event.target.value }));
    $('coloured').addEventListener('change', (event) => this.set({ coloured: event.target.checked }));
    $('seen').addEventListener('change', (event) => this.set({ seen: event.target.checked }));
    $('rendered').addEventListener('change', (event) => {
      this.set({ rendered: event.target.checked });
      this.onRendered();
    });
    $('temperature').addEventListener('input', (event) => this.set({ temperature: Number(event.target.value) }));
    $('system').addEventListener('input', (event) => this.set({ system: event.target.value }));
    for (const name of ['tools', 'schema']) {
      $(name).addEventListener('input', (event) => this.set({ [name]: event.target.value }));
    }
    $('tool-choice').addEventListener('change', (event) => this.set({ toolChoice: event.target.value }));
    $('max-tokens').addEventListener('input', ({ target }) => {
      if (target.value && target.validity.valid) this.set({ maxTokens: Number(target.value) });
    });
    $('max-tokens').addEventListener('blur', () => { $('max-tokens').value = this.values.maxTokens; });
    $('open-settings').addEventListener('click', () => $('settings').showModal());
    $('close-settings').addEventListener('click', () => $('settings').close());
  }
}
