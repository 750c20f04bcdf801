// The question being written: text, speech, modes, and the button that sends or stops.

import { MOST_MB, Recorder, base64, canRecord, kindOf } from './audio.js';
import { $, make } from './dom.js';
import { say, worded } from './language.js';

export class Composer {
  audio = null;
  takesAudio = false;
  #recorder = null;
  #isStarting = false;
  #busy = false;

  constructor({ settings, onSend, onStop, announce }) {
    Object.assign(this, { settings, onSend, onStop, announce });
    this.question = $('question');
    this.#wireText();
    this.#wireModes();
    this.#wireSpeech();
    this.setBusy(false);
  }

  #wireText() {
    this.question.addEventListener('input', () => this.#fit());
    this.question.addEventListener('keydown', (event) => {
      // Enter also takes a candidate of an input method; Safari tells so only by the code 229.
      if (event.key !== 'Enter' || event.shiftKey || event.isComposing || event.keyCode === 229) return;
      event.preventDefault();
      this.send();
    });
    $('send').addEventListener('click', () => (this.#busy ? this.onStop() : this.send()));
  }

  #fit() {
    this.question.style.height = 'auto';
    this.question.style.height = `${Math.min(this.question.scrollHeight, 220)}px`;
  }

  send() {
    const text = this.question.value.trim();
    if (this.#busy || this.#recorder || !(text || this.audio)) return;
    const { audio } = this;
    this.question.value = '';
    this.#setAudio(null);
    this.#fit();
    this.onSend(text, audio);
  }

  setBusy(busy) {
    this.#busy = busy;
    $('send').dataset.busy = String(busy);
    worded($('send-words'), busy ? 'stop' : 'send');
  }

  // Modes

  #wireModes() {
    $('mode').addEventListener('change', ({ target }) => {
      this.settings.set({ mode: target.value });
      this.showModes();
    });
    $('second-mode').addEventListener('change', ({ target }) => this.settings.set({ secondMode: target.value }));
    $('compare').addEventListener('click', () => {
      this.settings.set({ compare: !this.settings.values.compare });
      this.showModes();
    });
  }

  setModes(modes, standard) {
    const { values } = this.settings;
    if (!modes.includes(values.mode)) values.mode = standard;
    if (!modes.includes(values.secondMode)) {
      values.secondMode = ['cloud', 'edge'].find((mode) => modes.includes(mode) && mode !== values.mode) ?? standard;
    }
    for (const select of [$('mode'), $('second-mode')]) {
      select.replaceChildren(...modes.map((mode) => worded(make('option', { value: mode }), `mode.${mode}`)));
    }
    $('compare').hidden = modes.length < 2;
    this.showModes();
  }

  showModes() {
    const { mode, secondMode, compare } = this.settings.values;
    $('mode').value = mode;
    $('second-mode').value = secondMode;
    $('beside').hidden = !compare;
    $('compare').setAttribute('aria-pressed', String(compare));
    worded($('hint'), 'hint', { mode: `@about.${mode}` });
  }

  /** The modes that the next question goes to. */
  get modes() {
    const { mode, secondMode, compare } = this.settings.values;
    return compare ? [mode, secondMode] : [mode];
  }

  // Speech

  #wireSpeech() {
    $('record').addEventListener('click', () => this.#toggleRecording());
    $('attach').addEventListener('click', () => $('file').click());
    $('file').addEventListener('change', ({ target }) => {
      if (target.files[0]) this.#take(target.files[0]);
      target.value = '';
    });
    const over = (event, on) => {
      event.preventDefault(); // or the browser opens the file instead of the page
      const target = on && this.takesAudio;
      if (target === $('composer').classList.contains('is-target')) return;
      $('composer').classList.toggle('is-target', target);
      if (target) worded($('hint'), 'drop');
      else this.showModes();
    };
    document.addEventListener('dragover', (event) => over(event, true));
    document.addEventListener('dragleave', (event) => over(event, false));
    document.addEventListener('drop', (event) => {
      over(event, false);
      const [file] = event.dataTransfer?.files ?? [];
      if (file && this.takesAudio) this.#take(file);
    });
  }

  setTakesAudio(takes) {
    this.takesAudio = Boolean(takes);
    $('speech').hidden = !takes;
    $('record').hidden = !canRecord();
  }

  #complain(key, args) {
    const line = worded(make('p', { class: 'wrong' }), key, args);
    this.announce(key, args);
    $('attached').replaceChildren(line);
    $('attached').hidden = false;
  }

  async #take(file, name = file.name) {
    const format = kindOf(file);
    if (!format) return this.#complain('audio.kind');
    if (file.size > MOST_MB * 2 ** 20) return this.#complain('audio.size', { size: MOST_MB });
    return this.#setAudio({ data: await base64(file), format, name, url: URL.createObjectURL(file) });
  }

  #setAudio(audio) {
    this.audio = audio;
    $('attached').hidden = !audio;
    if (!audio) return;
    const remove = make('button', { type: 'button', class: 'plain', onclick: () => this.#setAudio(null) }, '×');
    worded(remove, 'detach', { name: audio.name }, 'wordLabel');
    $('attached').replaceChildren(player(audio), remove);
  }

  async #toggleRecording() {
    if (this.#recorder) return this.#stopRecording();
    if (this.#isStarting) return undefined; // the browser still asks whether it may
    this.#isStarting = true;
    const recorder = new Recorder();
    try {
      await recorder.start();
    } catch (error) {
      return this.#complain('audio.denied', { why: error.message });
    } finally {
      this.#isStarting = false;
    }
    this.#recorder = recorder;
    const began = Date.now();
    const tick = () => worded(line, 'recording', { seconds: Math.round((Date.now() - began) / 1000) });
    const line = make('p', { class: 'recording' });
    tick();
    this.ticking = setInterval(tick, 500);
    $('attached').replaceChildren(line);
    $('attached').hidden = false;
    return this.#showRecording(true);
  }

  async #stopRecording() {
    clearInterval(this.ticking);
    const recorder = this.#recorder;
    this.#recorder = null;
    this.#showRecording(false);
    const blob = await recorder.stop();
    await this.#take(new File([blob], 'speech.wav', { type: 'audio/wav' }), say('audio.recorded'));
  }

  #showRecording(on) {
    $('record').setAttribute('aria-pressed', String(on));
    for (const place of ['wordLabel', 'wordTitle']) worded($('record'), on ? 'record.stop' : 'record', {}, place);
  }
}

/** A sound with its name, to be heard again. */
export function player({ name, url }) {
  const sound = make('audio', { controls: true, preload: 'metadata', src: url, 'aria-label': name });
  return make('figure', { class: 'sound' }, make('figcaption', {}, name), sound);
}
