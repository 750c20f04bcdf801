// Shows Markdown: marked parses it, and DOMPurify lets only harmless elements through. HTML in an answer is text.
// Each letter is then traced to its place in the answer, to keep its origin.

import { icon, make } from './dom.js';
import { announce, worded } from './language.js';
import { Marked, Tokenizer } from './vendor/marked.esm.js';
import './vendor/purify.min.js';

const CLEAN = {
  ALLOWED_TAGS: ['p', 'br', 'hr', 'h4', 'h5', 'h6', 'blockquote', 'ul', 'ol', 'li', 'em', 'strong', 'del', 'a', 'code',
    'pre', 'table', 'thead', 'tbody', 'tr', 'th', 'td'],
  ALLOWED_ATTR: ['href', 'start', 'align', 'class'], // the class of code names its language
  ADD_URI_SAFE_ATTR: ['start', 'align'],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const WIDE = /[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]/; // East Asian, which has no spaces between words
const FORMULA = /^(?:\\\([^]{1,999}?\\\)|\\\[[^]{1,999}?\\\]|\$\$[^]{1,999}?\$\$|\$(?![\s$])[^$\n]*?[^\s\\$]\$(?!\d))/;
const STRONG = /^\*\*(?=\S)([^*\n]*[^*\s])\*\*/; // also next to punctuation without a space, as in Chinese

/** Keeps formulas as they are written: `_`, `*` and backslashes have another meaning there. */
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
    // HTML is text. The other two are rare in answers, and would misread a line that is still incomplete.
    ...{ html: none, tag: none, def: none, lheading: none },
    url(text) {
      const end = text.search(WIDE); // an address ends before Chinese text
      return end > 0 && Tokenizer.prototype.url.call(this, text.slice(0, end));
    },
  },
  renderer: {
    heading({ tokens, depth }) {
      const tag = `h${Math.min(depth + 3, 6)}`;
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
    },
    image({ href, tokens }) {
      return this.link({ href, tokens }); // a model's image is a link: the page loads nothing by itself
    },
    checkbox: ({ checked }) => (checked ? '☑ ' : '☐ '),
  },
});

/** A button that copies the result of `text()`. */
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
    pre.tabIndex = 0; // for scrolling by keyboard
    enclose(pre, make('figure', { class: 'code' }, head));
  }
  for (const table of block.querySelectorAll('table')) enclose(table, make('div', { class: 'table', tabindex: 0 }));
}

/** Finds in `text`, from `at` on, the letters of `shown` from `from` on. */
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

  /** `put(element, at, letters)` writes letters into an element; `at` is their place in the text. */
  constructor(body, put) {
    Object.assign(this, { body, put });
  }

  /** Shows the text, which has only grown since the last call. Unchanged blocks stay. */
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
      return [{ raw: text }]; // nested too deeply
    }
  }

  #block(token, text, at) {
    const block = make('div', { class: 'block' });
    try {
      block.append(DOMPurify.sanitize(marked.parser([token]), CLEAN));
    } catch { // unknown to marked, or nested too deeply
      block.className = 'as-written';
      this.put(block, at, token.raw);
      return block;
    }
    this.#trace(block, text.slice(0, at + token.raw.length), at);
    arrange(block);
    return block;
  }

  /** Rewrites the letters of a block with their origins. The shown letters have the same order as in the text. */
  #trace(block, text, from) {
    const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
    const nodes = [];
    while (walker.nextNode()) nodes.push(walker.currentNode);
    let at = from;
    for (const node of nodes.filter(({ data }) => data.trim())) {
      const written = new DocumentFragment();
      for (let letter = 0; letter < node.data.length;) {
        at = placeOf(text, at, node.data, letter);
        let length = 1; // consecutive letters in both
        while (letter + length < node.data.length && node.data[letter + length] === text[at + length]) length += 1;
        this.put(written, at, node.data.slice(letter, letter + length));
        letter += length;
        at += length;
      }
      node.replaceWith(written);
    }
  }
}
