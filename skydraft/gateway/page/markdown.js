// Markdown as elements. lezer says of each character where it stands, so its origin stays with it. Text never becomes
// markup: HTML is shown as it was written, and addresses of links are all that has to be checked.

import { copyButton } from './clipboard.js';
import { make } from './dom.js';
import { GFM, InlineContext, parser } from './lezer.js';

const TAGS = {
  Paragraph: 'p', Task: 'p', Blockquote: 'blockquote', BulletList: 'ul', OrderedList: 'ol', ListItem: 'li', HorizontalRule: 'hr',
  ATXHeading1: 'h4', ATXHeading2: 'h5', ATXHeading3: 'h6', ATXHeading4: 'h6', ATXHeading5: 'h6', ATXHeading6: 'h6',
  Emphasis: 'em', StrongEmphasis: 'strong', Strikethrough: 'del', InlineCode: 'code', MathBlock: 'div',
};
const HOLDERS = ['Blockquote', 'BulletList', 'OrderedList', 'ListItem', 'HorizontalRule']; // no text of their own
const MARKS = ['HeaderMark', 'QuoteMark', 'ListMark', 'EmphasisMark', 'StrikethroughMark', 'CodeMark'];
const SAFE = ['http:', 'https:', 'mailto:'];
const WIDE = /[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]/; // East Asian, which has no spaces between words
const MATH = /^(?:\\\([^]+?\\\)|\\\[[^]+?\\\]|\$\$[^]+?\$\$|\$(?![\s$])[^$\n]*?[^\s\\$]\$(?!\d))/;
const LONGEST_MATH = 2000;

/** Formulas stay as they are written: `_`, `*` and backslashes mean something else in them. */
const inlineMath = {
  name: 'Math',
  before: 'Escape',
  parse(cx, next, pos) {
    const found = (next === 36 || next === 92) && MATH.exec(cx.slice(pos, Math.min(cx.end, pos + LONGEST_MATH)));
    return found ? cx.addElement(cx.elt('Math', pos, pos + found[0].length)) : -1;
  },
};

