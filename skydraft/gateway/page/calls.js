// Calls of tools in an answer: which tool with what, as the model wrote it, and a place to give the results.

import { make } from './dom.js';
import { worded } from './language.js';

/** JSON in a shape that is easy to read; what is cut or broken stays as it is. */
function spread(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

export class Calls {
  #boxes = [];

  constructor(onResults) {
    this.list = []; // as messages of the next turn have them
    const field = () => [...this.#boxes].map(({ result }, at) => ({ id: this.list[at].id, content: result.value }));
    const give = worded(make('button', { type: 'submit', class: 'plain' }), 'call.give');
    this.written = make('pre', { class: 'written mono' });
    const raw = make('details', { class: 'raw' }, worded(make('summary'), 'call.raw'), this.written);
    const send = (event) => {
      event.preventDefault();
      onResults(field());
    };
    this.form = make('form', { class: 'give', onsubmit: send }, give);
    this.element = make('div', { class: 'calls', hidden: true }, this.form, raw);
  }

  clear() {
    this.list = [];
    this.#boxes = [];
    this.written.replaceChildren();
    this.form.replaceChildren(this.form.lastChild);
    this.element.hidden = true;
  }

  /** Takes the pieces of one chunk. */
  take(deltas) {
    this.element.hidden = false;
    for (const { index, id, function: { name, arguments: more = '' } } of deltas) {
      if (name) this.#begin(index, id, name);
      const call = this.list[index].function;
      call.arguments += more;
      this.#boxes[index].shown.textContent = spread(call.arguments);
    }
  }

  #begin(index, id, name) {
    this.list[index] = { id, type: 'function', function: { name, arguments: '' } };
    const shown = make('pre', { class: 'mono' });
    const result = make('input', { type: 'text', autocomplete: 'off' });
    const label = make('label', {}, worded(make('span'), 'call.result', { name }), result);
    this.#boxes[index] = { shown, result };
    this.form.lastChild.before(make('div', { class: 'call' }, worded(make('h4'), 'call.title', { name }), shown, label));
  }

  /** Results can be given to calls of the last answer. */
  open(isOpen) {
    for (const element of [this.form.lastChild, ...this.form.querySelectorAll('label')]) element.hidden = !isOpen;
  }
}
