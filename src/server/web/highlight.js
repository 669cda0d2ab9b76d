/* Colours for code, one line at a time.
 *
 * A language is a list of rules: a class and an expression that is tried at the place reached. A rule with an end opens
 * a span that may go over lines; what is open at the end of a line is all the state there is. Reserved words are one
 * list for all languages of a family: a word that another language reserves does little harm. What is not known here
 * stays plain. */

const WORDS = `abstract and as assert async auto await begin bool boolean break byte case catch chan char class concept const
  constexpr continue crate debugger declare def default defer del delete do double dyn elif else elsif end enum except explicit
  export extends extern fallthrough false False final finally float fn for foreach friend from fun func function get global go
  goto if impl implements import in inline instanceof int int8_t int16_t int32_t int64_t interface internal is lambda let local
  long loop map match mod module move mut mutable namespace native new next nil noexcept None nonlocal not null NULL nullptr
  object of operator or out override package pass priv private protected pub public raise readonly ref register repeat rescue
  restrict return Self self sealed set short signed size_t sizeof static str string String struct super switch template then this
  throw throws trait true True try type typedef typename typeof u8 u16 u32 u64 i8 i16 i32 i64 f32 f64 usize uint8_t uint16_t
  uint32_t uint64_t undefined union unless unsafe unsigned until use using val var virtual void volatile when where while with
  yield`;
const SHELL = `if then else elif fi for while until do done case esac in function return local export readonly set unset shift
  exit break continue trap source eval exec`;
const SQL = `select from where insert into values update set delete create table drop alter index view join left right inner outer
  full cross on as and or not null is in exists between like group by order having limit offset union all distinct case when then
  else end primary key foreign references default unique check with recursive returning begin commit rollback asc desc int
  integer text varchar real boolean date timestamp`;
const words = (list, flags = "y") => ["word", new RegExp(`(?:${list.trim().replace(/\s+/g, "|")})(?![\\w$])`, flags)];

const NUMBER = ["number", /(?:0[xX][\da-fA-F_]+|0[bB][01_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?)[a-zA-Z]{0,3}(?!\w)/y];
const DOUBLE = ["string", /[rbfuLR]{0,2}"(?:\\.|[^"\\])*"?/y];
const SINGLE = ["string", /[rbfu]{0,2}'(?:\\.|[^'\\])*'?/y];
const TICKS = ["string", /`/y, /(?<!\\)`/g];
const BLOCK = ["comment", /\/\*/y, /\*\//g];
const SLASHES = ["comment", /\/\/.*/y];
const HASH = ["comment", /(?<![\w$\\{])#.*/y];
const CALL = ["call", /[A-Za-z_$][\w$]*(?=\()/y];
const REST = [NUMBER, words(WORDS), CALL];

const CURLY = [BLOCK, SLASHES, ["name", /#\s*\w+|@\w+/y], TICKS, DOUBLE, SINGLE, ...REST];
const LANGUAGES = {
  "c h cpp c++ cc hpp cuda cu js javascript jsx ts typescript tsx mjs java kotlin kt cs c# csharp swift go golang scala dart php": CURLY,
  "rust rs": [BLOCK, SLASHES, ["name", /#!?\[.*?\]|\w+!(?=[([{])/y], DOUBLE, ["string", /'(?:\\.|[^'\\])'/y], ["name", /'\w+/y], ...REST],
  "python py python3 ruby rb": [HASH, ["string", /[rbfuRBFU]{0,2}"""/y, /"""/g], ["string", /[rbfuRBFU]{0,2}'''/y, /'''/g],
    DOUBLE, SINGLE, ["name", /@[\w.]+/y], ...REST],
  "lua": [["comment", /--\[\[/y, /\]\]/g], ["comment", /--.*/y], DOUBLE, SINGLE, ...REST],
  "sh bash shell zsh console dockerfile makefile make cmake": [HASH, DOUBLE, ["string", /'[^']*'?/y],
    ["name", /\$[{(][^})]*[})]?|\$[\w@#?*!$-]+/y], ["number", /(?<=\s)--?[\w-]+/y], words(SHELL)],
  "json jsonc jsonl json5": [["name", /"(?:\\.|[^"\\])*"(?=\s*:)/y], SLASHES, DOUBLE, NUMBER, words("true false null")],
  "yaml yml toml ini conf": [["comment", /(?<!\S)[#;].*/y], ["name", /^\s*\[.*?\]|[\w./-]+(?=\s*=|:(?:\s|$))/y], DOUBLE, SINGLE, NUMBER,
    words("true false null yes no on off")],
  "sql postgresql mysql sqlite": [["comment", /--.*/y], BLOCK, ["string", /'(?:''|[^'])*'?/y], DOUBLE, NUMBER, words(SQL, "iy")],
  "css scss less": [BLOCK, DOUBLE, SINGLE, ["name", /[.#@]?[A-Za-z_][\w-]*(?=[^;{}]*\{)|@[\w-]+/y], ["word", /[\w-]+(?=\s*:)/y],
    ["number", /#[\da-fA-F]{3,8}\b|-?\d+(?:\.\d+)?(?:[a-z]+|%)?/y]],
  "html xml svg vue": [["comment", /<!--/y, /-->/g], ["name", /<\/?[\w:-]+|\/?>/y], ["string", /(?<==)"[^"]*"?|(?<==)'[^']*'?/y],
    ["word", /[\w:@.-]+(?==)/y], ["number", /&#?\w+;/y]],
  "diff patch": [["name", /^(?:@@.*|diff .*|index .*|\+\+\+.*|---.*)/y], ["add", /^\+.*/y], ["del", /^-.*/y]],
};
const BY_NAME = new Map(Object.entries(LANGUAGES).flatMap(([names, rules]) => names.split(" ").map((name) => [name, rules])));

export class Highlighter {
  constructor(language) {
    this.rules = BY_NAME.get(language.toLowerCase());
    this.open = null; /* the rule whose end has not come */
  }

  /* The line as [class or "", text] pairs, or null where there is nothing to colour. */
  line(text) {
    if (!this.rules || text.length > 2000) return null;
    const out = [];
    let plain = 0;
    let at = 0;
    const take = (cls, end) => {
      if (at > plain) out.push(["", text.slice(plain, at)]);
      if (end > at) out.push([cls, text.slice(at, end)]);
      at = end;
      plain = end;
    };
    const runOn = (rule, from) => {
      rule[2].lastIndex = from;
      const end = rule[2].exec(text);
      this.open = end ? null : rule;
      take(rule[0], end ? rule[2].lastIndex : text.length);
    };
    if (this.open) runOn(this.open, 0);
    while (at < text.length) {
      const isInWord = at > 0 && /[\w$]/.test(text[at - 1]) && /[\w$]/.test(text[at]);
      let rule = null;
      let match = null;
      for (const r of isInWord ? [] : this.rules) {
        r[1].lastIndex = at;
        match = r[1].exec(text);
        rule = r;
        if (match && match[0]) break;
        match = null;
      }
      if (!match) at++;
      else if (rule[2]) runOn(rule, at + match[0].length);
      else take(rule[0], at + match[0].length);
    }
    if (at > plain) out.push(["", text.slice(plain)]);
    return out;
  }
}
