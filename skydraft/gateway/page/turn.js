// One turn of a conversation: the question, and its answers side by side.

import { player } from './audio.js';
import { isEnter, make } from './dom.js';
import { worded } from './language.js';

export class Turn {
  chosen = 0;

  /** A question (text, recording or both), or the results of the calls before it. */
  constructor({ text = '', audio = null, results = null }, answers, onEdit) {
    Object.assign(this, { text, audio, results, answers, onEdit });
    this.said = make('div', { class: 'said' }, worded(make('h3', { class: 'hidden' }), 'you'));
    if (audio) this.said.append(player(audio));
    if (text) this.said.append(make('p', {}, text));
    if (results) this.said.append(make('ul', {}, ...results.map(({ content }) => make('li', {}, content || '–'))));
    const edit = make('button', { class: 'quiet edit', hidden: !text, onclick: () => this.#edit() });
    this.editButton = worded(edit, 'edit');
    this.side = make('div', { class: 'answers' }, ...answers.map(({ element }) => element));
    this.side.classList.toggle('several', answers.length > 1);
    this.element = make('section', { class: 'turn' }, this.said, this.editButton, this.side);
  }

  replace(old, answer) {
    this.answers[this.answers.indexOf(old)] = answer;
    old.element.replaceWith(answer.element);
  }

  /** Adds an answer beside the others, and chooses it for the conversation. */
  add(answer) {
    this.chosen = this.answers.push(answer) - 1;
    this.side.append(answer.element);
    this.side.classList.add('several');
  }

  /** Starts editing the question in its place, or cancels it. */
  #edit() {
    if (!this.said.isConnected) return this.field.replaceWith(this.said);
    this.field = worded(make('textarea', { class: 'rewrite', rows: 4 }), 'question', {}, 'wordPlaceholder');
    this.field.value = this.text;
    this.field.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') this.editButton.click();
      if (!isEnter(event)) return;
      event.preventDefault();
      if (this.field.value.trim()) this.onEdit(this, this.field.value.trim());
    });
    this.said.replaceWith(this.field);
    return this.field.focus();
  }

  /** The question as messages. */
  get messages() {
    if (this.results) return this.results.map(({ id, content }) => ({ role: 'tool', tool_call_id: id, content }));
    const { data, format } = this.audio ?? {};
    const heard = { type: 'input_audio', input_audio: { data, format } };
    const parts = this.text ? [{ type: 'text', text: this.text }, heard] : [heard];
    return [{ role: 'user', content: data ? parts : this.text }];
  }

  /** What a browser saves of it. */
  get kept() {
    const { text, audio, results, chosen, answers } = this;
    return { text, audio, results, chosen, answers: answers.map((answer) => answer.kept) };
  }
}
