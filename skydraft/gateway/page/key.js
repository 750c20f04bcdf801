// Asks for the API key, once for all requests that wait for it.

import { $ } from './dom.js';
import { apiKey, setApiKey } from './api.js';
import { worded } from './language.js';

let asking = null;

function open(resolve) {
  const dialog = $('key-dialog');
  const field = $('key');
  let given = false;
  worded($('key-why'), apiKey() ? 'key.refused' : 'key.why');
  field.value = '';
  $('key-form').onsubmit = (event) => {
    event.preventDefault(); // nothing leaves the page by a form
    if (!field.value.trim()) return;
    setApiKey(field.value.trim());
    given = true;
    dialog.close();
  };
  $('key-cancel').onclick = () => dialog.close();
  dialog.onclose = () => {
    asking = null;
    resolve(given);
  };
  dialog.showModal();
}

/** Whether the user gave a key. */
export function askKey() {
  asking ??= new Promise(open);
  return asking;
}
