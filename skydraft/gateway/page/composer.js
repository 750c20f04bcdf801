// The question being written: text, speech, modes, and the button that sends or stops.

import { base64, canRecord, kindOf, player, record } from './audio.js';
import { $, icon, isEnter, make } from './dom.js';
import { announce, say, worded } from './language.js';

export class Composer {
  audio = null;
  #ending = null; // the function that ends the current recording
  #isBusy = null;

  constructor({ settings, onSend, onStop }) {
    Object.assign(this, { settings, onSend, onStop });
    this.question = $('question');
    this.question.addEventListener('keydown', (event) => {
      if (!isEnter(event)) return;
      event.preventDefault();
      this.send();
    });
    $('send').addEventListener('click', () => (this.#isBusy ? onStop() : this.send()));
    $('mode').addEventListener('change', ({ target }) => worded($('hint'), `about.${target.value}`));
    $('record').addEventListener('click', () => this.#record());
    $('attach').addEventListener('click', () => $('file').click());
    $('file').addEventListener('change', ({ target }) => this.#take(target.files[0]));
    document.addEventListener('dragover', (event) => event.preventDefault()); // else the browser would open the file
    document.addEventListener('drop', (event) => {
      event.preventDefault();
      this.#take(event.dataTransfer.files[0]);
    });
    this.setBusy(false);
  }

  send() {
    const { audio } = this;
    const text = this.question.value.trim();
    if (this.#isBusy || this.#ending || !(text || audio)) return;
    this.question.value = '';
    this.#setAudio(null);
    this.onSend(text, audio);
  }

  setBusy(isBusy) {
    if (isBusy === this.#isBusy) return;
    this.#isBusy = isBusy;
    const words = worded(make('span', { class: 'wide' }), isBusy ? 'stop' : 'send');
    $('send').replaceChildren(icon(isBusy ? 'stop' : 'up'), words);
  }

  /** Offers the gateway's modes and inputs. */
  offer({ modes, default_mode: standard, takes_audio: takesAudio }) {
    const { values } = this.settings;
    const options = () => modes.map((mode) => worded(make('option', { value: mode }), `mode.${mode}`));
    $('mode').replaceChildren(...options());
    $('secondMode').replaceChildren(worded(make('option', { value: '' }), 'compare'), ...options());
    if (!modes.includes(values.mode)) values.mode = standard;
    if (!modes.includes(values.secondMode)) values.secondMode = '';
    for (const name of ['mode', 'secondMode']) $(name).value = values[name];
    worded($('hint'), `about.${values.mode}`);
    $('speech').hidden = !takesAudio;
    $('record').hidden = !canRecord();
  }

  /** The modes for the next question. */
  get modes() {
    const { mode, secondMode } = this.settings.values;
    return [mode, ...(secondMode ? [secondMode] : [])];
  }

  // Speech

  #attach(...elements) {
    $('attached').replaceChildren(...elements);
    $('attached').hidden = !elements.length;
  }

  #complain(key, args) {
    announce(key, args);
    this.#attach(worded(make('p', { class: 'wrong' }), key, args));
  }

  async #take(file, name = file?.name) {
    if (!file || $('speech').hidden) return;
    const format = kindOf(file);
    $('file').value = '';
    if (!format) this.#complain('audio.kind');
    else this.#setAudio({ data: await base64(file), format, name });
  }

  #setAudio(audio) {
    this.audio = audio;
    if (!audio) return this.#attach();
    const remove = make('button', { class: 'plain', onclick: () => this.#setAudio(null) }, '×');
    worded(remove, 'detach', { name: audio.name }, 'wordLabel');
    return this.#attach(player(audio), remove);
  }

  async #record() {
    const ending = this.#ending;
    $('record').disabled = true; // while the browser asks for permission, and while the WAV file is made
    try {
      if (ending) await this.#take(new File([await ending()], 'speech.wav'), say('recording'));
      else this.#attach(worded(make('p', { class: 'recording' }), 'recording'));
      this.#ending = ending ? null : await record();
    } catch (error) {
      this.#ending = null;
      this.#complain('audio.denied', { why: error.message });
    }
    $('record').disabled = false;
    $('record').setAttribute('aria-pressed', String(Boolean(this.#ending)));
    worded($('record'), this.#ending ? 'record.stop' : 'record', {}, 'wordTitle');
  }
}
