/* Markdown of a text that is still being written, as DOM nodes.
 *
 * Text comes in pieces of any size. A line's block (list, quote, fence, table, ..) is decided as soon as its first
 * characters allow it; until then they are held back, so that nothing is shown in one form and then in another. What is
 * closed is never touched again, and an open paragraph is cut once it is long: the work for a text is linear in its
 * length. Nothing here ever parses HTML: text becomes text nodes, elements come from the fixed set below, and links
 * lead to http, https and mailto alone. Two rules differ from CommonMark because of how models write: a line feed
 * inside a paragraph is a line break, and a rule of dashes below a paragraph is a rule, not a heading. */
import { Highlighter } from "./highlight.js";
import { copyButton } from "./common.js";

const DEPTH_MAX = 24; /* containers inside each other; deeper markers are text */
const HELD_MAX = 200; /* characters held back at most before a line is decided */
const OPEN_MAX = 2048; /* an open paragraph beyond this is cut at a space, behind which nothing is parsed again */

const PUNCTUATION = /[\p{P}\p{S}]/u;
const SPACE = /\s/;
const CJK = /[\u2E80-\u303F\u3040-\u30FF\u3100-\u31FF\u3400-\u9FFF\uAC00-\uD7AF\uF900-\uFAFF\uFE30-\uFE4F\uFF00-\uFFEF]/;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00A0", hellip: "\u2026", ndash: "\u2013",
  mdash: "\u2014", times: "\u00D7", copy: "\u00A9", rarr: "\u2192", larr: "\u2190", le: "\u2264", ge: "\u2265" };

