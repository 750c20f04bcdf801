// The user's settings, saved in this browser, and their fields. A field's id is the setting's name.

import { $ } from './dom.js';
import { setLanguage } from './language.js';

const NAME = 'skydraft.settings';
const DEFAULTS = {
  mode: '', secondMode: '', temperature: 0, maxTokens: 512, system: '', theme: '', language: '',
  coloured: true, rendered: true, tools: '', schema: '',
};
const READERS = {
  /** OpenAI's tools from a list of functions, bare or wrapped. */
  tools(list) {
    const tools = list.map((each) => (each.function ? each : { type: 'function', function: each }));
    return tools.every((tool) => tool.function.name) ? tools : undefined;
  },
  /** OpenAI's response format for a schema. */
  schema(schema) {
    return schema.constructor === Object ? { type: 'json_schema', json_schema: { name: 'answer', schema } } : undefined;
  },
};

/** The value of a JSON setting; undefined if it is invalid. */
export function read(name, text) {
  try {
    return READERS[name](JSON.parse(text));
  } catch {
    return undefined;
  }
}

export class Settings {
  constructor() {
    this.values = { ...DEFAULTS, ...JSON.parse(localStorage.getItem(NAME)) };
    for (const field of document.querySelectorAll('[data-setting]')) this.#wire(field, field.id);
    $('theme').addEventListener('click', () => {
      const theme = this.values.theme || (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
      this.set({ theme: theme === 'dark' ? 'light' : 'dark' });
    });
    $('language').addEventListener('click', () => this.set({ language: this.values.language === 'zh' ? 'en' : 'zh' }));
    this.values.language ||= navigator.language.toLowerCase().startsWith('zh') ? 'zh' : 'en';
    this.#apply();
  }

  set(changes) {
    Object.assign(this.values, changes);
    localStorage.setItem(NAME, JSON.stringify(this.values));
    this.#apply();
  }

  #wire(field, name) {
    const what = { checkbox: 'checked', number: 'valueAsNumber' }[field.type] ?? 'value';
    const show = () => { field[what] = this.values[name]; };
    field.addEventListener('input', () => {
      if (field.validity.valid && !Number.isNaN(field[what])) this.set({ [name]: field[what] });
    });
    field.addEventListener('change', show); // replaces an invalid value
    show();
  }

  #apply() {
    const { theme, language, coloured } = this.values;
    document.documentElement.dataset.theme = theme;
    document.body.classList.toggle('coloured', coloured);
    if (language !== this.language) setLanguage(language);
    this.language = language;
    $('language').lang = language === 'zh' ? 'en' : 'zh-CN';
    for (const name of Object.keys(READERS)) {
      const isWrong = this.values[name].trim() !== '' && !read(name, this.values[name]);
      $(name).setAttribute('aria-invalid', String(isWrong));
      $(`${name}-note`).hidden = !isWrong;
    }
  }
}
