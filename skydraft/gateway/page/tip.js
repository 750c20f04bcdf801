// The words of a run for those who come by keyboard or finger; the mouse has the title.

import { $ } from './dom.js';

function place(tip, run) {
  const [box] = run.getClientRects();
  if (!box) return;
  tip.style.left = '0';
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 12);
  const above = box.top - tip.offsetHeight - 8;
  tip.style.left = `${Math.max(12, left)}px`;
  tip.style.top = `${above > 60 ? above : box.bottom + 8}px`;
}

export function watchTips() {
  const tip = $('tip');
  let run = null;
  $('turns').addEventListener('focusin', ({ target }) => {
    run = target.classList.contains('run') && target.title ? target : null;
    tip.hidden = !run;
    if (!run) return;
    tip.textContent = run.title;
    run.setAttribute('aria-describedby', 'tip');
    if (run.dataset.token !== undefined) { // a button to those who come to it; text to those who read
      run.setAttribute('role', 'button');
      run.setAttribute('aria-haspopup', 'dialog');
    }
    place(tip, run);
  });
  $('turns').addEventListener('focusout', ({ target }) => {
    target.removeAttribute('role');
    target.removeAttribute('aria-haspopup');
    run = null;
    tip.hidden = true;
  });
  $('token').addEventListener('close', () => { tip.hidden = true; }); // which gives the focus back
  document.addEventListener('scroll', () => run && place(tip, run), { passive: true });
}