/* The address if a link may lead there, or null. */
export function safeUrl(text) {
  const trimmed = text.trim();
  if (!/^(https?:\/\/|mailto:)/i.test(trimmed) || /[\u0000-\u0020\u007F]/.test(trimmed)) return null;
  try {
    const url = new URL(trimmed);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/* Whether a text runs from right to left, by its first letter; null if there is none. The attribute dir="auto" would
 * make the browser look through the whole block at every change. */
function isRtl(text) {
  const letter = /\p{L}/u.exec(text);
  return letter ? /[\u0590-\u08FF\uFB1D-\uFDFF\uFE70-\uFEFF]/.test(letter[0]) : null;
}

/* ---- inline text --------------------------------------------------------------------------------------------------
 * parseInline gives a list of strings and {tag, ..., children}; sync makes the children of an element equal to it and
 * leaves alone what is the same already, so that a selection survives and nothing blinks. */

function pushText(list, text) {
  if (!text) return;
  if (typeof list[list.length - 1] === "string") list[list.length - 1] += text;
  else list.push(text);
}

function joined(list) {
  const out = [];
  for (const node of list) {
    if (typeof node === "string") pushText(out, node);
    else if (node.delim) pushText(out, node.ch.repeat(node.count));
    else out.push(node);
  }
  return out;
}

/* Whether a run of *, _ or ~ between two characters can open and can close. East Asian text has no spaces around
 * emphasis, so there a neighbour of that kind counts as a space would. */
function flanking(ch, before, after) {
  const spaceBefore = !before || SPACE.test(before);
  const spaceAfter = !after || SPACE.test(after);
  const punctBefore = !spaceBefore && PUNCTUATION.test(before);
  const punctAfter = !spaceAfter && PUNCTUATION.test(after);
  const left = !spaceAfter && (!punctAfter || spaceBefore || punctBefore || CJK.test(before));
  const right = !spaceBefore && (!punctBefore || spaceAfter || punctAfter || CJK.test(after));
  if (ch === "_") return { open: left && (!right || punctBefore), close: right && (!left || punctAfter) };
  return { open: left, close: right };
}

function wrap(ch, n, children) {
  const tag = ch === "~" ? "del" : n === 2 ? "strong" : "em";
  return { tag, children: joined(children) };
}

/* Pairs the runs of emphasis in out[from..]. With isOpen, runs that wait for their end get it at the end of the text. */
function pairEmphasis(out, from, isOpen) {
  for (let i = from; i < out.length; i++) {
    const closer = out[i];
    if (!closer.delim || !closer.close || !closer.count) continue;
    let j = i - 1;
    let isFound = false;
    for (; j >= from; j--) {
      const o = out[j];
      if (!o.delim || o.ch !== closer.ch || !o.open || !o.count) continue;
      if (o.ch === "~" && o.count !== closer.count) continue;
      if ((o.close || closer.open) && (o.size + closer.size) % 3 === 0 && (o.size % 3 || closer.size % 3)) continue;
      isFound = true;
      break;
    }
    if (!isFound) {
      if (!closer.open) out[i] = closer.ch.repeat(closer.count);
      continue;
    }
    const n = closer.ch === "~" ? closer.count : Math.min(2, closer.count, out[j].count);
    out.splice(j + 1, i - j - 1, wrap(closer.ch, n, out.slice(j + 1, i)));
    out[j].count -= n;
    closer.count -= n;
    i = j + 2;
    if (!out[j].count) {
      out.splice(j, 1);
      i--;
    }
    if (!closer.count) {
      out.splice(i, 1);
      i--;
    } else {
      i--; /* the same closer again */
    }
  }
  if (isOpen) {
    for (let j = out.length - 2; j >= from; j--) {
      const o = out[j];
      if (!o.delim || !o.open || !o.count || o.count > 3 || (o.ch === "_" && o.count === 1)) continue;
      const n = o.ch === "~" ? o.count : Math.min(2, o.count);
      out.splice(j + 1, out.length - j - 1, wrap(o.ch, n, out.slice(j + 1)));
      o.count -= n;
      if (!o.count) out.splice(j, 1);
      else j++;
    }
  }
}

/* "(dest "title")" at src[at]: {dest, end}, null if it is none, or "open" if the text ends inside it. */
function linkTail(src, at) {
  let i = at + 1;
  while (i < src.length && SPACE.test(src[i])) i++;
  let dest = "";
  if (src[i] === "<") {
    const end = src.indexOf(">", i);
    if (end < 0) return src.indexOf("\n", i) < 0 ? "open" : null;
    dest = src.slice(i + 1, end);
    i = end + 1;
  } else {
    let depth = 0;
    const start = i;
    for (; i < src.length && !SPACE.test(src[i]); i++) {
      if (src[i] === "\\" && i + 1 < src.length) i++;
      else if (src[i] === "(") depth++;
      else if (src[i] === ")" && depth-- === 0) break;
    }
    if (i >= src.length) return "open";
    dest = src.slice(start, i).replace(/\\([!-/:-@[-`{-~])/g, "$1");
  }
  while (i < src.length && SPACE.test(src[i])) i++;
  if (src[i] === '"' || src[i] === "'") {
    const end = src.indexOf(src[i], i + 1);
    if (end < 0) return "open";
    i = end + 1;
    while (i < src.length && SPACE.test(src[i])) i++;
  }
  if (i >= src.length) return "open";
  return src[i] === ")" ? { dest, end: i + 1 } : null;
}

const SPECIAL = /[\\`*_~[\]!<&\n$]|https?:\/\//g;

/* Inline text to nodes. isOpen: more may follow, so a mark that still waits for its end counts as ended here, and marks
 * at the very end, which may be half of one, are left out. */
function parseInline(text, isOpen) {
  const src = isOpen ? text.replace(/[*_~`]+$|\\$/, "") : text;
  const out = [];
  const brackets = [];
  const missing = new Set(); /* lengths of backtick runs that have no partner further on */
  let i = 0;
  const plain = (s) => pushText(out, s);
  while (i < src.length) {
    SPECIAL.lastIndex = i;
    const match = SPECIAL.exec(src);
    if (!match) {
      plain(src.slice(i));
      break;
    }
    plain(src.slice(i, match.index));
    i = match.index;
    const ch = src[i];
    const next = src[i + 1];
    if (ch === "\n") {
      const last = out.length - 1;
      if (typeof out[last] === "string") out[last] = out[last].replace(/[ \t]+$/, "");
      out.push({ tag: "br", children: [] });
      i++;
      while (src[i] === " ") i++;
    } else if (ch === "\\" && (next === "(" || next === "[")) {
      const end = src.indexOf(next === "(" ? "\\)" : "\\]", i + 2);
      if (end < 0 && !isOpen) {
        plain(next);
        i += 2;
      } else {
        const body = end < 0 ? src.slice(i) : src.slice(i, end + 2);
        out.push({ tag: "span", cls: "math", children: [body] });
        i += body.length;
      }
    } else if (ch === "\\") {
      if (next === "\n") i++; /* the line feed breaks the line anyway */
      else if (next && /[!-/:-@[-`{-~]/.test(next)) {
        plain(next);
        i += 2;
      } else {
        plain("\\");
        i++;
      }
    } else if (ch === "$" && next === "$") {
      const end = src.indexOf("$$", i + 2);
      const body = end < 0 ? (isOpen ? src.slice(i) : "$$") : src.slice(i, end + 2);
      if (body.length > 4) out.push({ tag: "span", cls: "math", children: [body] });
      else plain(body);
      i += body.length;
    } else if (ch === "`") {
      let n = 1;
      while (src[i + n] === "`") n++;
      let end = -1;
      if (!missing.has(n)) {
        for (let at = src.indexOf("`", i + n); at >= 0;) {
          let m = 1;
          while (src[at + m] === "`") m++;
          if (m === n) {
            end = at;
            break;
          }
          at = src.indexOf("`", at + m);
        }
        if (end < 0) missing.add(n);
      }
      if (end < 0 && !isOpen) {
        plain("`".repeat(n));
        i += n;
      } else {
        let body = src.slice(i + n, end < 0 ? src.length : end).replace(/\n/g, " ");
        if (/^ .*[^ ].* $/.test(body)) body = body.slice(1, -1);
        if (body) out.push({ tag: "code", children: [body] });
        i = end < 0 ? src.length : end + n;
      }
    } else if (ch === "*" || ch === "_" || ch === "~") {
      let n = 1;
      while (src[i + n] === ch) n++;
      const side = flanking(ch, src[i - 1], src[i + n]);
      if ((ch === "~" && n !== 2) || !(side.open || side.close)) plain(ch.repeat(n));
      else out.push({ delim: true, ch, count: n, size: n, open: side.open, close: side.close });
      i += n;
    } else if (ch === "[" || (ch === "!" && next === "[")) {
      const mark = ch === "[" ? "[" : "![";
      brackets.push({ at: out.length, isImage: mark.length === 2, from: i });
      out.push({ tag: "span", bracket: true, children: [mark] });
      i += mark.length;
    } else if (ch === "]") {
      const open = brackets.pop();
      const tail = open && next === "(" ? linkTail(src, i + 1) : null;
      if (open && tail === "open" && isOpen) {
        pairEmphasis(out, open.at + 1, false);
        const children = joined(out.splice(open.at).slice(1));
        children.forEach((c) => (typeof c === "string" ? pushText(out, c) : out.push(c)));
        break;
      }
      const href = tail && tail !== "open" ? safeUrl(tail.dest) : null;
      if (href) {
        pairEmphasis(out, open.at + 1, false);
        let children = joined(out.splice(open.at).slice(1)).filter((c) => c.tag !== "a" || c.children.length);
        if (open.isImage) children = ["\u{1F5BC} ", ...(children.length ? children : [href])];
        /* A link holds no link: those inside are opened up, as the outer one is what was written last. */
        children = children.flatMap((c) => (c.tag === "a" ? c.children : [c]));
        out.push({ tag: "a", href, children: joined(children) });
        i = tail.end;
      } else {
        if (open) out[open.at] = open.isImage ? "![" : "[";
        plain("]");
        i++;
      }
    } else if (ch === "<") {
      const auto = /^<((?:https?:\/\/|mailto:)[^\s<>]+)>|^<([\w.+-]+@[\w-]+(?:\.[\w-]+)+)>/i.exec(src.slice(i, i + 2050));
      const br = /^<br\s*\/?>/i.exec(src.slice(i, i + 10));
      const href = auto && safeUrl(auto[1] || "mailto:" + auto[2]);
      if (href) {
        out.push({ tag: "a", href, children: [auto[1] || auto[2]] });
        i += auto[0].length;
      } else if (br) {
        out.push({ tag: "br", children: [] });
        i += br[0].length;
      } else {
        plain("<");
        i++;
      }
    } else if (ch === "&") {
      const entity = /^&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|(\w{2,8}));/.exec(src.slice(i, i + 12));
      const code = entity && (entity[1] ? Number(entity[1]) : entity[2] ? parseInt(entity[2], 16) : 0);
      let value = entity && entity[3] ? ENTITIES[entity[3]] : null;
      if (code) value = code <= 0x10ffff && (code < 0xd800 || code > 0xdfff) ? String.fromCodePoint(code) : "\uFFFD";
      plain(value || "&");
      i += value ? entity[0].length : 1;
    } else if (ch === "h") {
      const before = src[i - 1];
      let url = /^https?:\/\/[^\s<>"'`\u3000-\u303F\uFF00-\uFFEF|]+/.exec(src.slice(i, i + 2050))?.[0];
      if (url) {
        url = url.replace(/[?!.,:;*_~]+$/, "");
        while (url.endsWith(")") && url.split(")").length > url.split("(").length) url = url.slice(0, -1);
      }
      const href = url && !(before && /[\w]/.test(before)) && !brackets.length ? safeUrl(url) : null;
      if (href) {
        out.push({ tag: "a", href, children: [url] });
        i += url.length;
      } else {
        plain("http");
        i += 4;
      }
    } else {
      plain(ch);
      i++;
    }
  }
  for (const open of brackets) out[open.at] = open.isImage ? "![" : "[";
  pairEmphasis(out, 0, isOpen);
  return joined(out);
}

function createNode(v) {
  const el = document.createElement(v.tag);
  if (v.cls) el.className = v.cls;
  if (v.tag === "a") {
    el.target = "_blank";
    el.rel = "noopener noreferrer nofollow";
  }
  return el;
}

function sync(parent, list, first) {
  let dom = first;
  for (const v of list) {
    if (typeof v === "string") {
      if (dom && dom.nodeType === Node.TEXT_NODE) {
        if (dom.data !== v) {
          if (v.startsWith(dom.data)) dom.appendData(v.slice(dom.data.length));
          else dom.data = v;
        }
        dom = dom.nextSibling;
      } else {
        parent.insertBefore(document.createTextNode(v), dom);
      }
      continue;
    }
    let el = dom;
    if (el && el.nodeType === Node.ELEMENT_NODE && el.localName === v.tag && el.className === (v.cls || "")) {
      dom = dom.nextSibling;
    } else {
      el = createNode(v);
      parent.insertBefore(el, dom);
    }
    if (v.tag === "a" && el.getAttribute("href") !== v.href) {
      el.setAttribute("href", v.href);
      el.title = v.href;
    }
    sync(el, v.children, el.firstChild);
  }
  while (dom) {
    const next = dom.nextSibling;
    dom.remove();
    dom = next;
  }
}

/* ---- blocks -------------------------------------------------------------------------------------------------------
 * A stack of open containers (quotes, lists, items) and at most one open leaf inside the innermost: a paragraph, a
 * heading, a fence, indented code, a formula or a table. */

const LIST_MARK = /^([-*+])(?=\s|$)|^(\d{1,9})([.)])(?=\s|$)/;
const RULE = /^(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const FENCE = /^(`{3,})([^`]*)$|^(~{3,})(.*)$/;
const TABLE_RULE = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const UNDECIDED = /^[\s>]*(?:(?:[-*+]|\d{1,9}[.)])\s+)*(?:[-*+_=|:#`~\s]*|\d{1,9}[.)]?\s*|\\|\\\[\s*)$/;
const FENCE_START = /^[\s>]*(?:(?:[-*+]|\d{1,9}[.)])\s+)*(?:`{3,}[^`]*|~{3,}.*|\$\$.*|\\\[.*)$/;

function splitRow(line) {
  const cells = [];
  let cell = "";
  const s = line.trim().replace(/^\|/, "");
  for (let i = 0; i < s.length; i++) {
    if (s[i] === "\\" && s[i + 1] === "|") {
      cell += "|";
      i++;
    } else if (s[i] === "|") {
      cells.push(cell.trim());
      cell = "";
    } else {
      cell += s[i];
    }
  }
  if (cell.trim() || !s.endsWith("|")) cells.push(cell.trim());
  return cells;
}

function indentOf(s) {
  let n = 0;
  for (const ch of s) {
    if (ch === " ") n++;
    else if (ch === "\t") n += 4 - (n % 4);
    else break;
  }
  return n;
}

function dropIndent(s, n) {
  let col = 0;
  let i = 0;
  while (i < s.length && col < n) {
    if (s[i] === " ") col++;
    else if (s[i] === "\t") col += 4 - (col % 4);
    else break;
    i++;
  }
  return " ".repeat(Math.max(0, col - n)) + s.slice(i);
}

function element(tag, cls) {
  const el = document.createElement(tag);
  if (cls) el.className = cls;
  return el;
}

export class MarkdownStream {
  /* Writes into container, which it expects empty and to which nobody else adds. */
  constructor(container) {
    this.stack = [{ type: "root", el: container }];
    this.leaf = null;
    this.held = ""; /* the beginning of a line whose block is not decided */
    this.isMid = false; /* the line's block is decided, the rest is the leaf's text */
    this.hasCr = false;
    this.wasBlank = false;
  }

  append(text) {
    let rest = this.hasCr ? "\r" + text : text;
    this.hasCr = rest.endsWith("\r");
    if (this.hasCr) rest = rest.slice(0, -1);
    rest = rest.replace(/\r\n?/g, "\n").replace(/\0/g, "\uFFFD");
    let at = 0;
    while (at < rest.length) {
      const end = rest.indexOf("\n", at);
      const piece = rest.slice(at, end < 0 ? rest.length : end);
      at = end < 0 ? rest.length : end + 1;
      if (this.isMid) {
        this.addText(piece);
      } else {
        this.held += piece;
        if (end >= 0 || this.isDecided()) {
          const line = this.held;
          this.held = "";
          this.isMid = true;
          this.startLine(line, end >= 0);
        }
      }
      if (end >= 0) {
        this.isMid = false;
        this.endLine();
      }
    }
    this.show(true);
  }

  finish() {
    if (this.held) {
      const line = this.held;
      this.held = "";
      this.startLine(line, true);
      this.endLine();
    }
    this.closeTo(0);
  }

  /* Whether the first characters of a line tell what block it is. */
  isDecided() {
    const s = this.held;
    if (this.leaf && this.leaf.type === "table") return false;
    if (s.length > HELD_MAX) return true;
    if (this.leaf && this.leaf.type === "code") return !/^[\s>]*[`~]*\s*$/.test(s);
    if (this.leaf && this.leaf.type === "math") return false;
    return !UNDECIDED.test(s) && !FENCE_START.test(s);
  }

  top() {
    return this.stack[this.stack.length - 1];
  }

  addBlock(el) {
    const top = this.top();
    if (this.wasBlank && top.type === "item" && top.el.childNodes.length) top.list.classList.add("loose");
    this.wasBlank = false;
    top.el.append(el);
  }

  closeLeaf() {
    const leaf = this.leaf;
    if (!leaf) return;
    if (leaf.type === "code") {
      if (leaf.line !== null) leaf.commit("");
      leaf.el.classList.add("done");
    } else if (leaf.type === "math") {
      leaf.el.textContent = leaf.text;
    } else if (leaf.type !== "table") {
      if (leaf.type === "h") leaf.text = leaf.text.replace(/(^|[ \t]+)#+[ \t]*$/, "");
      leaf.text = leaf.text.replace(/\s+$/, "");
      leaf.isHidden = false;
      this.isDirty = true;
      this.show(false);
    }
    this.leaf = null;
  }

  /* Closes containers until n besides the root are left. */
  closeTo(n) {
    this.closeLeaf();
    this.stack.length = Math.min(this.stack.length, n + 1);
  }

  startLine(line, isWhole) {
    /* 1. Which open containers does the line continue? */
    let s = line;
    let n = 0;
    for (let i = 1; i < this.stack.length; i++) {
      const c = this.stack[i];
      const indent = indentOf(s);
      if (c.type === "quote") {
        if (indent > 3 || s.trimStart()[0] !== ">") break;
        s = s.trimStart().slice(1);
        if (s[0] === " ") s = s.slice(1);
      } else if (c.type === "item") {
        const isNested = indent >= c.mark + 2 && LIST_MARK.test(s.trimStart());
        if (s.trim() === "") s = "";
        else if (indent >= c.content) s = dropIndent(s, c.content);
        else if (isNested) s = s.trimStart();
        else break;
      }
      n = i;
    }
    if (n && this.stack[n].type === "list") n--; /* a list goes on only through an item */
    const isAll = n === this.stack.length - 1;
    let leaf = this.leaf;

    /* 2. Lines of an open fence or formula are its own. */
    if (leaf && isAll && leaf.type === "code" && leaf.fence) {
      const end = new RegExp(`^ {0,3}\\${leaf.fence[0]}{${leaf.fence.length},}\\s*$`);
      if (isWhole && end.test(s)) this.closeLeaf();
      else leaf.begin(dropIndent(s, Math.min(leaf.indent, indentOf(s))));
      return;
    }
    if (leaf && isAll && leaf.type === "math") {
      leaf.text += "\n" + s;
      if (s.trimEnd().endsWith(leaf.end)) this.closeLeaf();
      return;
    }

    /* 3. Blank lines end paragraphs, tables and quotes. */
    if (s.trim() === "" && isWhole) {
      if (leaf && leaf.type === "code" && isAll) {
        leaf.begin(dropIndent(s, 4));
        return;
      }
      const quote = this.stack.findIndex((c, at) => at > n && c.type === "quote");
      if (quote > 0) this.closeTo(quote - 1);
      else this.closeLeaf();
      this.wasBlank = true;
      return;
    }
    if (leaf && leaf.type === "code") {
      if (isAll && indentOf(s) >= 4) {
        leaf.begin(dropIndent(s, 4));
        return;
      }
      this.closeLeaf();
      leaf = null;
    }

    /* 4. New blocks, outermost first. */
    let isLazy = leaf && leaf.type === "p" && !isAll;
    let isNew = false;
    const settle = () => {
      if (!isNew) this.closeTo(n);
      isNew = true;
      isLazy = false;
    };
    for (;;) {
      const indent = indentOf(s);
      const t = s.trimStart();
      const inParagraph = !isNew && leaf && leaf.type === "p" && isAll;
      const isDeep = this.stack.length > DEPTH_MAX;
      const top = isNew ? this.top() : this.stack[n];
      if (indent >= 4 && !inParagraph && !isLazy && top.type !== "item" && top.type !== "list") {
        settle();
        this.openCode("", "", 0);
        this.leaf.begin(dropIndent(s, 4));
        return;
      }
      if (t[0] === ">" && !isDeep) {
        settle();
        const el = element("blockquote");
        this.addBlock(el);
        this.stack.push({ type: "quote", el });
        s = t.slice(1);
        if (s[0] === " ") s = s.slice(1);
        if (s.trim() === "") return;
        continue;
      }
      const heading = /^(#{1,6})(?:[ \t]+|$)/.exec(t);
      if (heading) {
        settle();
        const el = element("h" + Math.min(6, heading[1].length + 2), "md-h" + heading[1].length);
        this.addBlock(el);
        this.leaf = { type: "h", el, text: "", lines: 1 };
        this.addText(t.slice(heading[0].length));
        return;
      }
      const fence = isWhole ? FENCE.exec(t) : null;
      if (fence) {
        settle();
        this.openCode(fence[1] || fence[3], (fence[2] || fence[4] || "").trim(), indent);
        return;
      }
      const formula = isWhole ? /^(\\\[|\$\$)(.*)$/.exec(t) : null;
      if (formula && !inParagraph) {
        const end = formula[1] === "$$" ? "$$" : "\\]";
        const isClosed = formula[2].trimEnd().endsWith(end);
        if (isClosed || !formula[2].includes(end)) {
          settle();
          const el = element("div", "math block");
          el.dir = "ltr";
          this.addBlock(el);
          this.leaf = { type: "math", el, text: t, end, lines: 1 };
          if (isClosed) this.closeLeaf();
          return;
        }
      }
      if (isWhole && RULE.test(t) && !(inParagraph && leaf.lines === 1 && TABLE_RULE.test(t) && leaf.text.includes("|"))) {
        settle();
        this.addBlock(element("hr"));
        return;
      }
      const mark = LIST_MARK.exec(t);
      const body = mark ? t.slice(mark[0].length) : "";
      if (mark && !isDeep && !(inParagraph && ((mark[2] && mark[2] !== "1") || body.trim() === ""))) {
        /* An item that stands where its list's other items stand goes on with that list. */
        const kind = mark[1] || mark[3];
        let list = null;
        if (!isNew && this.stack[n + 1] && this.stack[n + 1].type === "list" && this.stack[n + 1].kind === kind) {
          list = this.stack[n + 1];
          this.closeTo(n + 1);
          if (this.wasBlank) list.el.classList.add("loose");
          isNew = true;
          isLazy = false;
        } else {
          settle();
          const el = element(mark[1] ? "ul" : "ol");
          if (mark[2] && mark[2] !== "1") el.start = Number(mark[2]);
          this.addBlock(el);
          list = { type: "list", el, kind };
          this.stack.push(list);
        }
        this.wasBlank = false;
        const item = element("li");
        list.el.append(item);
        const pad = indentOf(body);
        const used = body.trim() === "" || pad > 4 ? 1 : pad;
        this.stack.push({ type: "item", el: item, list: list.el, mark: indent,
          content: indent + mark[0].length + used });
        s = dropIndent(body, used);
        if (s.trim() === "") return;
        continue;
      }
      break;
    }

    /* 5. Text: another line of the open paragraph, a row of the open table, or a new paragraph. */
    if (leaf && !isNew && (isAll || isLazy)) {
      if (leaf.type === "p" && isAll && leaf.lines === 1 && isWhole && TABLE_RULE.test(s.trim()) && this.openTable(s)) return;
      if (leaf.type === "table") {
        this.addRow(s);
        return;
      }
      if (leaf.type === "p") {
        leaf.isHidden = false;
        leaf.lines++;
        this.addText("\n" + s.trimStart());
        return;
      }
    }
    if (!isNew) this.closeTo(n);
    const el = element("p");
    this.addBlock(el);
    const text = s.trimStart();
    this.leaf = { type: "p", el, text: "", lines: 1, isHidden: text[0] === "|", isFirst: this.top().type === "item" };
    this.addText(text);
  }

  endLine() {
    if (!this.leaf) return;
    if (this.leaf.type === "h") this.closeLeaf();
    else if (this.leaf.type === "code") this.leaf.commit("\n");
  }

  addText(text) {
    const leaf = this.leaf;
    if (!leaf || !text) return;
    if (leaf.type === "code") {
      leaf.push(text);
      return;
    }
    leaf.text += text;
    this.isDirty = true;
    /* Where the cut is depends on the text alone, not on the pieces that it came in. */
    while (leaf.text.length > OPEN_MAX && leaf.type !== "math" && leaf.type !== "table") {
      const space = leaf.text.lastIndexOf(" ", OPEN_MAX);
      const cut = space > OPEN_MAX / 2 ? space : OPEN_MAX;
      sync(leaf.el, parseInline(leaf.text.slice(0, cut), false), leaf.mark ? leaf.mark.nextSibling : leaf.el.firstChild);
      leaf.mark = element("wbr");
      leaf.el.append(leaf.mark);
      leaf.text = leaf.text.slice(cut);
    }
  }

  /* Brings the open paragraph or heading to what is known of it. */
  show(isOpen) {
    const leaf = this.leaf;
    if (!leaf || !this.isDirty || leaf.isHidden || (leaf.type !== "p" && leaf.type !== "h")) return;
    this.isDirty = false;
    let text = leaf.text;
    if (!leaf.isDirected) {
      const rtl = isRtl(text);
      leaf.isDirected = rtl !== null;
      if (rtl) leaf.el.dir = "rtl";
      /* Marks of a list and bars of a quote stand on the side where their first line begins. */
      for (const c of rtl === null ? [] : this.stack.slice(1)) {
        if (rtl && !c.isDirected) c.el.dir = "rtl";
        c.isDirected = true;
      }
    }
    if (isOpen && leaf.isFirst && /^\[[ xX]?\]?$/.test(text)) return; /* half a box of a task */
    const task = leaf.isFirst ? /^\[([ xX])\](?:\s|$)/.exec(text) : null;
    if (task) {
      text = text.slice(task[0].length);
      if (!leaf.mark) {
        const box = element("input");
        box.type = "checkbox";
        box.disabled = true;
        box.checked = task[1] !== " ";
        box.setAttribute("aria-label", box.checked ? "done" : "to do");
        leaf.el.replaceChildren(box);
        leaf.mark = box;
      }
    }
    sync(leaf.el, parseInline(text, isOpen), leaf.mark ? leaf.mark.nextSibling : leaf.el.firstChild);
  }

  openCode(fence, info, indent) {
    const language = info.split(/[\s{,]/)[0].slice(0, 40);
    const box = element("div", "code-block");
    const head = element("div", "code-head");
    const name = element("span");
    name.textContent = language || "code";
    const pre = element("pre");
    pre.dir = "ltr";
    pre.tabIndex = 0;
    pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
    const code = element("code");
    pre.append(code);
    head.append(name, copyButton(() => code.textContent.replace(/\n$/, ""), "Copy code"));
    box.append(head, pre);
    this.addBlock(box);
    const painter = new Highlighter(language);
    this.leaf = {
      type: "code", el: box, fence, indent, lines: 1, line: null, node: null,
      begin(s) {
        this.line = s;
        this.node = document.createTextNode(s);
        code.append(this.node);
      },
      push(s) {
        if (this.line === null) this.begin(s);
        else {
          this.line += s;
          this.node.appendData(s);
        }
      },
      /* Colours come when a line is complete: each is read once. */
      commit(end) {
        if (this.line === null) return;
        const parts = painter.line(this.line);
        if (parts) {
          const nodes = parts.map(([cls, s]) => {
            if (!cls) return document.createTextNode(s);
            const span = element("span", "hl-" + cls);
            span.textContent = s;
            return span;
          });
          this.node.replaceWith(...nodes, document.createTextNode(end));
        } else {
          this.node.appendData(end);
        }
        this.line = null;
      },
    };
  }

  openTable(rule) {
    const leaf = this.leaf;
    const head = splitRow(leaf.text);
    const aligns = splitRow(rule).map((c) => (c.endsWith(":") ? (c[0] === ":" ? "center" : "end") : ""));
    if (head.length !== aligns.length || !leaf.text.includes("|") || leaf.mark) return false;
    const box = element("div", "table-box");
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", "Table");
    const table = element("table");
    const row = element("tr");
    head.forEach((cell, i) => row.append(this.cell("th", cell, aligns[i])));
    const top = element("thead");
    top.append(row);
    const body = element("tbody");
    table.append(top, body);
    box.append(table);
    leaf.el.replaceWith(box);
    this.leaf = { type: "table", el: box, body, aligns, lines: 2, text: "" };
    return true;
  }

  cell(tag, text, align) {
    const el = element(tag, align ? "align-" + align : "");
    if (isRtl(text)) el.dir = "rtl";
    sync(el, parseInline(text.slice(0, OPEN_MAX), false), null);
    if (text.length > OPEN_MAX) el.append(text.slice(OPEN_MAX));
    if (tag === "th") el.scope = "col";
    return el;
  }

  addRow(line) {
    const { aligns, body } = this.leaf;
    const cells = splitRow(line);
    const row = element("tr");
    aligns.forEach((align, i) => row.append(this.cell("td", cells[i] || "", align)));
    body.append(row);
  }
}

/* A whole text at once. */
export function renderMarkdown(container, text) {
  const stream = new MarkdownStream(container);
  stream.append(text);
  stream.finish();
}
