// What an answer's model thought before it spoke: folded, for whoever wants to read it.

import { make } from './dom.js';
import { worded } from './language.js';

export class Thought {
  constructor() {
    this.summary = make('summary');
    this.body = make('div', { class: 'thought-text' });
    this.element = make('details', { class: 'thought', hidden: true }, this.summary, this.body);
    this.clear();
  }

  clear() {
    this.text = '';
    this.body.replaceChildren();
    this.element.hidden = true;
    worded(this.summary, 'thought.busy');
  }

  take(text) {
    this.text += text;
    this.body.append(text);
    this.element.hidden = false;
  }

  end() {
    worded(this.summary, 'thought.done');
  }
}
