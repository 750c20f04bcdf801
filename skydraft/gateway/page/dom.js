// Makes elements. Strings become text nodes, so a model's text never becomes markup.

export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

// Enter also accepts an input method's candidate. Safari shows this only by the code 229.
export const isEnter = ({ key, shiftKey, isComposing, keyCode }) =>
  key === 'Enter' && !shiftKey && !isComposing && keyCode !== 229;

/** Keeps the end of the page in view while it grows, unless the reader has scrolled up. */
export function follow(grow) {
  const page = document.documentElement;
  const isAtEnd = window.scrollY + window.innerHeight > page.scrollHeight - 90;
  grow();
  if (isAtEnd) window.scrollTo(0, page.scrollHeight);
}

const SVG = 'http://www.w3.org/2000/svg';
const ROUND = 'M10 3.5a6.5 6.5 0 0 0 0 13a6.5 6.5 0 0 0 0-13';
const DRAWINGS = {
  mark: 'M2 14h12M2 7h5M11 7h7',
  add: 'M10 4v12M4 10h12',
  list: 'M4 5h12M4 10h12M4 15h7',
  contrast: `${ROUND}v13M12 4v12M14 5.5v9M15.5 7v6`,
  knob: 'M3 6h6M13 6h4M9 6a2 2 0 0 0 4 0a2 2 0 0 0-4 0M3 14h3M10 14h7M6 14a2 2 0 0 0 4 0a2 2 0 0 0-4 0',
  microphone: 'M7.5 5.5a2.5 2.5 0 0 1 5 0V9a2.5 2.5 0 0 1-5 0zM4.5 9.5a5.5 5.5 0 0 0 11 0M10 15v2.5',
  sound: 'M3 10h1.5M6.5 6.5v7M9.5 4v12M12.5 7.5v5M15.5 9v2',
  up: 'M10 16V4M5 9l5-5 5 5',
  down: 'M5 8l5 5 5-5',
  copy: 'M7 7V4h9v9h-3M4 7h9v9H4z',
  stop: 'M5.5 5.5h9v9h-9z',
  again: 'M15.5 10a5.5 5.5 0 1 1-1.7-4M14 3v3.2h-3.2',
};

/** A small line drawing, for buttons. */
export function icon(name) {
  const [svg, path] = ['svg', 'path'].map((tag) => document.createElementNS(SVG, tag));
  svg.setAttribute('viewBox', '0 0 20 20');
  svg.setAttribute('class', 'icon');
  svg.setAttribute('aria-hidden', 'true');
  path.setAttribute('d', DRAWINGS[name]);
  svg.append(path);
  return svg;
}
