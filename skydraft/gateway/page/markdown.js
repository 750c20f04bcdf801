// Markdown as elements: marked reads it, and DOMPurify lets only harmless elements through. HTML in an answer is text.
// Then each letter is traced to its place in the answer, so its origin stays with it.

import { icon, make } from './dom.js';
import { announce, worded } from './language.js';
import { Marked, Tokenizer } from './vendor/marked.esm.js';
import './vendor/purify.min.js';

const CLEAN = {
  ALLOWED_TAGS: ['p', 'br', 'hr', 'h4', 'h5', 'h6', 'blockquote', 'ul', 'ol', 'li', 'em', 'strong', 'del', 'a', 'code',
    'pre', 'table', 'thead', 'tbody', 'tr', 'th', 'td'],
  ALLOWED_ATTR: ['href', 'start', 'align', 'class'], // a class names the language of code
  ADD_URI_SAFE_ATTR: ['start', 'align'],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const WIDE = /[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]/; // East Asian, which has no spaces between words
const FORMULA = /^(?:\\\([^]{1,999}?\\\)|\\\[[^]{1,999}?\\\]|\$\$[^]{1,999}?\$\$|\$(?![\s$])[^$\n]*?[^\s\\$]\$(?!\d))/;
const STRONG = /^\*\*(?=\S)([^*\n]*[^*\s])\*\*/; // though punctuation and no space stands beside it, as in Chinese

/** Formulas stay as they are written: `_`, `*` and backslashes mean something else in them. */
const formula = (name, level, begins, ending) => ({
  name,
  level,
  start: (text) => text.search(begins),
  tokenizer(text) {
    const [raw] = FORMULA.exec(text) ?? [];
    return raw && ending.test(text.slice(raw.length)) ? { type: name, raw } : undefined;
  },
  renderer({ raw }) {
    const text = raw.replace(/[&<>]/g, (mark) => `&#${mark.charCodeAt(0)};`);
    return level === 'block' ? `<p>${text}</p>` : text;
  },
});

const strong = {
  name: 'strong',
  level: 'inline',
  start: (text) => text.indexOf('**'),
  tokenizer(text) {
    const [raw, inner] = STRONG.exec(text) ?? [];
    return raw && { type: 'strong', raw, text: inner, tokens: this.lexer.inlineTokens(inner) };
  },
};

const none = () => undefined;
const marked = new Marked({
  breaks: true,
  extensions: [
    strong,
    formula('formula', 'inline', /\$|\\[([]/, /^/),
    formula('display', 'block', /(?<=\n)(?:\$\$|\\\[)/, /^ *(?:\n|$)/),
  ],
  tokenizer: {
    // HTML is text, and what is rare in answers would turn a line that is not complete yet into something else.
    ...{ html: none, tag: none, def: none, lheading: none },
    url(text) {
      const end = text.search(WIDE); // Chinese that follows without a space is no part of an address
      return end > 0 && Tokenizer.prototype.url.call(this, text.slice(0, end));
    },
  },
  renderer: {
    heading({ tokens, depth }) {
      const tag = `h${Math.min(depth + 3, 6)}`;
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
    },
    image({ href, tokens }) {
      return this.link({ href, tokens }); // what a model names is never loaded by itself
    },
    checkbox: ({ checked }) => (checked ? '☑ ' : '☐ '),
  },
});

/** A button that copies what `text()` says then. */
export function copyButton(text) {
  const words = worded(make('span'), 'copy');
  const copy = async () => {
    await navigator.clipboard.writeText(text());
    announce('copied');
    worded(words, 'copied');
    setTimeout(() => worded(words, 'copy'), 1500);
  };
  return make('button', { class: 'quiet', onclick: copy }, icon('copy'), words);
}

function enclose(element, frame) {
  element.replaceWith(frame);
  frame.append(element);
}

function arrange(block) {
  for (const link of block.querySelectorAll('a')) {
    const href = link.getAttribute('href');
    if (!href) link.replaceWith(...link.childNodes);
    else Object.assign(link, { title: href, target: '_blank', rel: 'noopener noreferrer' });
  }
  for (const pre of block.querySelectorAll('pre')) {
    const language = pre.firstChild.className.replace('language-', '');
    const head = make('figcaption', {}, make('span', {}, language), copyButton(() => pre.textContent));
    pre.tabIndex = 0; // it may be wider than the page
    enclose(pre, make('figure', { class: 'code' }, head));
  }
  for (const table of block.querySelectorAll('table')) enclose(table, make('div', { class: 'table', tabindex: 0 }));
}

/** Where in the text, from `at` on, the letters stand that are shown from `from` on, as far as they are written so. */
function placeOf(text, at, shown, from) {
  const [ahead] = /\n|.{1,16}/.exec(shown.slice(from));
  for (let length = ahead.length; length >= 1; length >>= 1) {
    const place = text.indexOf(ahead.slice(0, length), at);
    if (place >= 0 && place - at <= 8 * length ** 2) return place;
  }
  return Math.min(at, text.length - 1);
}

export class Markdown {
  #shown = []; // types and texts of the blocks in the body

  /** `put(element, at, letters)` writes letters into an element, which stand in the text from `at` on. */
  constructor(body, put) {
    Object.assign(this, { body, put });
  }

  /** Shows the text, which has only grown since the last time. Blocks that are complete stay as they are. */
  show(text, isRendered) {
    const blocks = isRendered ? this.#read(text) : [{ raw: text }];
    const names = blocks.map(({ type, raw }) => `${type} ${raw}`);
    const first = names.findIndex((name, at) => name !== this.#shown[at]);
    const same = first < 0 ? blocks.length : first;
    while (this.body.children.length > same) this.body.lastChild.remove();
    let at = 0;
    blocks.forEach((block, index) => {
      if (index >= same) this.body.append(this.#block(block, text, at));
      at += block.raw.length;
    });
    this.#shown = names;
  }

  #read(text) {
    try {
      return marked.lexer(text.replaceAll('\r', ' '));
    } catch {
      return [{ raw: text }]; // it is nested too deeply
    }
  }

  #block(token, text, at) {
    const block = make('div', { class: 'block' });
    try {
      block.append(DOMPurify.sanitize(marked.parser([token]), CLEAN));
    } catch { // marked knows no such token, or it is nested too deeply
      block.className = 'as-written';
      this.put(block, at, token.raw);
      return block;
    }
    this.#trace(block, text.slice(0, at + token.raw.length), at);
    arrange(block);
    return block;
  }

  /** Writes the letters of a block anew: those that are shown stand in the text in the same order. */
  #trace(block, text, from) {
    const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
    const nodes = [];
    while (walker.nextNode()) nodes.push(walker.currentNode);
    let at = from;
    for (const node of nodes.filter(({ data }) => data.trim())) {
      const written = new DocumentFragment();
      for (let letter = 0; letter < node.data.length;) {
        at = placeOf(text, at, node.data, letter);
        let length = 1; // of letters that follow each other in both
        while (letter + length < node.data.length && node.data[letter + length] === text[at + length]) length += 1;
        this.put(written, at, node.data.slice(letter, letter + length));
        letter += length;
        at += length;
      }
      node.replaceWith(written);
    }
  }
}
