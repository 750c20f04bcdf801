// The list of conversations that this browser keeps: open, rename, export, delete.

import { $, make } from './dom.js';
import { asJson, asMarkdown } from './export.js';
import { allHeads, forget, rename, turnsOf } from './kept.js';
import { currentLanguage, worded } from './language.js';

const when = (time) => new Date(time).toLocaleString(currentLanguage() === 'zh' ? 'zh-CN' : 'en', { dateStyle: 'medium', timeStyle: 'short' });

const button = (word, act) => worded(make('button', { type: 'button', class: 'quiet', onclick: act }), word);

function download(head, ending, text) {
  const url = URL.createObjectURL(new Blob([text]));
  const name = head.title.replace(/[^\p{L}\p{N}]+/gu, '-').slice(0, 40).replace(/^-|-$/g, '');
  make('a', { href: url, download: `${name || 'conversation'}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export class Saved {
  constructor(conversation, announce) {
    Object.assign(this, { conversation, announce });
    $('open-saved').addEventListener('click', () => this.#open());
    $('close-saved').addEventListener('click', () => $('saved').close());
  }

  #open() {
    $('saved-list').replaceChildren();
    $('saved-none').hidden = true;
    $('saved').showModal();
    this.#draw();
  }

  async #draw() {
    const heads = await allHeads().catch(() => []);
    $('saved-none').hidden = heads.length > 0;
    $('saved-list').replaceChildren(...heads.map((head) => this.#row(head)));
  }

  #row(head) {
    const show = async () => {
      await this.conversation.open(head.id);
      $('saved').close();
    };
    const title = make('button', { type: 'button', class: 'entry', onclick: show }, make('span', {}, head.title));
    title.append(make('time', {}, when(head.changed)));
    if (head.id === this.conversation.id) title.setAttribute('aria-current', 'true');
    const get = (ending, write) => async () => download(head, ending, write(head, await turnsOf(head.id)));
    const acts = make('div', { class: 'acts' },
      button('saved.rename', () => this.#rename(head, title)),
      button('saved.markdown', get('md', asMarkdown)),
      button('saved.json', get('json', asJson)),
      button('saved.delete', ({ currentTarget }) => this.#delete(head, currentTarget)));
    return make('li', {}, title, acts);
  }

  #rename(head, title) {
    const field = make('input', { type: 'text', value: head.title, maxlength: 80 });
    worded(field, 'saved.title', {}, 'wordLabel');
    let isOver = false;
    const end = async (isMeant) => {
      if (isOver) return;
      isOver = true;
      if (isMeant && field.value.trim()) await rename(head.id, field.value.trim());
      await this.#draw();
    };
    field.addEventListener('blur', () => end(true));
    field.addEventListener('keydown', (event) => {
      if (event.isComposing || !['Enter', 'Escape'].includes(event.key)) return;
      event.preventDefault(); // Escape would close the list
      end(event.key === 'Enter');
    });
    title.replaceWith(field);
    field.select();
  }

  /** Deletes at the second press. */
  async #delete(head, pressed) {
    if (pressed.dataset.word !== 'saved.sure') {
      worded(pressed, 'saved.sure');
      return;
    }
    if (head.id === this.conversation.id) this.conversation.clear();
    await this.conversation.keeping;
    await forget(head.id);
    this.announce('saved.deleted');
    await this.#draw();
  }
}
