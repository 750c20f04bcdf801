// Elements made by script. Strings become text nodes: what a model writes never turns into markup.

export const $ = (id) => document.getElementById(id);

const SVG = 'http://www.w3.org/2000/svg';

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, '');
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Runs `work` once before the next frame, however often it is asked for. */
export function eachFrame(work) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      work();
    });
  };
}

/** A small line drawing out of one path, for buttons. */
export function icon(path) {
  return draw('svg', { class: 'icon', viewBox: '0 0 20 20', 'aria-hidden': 'true' }, draw('path', { d: path }));
}
