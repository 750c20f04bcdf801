// Puts the parts together.

import { models } from './api.js';
import { Composer } from './composer.js';
import { Conversation } from './conversation.js';
import { $, make } from './dom.js';
import { Figures, sum } from './figures.js';
import { askKey } from './key.js';
import { worded } from './language.js';
import { Link } from './link.js';
import { Saved } from './saved.js';
import { Settings } from './settings.js';
import { Strip } from './strip.js';
import { watchTips } from './tip.js';

const strip = new Strip();
const settings = new Settings(() => strip.draw(), () => conversation.show());
const announce = (key, args) => worded($('announce'), key, args);
const conversation = new Conversation({ settings, announce, onChange: changed, onNews: news });
const composer = new Composer({
  settings,
  announce,
  onSend: (text, audio) => conversation.send(text, audio, composer.modes),
  onStop: () => conversation.stop(),
});
const link = new Link(loadModels);
new Saved(conversation, announce);

function changed() {
  composer.setBusy(conversation.busy);
  const isNew = !conversation.turns.length;
  $('welcome').hidden = !isNew;
  $('strip').hidden = isNew; // its figures would all be empty
  const last = conversation.turns.at(-1)?.answers ?? [];
  const all = { word: 'figures.all', figures: sum(conversation.turns.flatMap((turn) => turn.answers.map((a) => a.figures))) };
  if (last.length > 1) {
    strip.set(last.map(({ mode, branch, figures }) => ({ word: branch ? 'branch.short' : `mode.${mode}`, figures })), last.length);
  } else {
    strip.set([{ word: 'figures.answer', figures: last[0]?.figures ?? new Figures() }, all], 1);
  }
}

function news() {
  link.ask();
  // The key may have been refused at first and given with a question.
  const answered = conversation.turns.at(-1)?.answers.some(({ status }) => status === 'done');
  if (answered && !$('mode').options.length) loadModels();
}

let again = 0;

async function loadModels() {
  clearTimeout(again);
  try {
    const listed = await models();
    composer.setModes(listed.modes, listed.default_mode);
    composer.setTakesAudio(Boolean(listed.takes_audio));
    worded($('pair'), listed.cloud ? 'pair.both' : 'pair.edge', { edge: listed.edge, cloud: listed.cloud });
  } catch (error) {
    if (error.status !== 401) again = setTimeout(loadModels, 3000);
    else if (await askKey()) await loadModels();
  }
}

function examples() {
  const buttons = [1, 2, 3].map((number) => {
    const use = ({ currentTarget }) => {
      $('question').value = currentTarget.textContent;
      $('question').dispatchEvent(new Event('input'));
      $('question').focus();
    };
    return make('li', {}, worded(make('button', { type: 'button', class: 'example', onclick: use }), `example.${number}`));
  });
  $('examples').replaceChildren(...buttons);
}

document.addEventListener('keydown', (event) => {
  const inDialog = document.querySelector('dialog[open]');
  if (event.key === 'Escape' && !event.isComposing && !inDialog && conversation.busy) conversation.stop();
});
$('new').addEventListener('click', () => {
  conversation.clear();
  announce('announce.new');
  $('question').focus();
});

examples();
watchTips();
changed();
conversation.reopen().catch(() => {}); // a browser that keeps nothing begins anew
link.ask();
loadModels();
if (matchMedia('(pointer: fine)').matches) $('question').focus();