const opensMath = (line) => /^(?:\$\$|\\\[)/.test(line.text.slice(line.pos));

const mathBlock = {
  name: 'MathBlock',
  before: 'FencedCode',
  endLeaf: (cx, line) => opensMath(line),
  parse(cx, line) {
    if (!opensMath(line)) return false;
    const from = cx.lineStart + line.pos;
    const end = line.text.startsWith('$$', line.pos) ? '$$' : '\\]';
    let at = line.text.indexOf(end, line.pos + 2);
    if (at >= 0 && line.text.slice(at + 2).trim()) return false; // a formula at the beginning of a sentence
    while (at < 0 && cx.nextLine() && line.depth >= cx.depth && line.text.trim()) at = line.text.indexOf(end);
    if (at >= 0) cx.nextLine();
    cx.addElement(cx.elt('MathBlock', from, cx.prevLineEnd()));
    return true;
  },
};

/** Emphasis beside Chinese: a mark may open or close at punctuation too, since no space stands there. */
const emphasis = {
  name: 'WideEmphasis',
  before: 'Emphasis',
  parse(cx, next, pos) {
    if (next !== 42) return -1;
    let to = pos + 1;
    while (cx.char(to) === 42) to += 1;
    const [before, after] = [cx.slice(pos - 1, pos), cx.slice(to, to + 1)];
    const mark = (one) => /[\p{P}\p{S}]/u.test(one);
    const gap = (one) => !one.trim();
    if (!WIDE.test(before) && !WIDE.test(after)) return -1;
    const opens = !gap(after) && (!mark(after) || WIDE.test(after) || gap(before) || mark(before) || WIDE.test(before));
    const closes = !gap(before) && (!mark(before) || WIDE.test(before) || gap(after) || mark(after) || WIDE.test(after));
    return cx.addDelimiter(InlineContext.emphasisAsterisk, pos, to, opens, closes);
  },
};

// Without what is rare in answers and would turn a line that is not complete yet into something else.
const remove = ['HTMLBlock', 'SetextHeading', 'LinkReference'];
const defineNodes = ['Math', { name: 'MathBlock', block: true }];
const reader = parser.configure([GFM, { remove, defineNodes, parseBlock: [mathBlock], parseInline: [inlineMath, emphasis] }]);

/** The character of a reference such as `&amp;`; the document it is read in shows and runs nothing. */
const decoded = (entity) => new DOMParser().parseFromString(entity, 'text/html').documentElement.textContent;

/** An address that a link may have, or null. */
function addressOf(written) {
  const plain = written.replace(/^<|>$/g, '').replace(/\\([!-/:-@[-`{-~])/g, '$1').replace(/&#?\w+;/g, decoded);
  const full = /^www\./i.test(plain) ? `https:${plain}` : /^[^:/]+@/.test(plain) ? `mailto:${plain}` : plain;
  const url = URL.canParse(full) ? new URL(full) : null;
  return url && SAFE.includes(url.protocol) ? url.href : null;
}

const linkTo = (href) => make('a', { href, title: href, target: '_blank', rel: 'noopener noreferrer' });

/** Alignments of columns from the row of dashes below a table's head. */
const alignments = (dashes) => dashes.trim().replace(/^\||\|$/g, '').split('|').map((column) => {
  const [left, right] = [column.trim().startsWith(':'), column.trim().endsWith(':')];
  return right ? (left ? 'to-middle' : 'to-right') : null;
});

function cellsOf(row) {
  const cells = [];
  let cell = null;
  for (let part = row.firstChild; part; part = part.nextSibling) {
    if (part.name === 'TableCell') cell = part;
    else {
      if (part.from > row.from) cells.push(cell);
      cell = null;
    }
  }
  return cell ? [...cells, cell] : cells;
}

export class Markdown {
  #shown = []; // {name, from, to} of each block in the body

  /** `put(element, from, to, as)` writes a part of the text into an element, or `as` in its place. */
  constructor(body, put) {
    Object.assign(this, { body, put });
  }

  clear() {
    this.#shown = [];
    this.body.replaceChildren();
  }

  /** Shows the text, which has only grown since the last time. Blocks that are complete stay as they are. */
  show(text, isRendered) {
    this.text = text;
    const blocks = isRendered ? this.#parsed() : [{ name: 'AsWritten', from: 0, to: text.length }];
    const same = blocks.findIndex(({ name, from, to }, at) => {
      const old = this.#shown[at];
      return old?.name !== name || old.from !== from || old.to !== to;
    });
    const kept = same < 0 ? blocks.length : same;
    while (this.body.children.length > kept) this.body.lastChild.remove();
    for (const block of blocks.slice(kept)) this.body.append(this.#block(block));
    this.#shown = blocks.map(({ name, from, to }) => ({ name, from, to }));
  }

  #parsed() {
    const blocks = [];
    for (let node = reader.parse(this.text).topNode.firstChild; node; node = node.nextSibling) blocks.push(node);
    return blocks;
  }

  #block(node) {
    const element = make('div', { class: 'block' });
    try {
      if (node.name === 'AsWritten') throw new RangeError('not parsed');
      this.#place(element, node);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error; // nested too deeply
      element.replaceChildren();
      element.classList.add('as-written');
      this.put(element, node.from, node.to);
    }
    return element;
  }

  /** Writes a node's text and parts between `from` and `to`. */
  #fill(element, node, from = node.from, to = node.to) {
    const isText = !HOLDERS.includes(node.name);
    let at = from;
    for (let part = node.firstChild; part; part = part.nextSibling) {
      if (part.from < from || part.to > to) continue;
      if (isText) this.put(element, at, part.from);
      this.#place(element, part);
      at = part.to;
    }
    if (isText) this.put(element, at, to);
    return element;
  }

  #place(element, node) {
    const { name, from, to } = node;
    if (MARKS.includes(name)) return;
    if (name === 'FencedCode' || name === 'CodeBlock') element.append(this.#code(node));
    else if (name === 'Table') element.append(this.#table(node));
    else if (name === 'Link' || name === 'Image') this.#link(element, node);
    else if (name === 'URL') this.#address(element, node);
    else if (name === 'Autolink') this.#fill(element, node, from + 1, to - 1);
    else if (name === 'Escape') this.put(element, from + 1, to);
    else if (name === 'Entity') this.put(element, from, to, decoded(this.text.slice(from, to)));
    else if (name === 'TaskMarker') this.put(element, from, to, this.text[from + 1] === ' ' ? '☐' : '☑');
    else if (name === 'HardBreak') element.append(make('br'));
    else if (name in TAGS) element.append(this.#fill(this.#element(node), node));
    else this.put(element, from, to);
  }

  #element(node) {
    const first = node.name === 'OrderedList' ? Number.parseInt(this.text.slice(node.from), 10) : 1;
    return make(TAGS[node.name], { class: node.name === 'MathBlock' ? 'formula' : null, start: first === 1 ? null : first });
  }

  #code(node) {
    const info = node.getChild('CodeInfo');
    const parts = node.getChildren('CodeText');
    const code = make('code');
    for (const { from, to } of parts) this.put(code, from, to);
    const copy = copyButton(() => parts.map(({ from, to }) => this.text.slice(from, to)).join(''));
    const head = make('figcaption', {}, make('span', {}, info ? this.text.slice(info.from, info.to) : ''), copy);
    return make('figure', { class: 'code' }, head, make('pre', { tabindex: 0 }, code));
  }

  #table(node) {
    const dashes = node.getChild('TableDelimiter');
    const columns = alignments(this.text.slice(dashes.from, dashes.to));
    const row = (line, tag) => {
      const cells = cellsOf(line);
      return make('tr', {}, ...columns.map((to, at) => {
        const cell = make(tag, { class: to });
        return cells[at] ? this.#fill(cell, cells[at]) : cell;
      }));
    };
    const head = make('thead', {}, row(node.getChild('TableHeader'), 'th'));
    const body = make('tbody', {}, ...node.getChildren('TableRow').map((line) => row(line, 'td')));
    return make('div', { class: 'table', tabindex: 0 }, make('table', {}, head, body));
  }

  /** A link, or a picture as a link to it: what a model names is never loaded by itself. */
  #link(element, node) {
    const [open, close] = node.getChildren('LinkMark');
    const url = node.getChildren('URL').find(({ from }) => from >= close.to);
    const href = url && !element.closest('a') ? addressOf(this.text.slice(url.from, url.to)) : null;
    if (!href) this.#fill(element, node);
    else element.append(this.#fill(linkTo(href), node, open.to, close.from));
  }

  /** A bare address. Chinese that follows without a space is no part of it. */
  #address(element, { from, to }) {
    const written = this.text.slice(from, to);
    const length = written.search(WIDE);
    const end = length > 0 ? from + length : to;
    const href = element.closest('a') ? null : addressOf(this.text.slice(from, end));
    const anchor = href ? linkTo(href) : element;
    if (href) element.append(anchor);
    this.put(anchor, from, end);
    this.put(element, end, to);
  }
}
