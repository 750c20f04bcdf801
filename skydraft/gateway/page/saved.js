// The list of saved conversations, to open and delete.

import { $, make } from './dom.js';
import { allHeads, forget } from './kept.js';
import { say, worded } from './language.js';

export function listSaved(conversation) {
  const open = async (id) => {
    await conversation.open(id);
    $('saved').close();
  };
  const remove = async (id) => {
    if (!confirm(say('saved.sure'))) return;
    if (id === conversation.head.id) conversation.clear();
    await conversation.keeping;
    await forget(id);
    await draw();
  };
  const row = ({ id, title, changed }) => {
    const when = new Intl.DateTimeFormat(document.documentElement.lang, { dateStyle: 'medium', timeStyle: 'short' });
    const parts = [make('span', {}, title), make('time', {}, when.format(changed))];
    const current = id === conversation.head.id && 'true';
    const entry = make('button', { class: 'entry', 'aria-current': current, onclick: () => open(id) }, ...parts);
    return make('li', {}, entry, worded(make('button', { class: 'quiet', onclick: () => remove(id) }), 'saved.delete'));
  };
  const draw = async () => {
    $('saved-list').replaceChildren(...(await allHeads().catch(() => [])).map(row));
  };
  $('open-saved').addEventListener('click', draw);
}
