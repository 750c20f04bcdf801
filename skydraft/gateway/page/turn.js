// One turn of a conversation: what was asked, and the answers side by side.

import { player } from './composer.js';
import { make } from './dom.js';
import { worded } from './language.js';

export class Turn {
  chosen = 0;

  /** Asks a text, a recording or both, or gives the results of the calls before it. */
  constructor({ text = '', audio = null, results = null }, answers, onEdit) {
    Object.assign(this, { text, audio, results, answers, onEdit });
    this.said = make('div', { class: 'said' }, worded(make('h3', { class: 'hidden' }), 'you'));
    if (audio) this.said.append(player(audio));
    if (text) this.said.append(make('p', {}, text));
    if (results) this.said.append(make('ul', { class: 'results' }, ...results.map(({ content }) => make('li', {}, content || '–'))));
    const edit = make('button', { type: 'button', class: 'quiet edit', onclick: () => this.#edit() });
    this.editButton = text ? worded(edit, 'edit') : '';
    this.side = make('div', { class: 'answers' }, ...answers.map(({ element }) => element));
    this.side.classList.toggle('several', answers.length > 1);
    this.element = make('section', { class: 'turn' }, this.said, this.editButton, this.side);
  }

  /** Another answer beside those that are there, with which the conversation goes on. */
  add(answer) {
    this.chosen = this.answers.push(answer) - 1;
    this.side.append(answer.element);
    this.side.classList.add('several');
  }

  /** Lets the question be written anew in its place. */
  #edit() {
    const field = make('textarea', { rows: Math.min(8, this.text.split('\n').length + 1) });
    field.value = this.text;
    worded(field, 'question', {}, 'wordLabel');
    const close = () => {
      form.remove();
      for (const element of [this.said, this.editButton]) element.hidden = false;
      this.editButton.focus();
    };
    const cancel = worded(make('button', { type: 'button', class: 'plain', onclick: close }), 'cancel');
    const send = worded(make('button', { type: 'submit', class: 'primary' }), 'send');
    const form = make('form', { class: 'rewrite' }, field, make('div', { class: 'buttons' }, cancel, send));
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      if (field.value.trim()) this.onEdit(this, field.value.trim());
    });
    field.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') close();
      if (event.key !== 'Enter' || event.shiftKey || event.isComposing || event.keyCode === 229) return;
      event.preventDefault();
      form.requestSubmit();
    });
    for (const element of [this.said, this.editButton]) element.hidden = true;
    this.said.before(form);
    field.focus();
  }

  /** What it asks, as messages. */
  get messages() {
    if (this.results) return this.results.map(({ id, content }) => ({ role: 'tool', tool_call_id: id, content }));
    return [{ role: 'user', content: this.#content }];
  }

  get #content() {
    if (!this.audio) return this.text;
    const { data, format } = this.audio;
    const heard = { type: 'input_audio', input_audio: { data, format } };
    return this.text ? [{ type: 'text', text: this.text }, heard] : [heard];
  }

  /** What a browser keeps of it. */
  get kept() {
    const { text, audio, results, chosen, answers } = this;
    const sound = audio && { data: audio.data, format: audio.format, name: audio.name };
    return { text, audio: sound, results, chosen, answers: answers.map((answer) => answer.kept) };
  }
}
