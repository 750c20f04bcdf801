// Connects the parts of the page.

import { models } from './api.js';
import { Composer } from './composer.js';
import { Conversation } from './conversation.js';
import { $, icon } from './dom.js';
import { worded } from './language.js';
import { watchLink } from './link.js';
import { listSaved } from './saved.js';
import { Settings } from './settings.js';
import { showFigures } from './strip.js';

const settings = new Settings();
const conversation = new Conversation({ settings, onChange: changed, onNews: news });
const composer = new Composer({
  settings,
  onSend: (text, audio) => conversation.send({ text, audio }, composer.modes),
  onStop: () => conversation.stop(),
});
let again = 0;

function changed() {
  composer.setBusy(conversation.busy);
  const { answers } = conversation.turns.at(-1) ?? {};
  $('welcome').hidden = Boolean(answers);
  $('strip').hidden = !answers; // without answers it has no figures
  if (!answers) return;
  const wordOf = ({ mode, branch }) => (branch ? 'branch.short' : `mode.${mode}`);
  showFigures(answers.map((answer) => ({ word: wordOf(answer), figures: answer.figures })));
}

function news() {
  watchLink(loadModels);
  // The models could not load if the user has only now given a valid key.
  if (!$('mode').options.length) loadModels();
}

async function loadModels() {
  clearTimeout(again);
  try {
    const listed = await models();
    composer.offer(listed);
    worded($('pair'), listed.cloud ? 'pair.both' : 'pair.edge', { edge: listed.edge, cloud: listed.cloud });
  } catch (error) {
    if (error.status !== 401) again = setTimeout(loadModels, 3000);
  }
}

for (const element of document.querySelectorAll('[data-icon]')) element.prepend(icon(element.dataset.icon));
for (const example of document.querySelectorAll('.example')) {
  example.addEventListener('click', () => {
    $('question').value = example.textContent;
    $('question').focus();
  });
}
document.addEventListener('click', ({ target }) => {
  const button = target.closest('[data-opens], [data-closes]');
  if (button) $(button.dataset.opens ?? button.dataset.closes)[button.dataset.opens ? 'showModal' : 'close']();
});
document.addEventListener('keydown', (event) => {
  const inDialog = document.querySelector('dialog[open]');
  if (event.key === 'Escape' && !event.isComposing && !inDialog) conversation.stop();
});
document.addEventListener('visibilitychange', () => watchLink(loadModels));
$('rendered').addEventListener('change', () => conversation.show());
$('new').addEventListener('click', () => {
  conversation.clear();
  $('question').focus();
});

listSaved(conversation);
conversation.reopen().catch(() => {}); // a browser without storage starts empty
watchLink(loadModels);
loadModels();
if (matchMedia('(pointer: fine)').matches) $('question').focus();
