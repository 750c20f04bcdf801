// An answer's tool calls with their arguments, and fields for the results.

import { make } from './dom.js';
import { worded } from './language.js';

/** Formats JSON for reading; incomplete or invalid JSON stays as it is. */
function spread(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

export class Calls {
  list = []; // in the form of messages
  #boxes = [];

  constructor(onResults) {
    this.give = worded(make('button', { class: 'plain' }), 'call.give');
    const send = (event) => {
      event.preventDefault();
      onResults(this.list.map(({ id }, at) => ({ id, content: this.#boxes[at].result.value })));
    };
    this.element = make('form', { class: 'calls', hidden: true, onsubmit: send }, this.give);
  }

  /** Adds the pieces of one chunk. */
  take(pieces) {
    this.element.hidden = false;
    for (const { index, id, function: { name, arguments: more = '' } } of pieces) {
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
    this.give.before(make('div', { class: 'call' }, worded(make('h4'), 'call.title', { name }), shown, label));
  }

  /** Shows or hides the fields for results. Only the last answer takes them. */
  open(isOpen) {
    for (const element of [this.give, ...this.element.querySelectorAll('label')]) element.hidden = !isOpen;
  }
}
