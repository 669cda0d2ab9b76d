/* The settings of a conversation: what they are, the panel that edits them, and the fields of a request that they make.
 *
 * Values are kept as they were typed; an empty one is left to the server. */
import { apiKey, h, iconButton } from "./common.js";

export const EFFORTS = [["", "Thinking: default"], ["none", "Thinking: off"], ["low", "Thinking: low"],
  ["high", "Thinking: high"], ["max", "Thinking: max"], ["number", "Thinking: by number"]];

/* name, label, least, most, whole number, hint. */
const NUMBERS = [
  ["temperature", "Temperature", 0, 100, false, "0 takes the likeliest token"],
  ["max_tokens", "Longest answer", 1, 1e9, true, "tokens"],
  ["top_p", "Top p", 0, 1, false, "above 0, at most 1"],
  ["top_k", "Top k", -1, 1e9, true, "0 is off"],
  ["min_p", "Min p", 0, 1, false, "share of the likeliest"],
  ["seed", "Seed", -Number.MAX_SAFE_INTEGER, Number.MAX_SAFE_INTEGER, true, "same seed, same answer"],
  ["presence_penalty", "Presence penalty", -2, 2, false, "-2 to 2"],
  ["frequency_penalty", "Frequency penalty", -2, 2, false, "-2 to 2"],
  ["repetition_penalty", "Repetition penalty", 0, 100, false, "1 is off"],
];
const ABOVE_LEAST = ["top_p", "repetition_penalty"];

export const NO_SETTINGS = { system: "", effort: "", effort_number: "", stop: "", is_schema: false, schema: "",
  ...Object.fromEntries(NUMBERS.map(([name]) => [name, ""])) };

/* Settings from storage or an import: known names, texts and flags alone. */
export function cleanSettings(from) {
  const out = { ...NO_SETTINGS };
  for (const name of Object.keys(out)) {
    if (from && typeof from[name] === typeof out[name]) out[name] = from[name];
  }
  if (!EFFORTS.some(([value]) => value === out.effort)) out.effort = "";
  return out;
}

function readNumber(text, least, most, isWhole, isAbove) {
  const value = Number(text.trim().replace(",", "."));
  if (!Number.isFinite(value)) return { wrong: "not a number" };
  if (isWhole && !Number.isInteger(value)) return { wrong: "a whole number is needed" };
  if (value < least || (isAbove && value === least)) return { wrong: isAbove ? `more than ${least} is needed` : `at least ${least}` };
  if (value > most) return { wrong: `at most ${most}` };
  return { value };
}

/* The schema of the text: {value}, or {wrong} with what is the matter and where. */
export function readSchema(text) {
  if (!text.trim()) return { wrong: "the schema is empty" };
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    const at = /position (\d+)/.exec(error.message);
    let where = "";
    if (at) {
      const before = text.slice(0, Number(at[1])).split("\n");
      where = `line ${before.length}, column ${before[before.length - 1].length + 1}: `;
    }
    return { wrong: "not valid JSON: " + where + error.message.replace(/ in JSON at position.*/, "") };
  }
  if (typeof value !== "boolean" && (value === null || typeof value !== "object" || Array.isArray(value))) {
    return { wrong: "a schema is a JSON object" };
  }
  return { value };
}

/* {params, wrong}: fields for the request, and messages by the name of the setting. */
export function readParams(settings) {
  const params = {};
  const wrong = {};
  for (const [name, , least, most, isWhole] of NUMBERS) {
    if (!settings[name].trim()) continue;
    const read = readNumber(settings[name], least, most, isWhole, ABOVE_LEAST.includes(name));
    if (read.wrong) wrong[name] = read.wrong;
    else params[name] = read.value;
  }
  if (settings.effort === "number") {
    const read = readNumber(settings.effort_number || "x", 1, 100, true, false);
    if (read.wrong) wrong.effort_number = "a whole number from 1 to 100";
    else params.reasoning_effort = read.value;
  } else if (settings.effort) {
    params.reasoning_effort = settings.effort;
  }
  const stops = settings.stop.split("\n").filter((s) => s).map((s) => s.replace(/\\n/g, "\n").replace(/\\t/g, "\t"));
  if (stops.length) params.stop = stops;
  if (settings.is_schema) {
    const read = readSchema(settings.schema);
    if (read.wrong) wrong.schema = read.wrong;
    else params.response_format = { type: "json_schema", json_schema: { name: "answer", schema: read.value, strict: true } };
  }
  return { params, wrong };
}

export class SettingsPanel extends EventTarget {
  /* Fills el. Events: change (detail: the settings), key, close, defaults. */
  constructor(el) {
    super();
    this.el = el;
    this.fields = new Map();
    this.settings = { ...NO_SETTINGS };
    const system = this.field("system", "System prompt", h("textarea", { rows: 4, dir: "auto", placeholder: "Who the model is, and how it answers" }), "");
    const effort = this.field("effort", "Effort", h("select", {}, EFFORTS.map(([value, text]) =>
      h("option", { value }, text.replace("Thinking: ", "").replace(/^./, (c) => c.toUpperCase())))), "");
    const effortNumber = this.field("effort_number", "Number", this.numberInput(), "1 to 100");
    const numbers = NUMBERS.map(([name, label, , , , hint]) => this.field(name, label, this.numberInput(), hint));
    const stop = this.field("stop", "Stop strings", h("textarea", { rows: 2, spellcheck: false, dir: "auto" }), "One a line; \\n is a line feed");
    const isSchema = h("input", { type: "checkbox", id: "set-is_schema" });
    this.fields.set("is_schema", { input: isSchema });
    isSchema.addEventListener("change", () => this.changed("is_schema"));
    const schema = this.field("schema", "Schema", h("textarea", { rows: 7, class: "mono", spellcheck: false,
      placeholder: '{"type": "object", "properties": {"name": {"type": "string"}}}' }), "");
    const keyInput = h("input", { type: "password", id: "set-key", autocomplete: "off", spellcheck: false, value: apiKey.get() });
    const remember = h("input", { type: "checkbox", id: "set-remember", checked: apiKey.isRemembered() });
    const setKey = () => {
      apiKey.set(keyInput.value.trim(), remember.checked);
      this.dispatchEvent(new Event("key"));
    };
    keyInput.addEventListener("change", setKey);
    remember.addEventListener("change", setKey);
    this.keyInput = keyInput;
    const tell = (name) => () => this.dispatchEvent(new Event(name));
    el.replaceChildren(
      h("header", {}, h("h2", {}, "Settings"), iconButton("close", "Close settings", tell("close"))),
      h("p", { class: "field hint" }, h("span", { class: "hint" }, "Of this conversation. What is empty is the server's choice.")),
      h("fieldset", {}, h("legend", {}, "Instructions"), system),
      h("fieldset", {}, h("legend", {}, "Thinking"), effort, effortNumber),
      h("fieldset", {}, h("legend", {}, "Sampling"), numbers, stop),
      h("fieldset", {}, h("legend", {}, "Structured answer"),
        h("label", { class: "check field wide" }, isSchema, "Answers follow a JSON schema"), schema),
      h("div", { class: "field row" }, h("button", { type: "button", class: "button", onclick: tell("defaults") }, "Use for new conversations"),
        h("button", { type: "button", class: "button", onclick: () => this.reset() }, "Reset")),
      h("form", { onsubmit: (e) => e.preventDefault() }, h("fieldset", {}, h("legend", {}, "This server"),
        h("div", { class: "field wide" }, h("label", { htmlFor: "set-key" }, "API key"), keyInput,
          h("span", { class: "hint" }, "Needed if the server was started with keys. It is kept until this tab is closed.")),
        h("label", { class: "check field wide" }, remember, "Remember it in this browser"))));
    this.fields.get("system").box.classList.add("wide");
    for (const name of ["stop", "schema"]) this.fields.get(name).box.classList.add("wide");
    this.load(this.settings);
  }

  numberInput() {
    return h("input", { type: "text", inputMode: "decimal", autocomplete: "off", spellcheck: false, placeholder: "default" });
  }

  field(name, label, input, hint) {
    input.id = "set-" + name;
    const wrong = h("span", { class: "wrong", id: `wrong-${name}`, hidden: true });
    const note = h("span", { class: "hint", id: `hint-${name}` }, hint);
    input.setAttribute("aria-describedby", `hint-${name} wrong-${name}`);
    const box = h("div", { class: "field" }, h("label", { htmlFor: input.id }, label), input, hint ? note : null, wrong);
    this.fields.set(name, { input, wrong, box });
    input.addEventListener(input.localName === "select" ? "change" : "input", () => this.changed(name));
    return box;
  }

  changed(name) {
    const { input } = this.fields.get(name);
    this.settings = { ...this.settings, [name]: input.type === "checkbox" ? input.checked : input.value };
    this.check();
    this.dispatchEvent(new CustomEvent("change", { detail: this.settings }));
  }

  load(settings) {
    this.settings = settings;
    for (const [name, { input }] of this.fields) {
      if (input.type === "checkbox") input.checked = settings[name];
      else if (input.value !== settings[name]) input.value = settings[name];
    }
    this.check();
  }

  reset() {
    this.load({ ...NO_SETTINGS });
    this.dispatchEvent(new CustomEvent("change", { detail: this.settings }));
  }

  check() {
    const { wrong } = readParams(this.settings);
    this.fields.get("effort_number").box.hidden = this.settings.effort !== "number";
    this.fields.get("schema").box.hidden = !this.settings.is_schema;
    for (const [name, field] of this.fields) if (field.wrong) this.mark(name, wrong[name] || "");
  }

  mark(name, message) {
    const { input, wrong } = this.fields.get(name);
    wrong.hidden = !message;
    wrong.textContent = message;
    if (message) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  }

  /* Shows what the server refused, if it is one of ours: true then. */
  refuse(param, message) {
    const name = { response_format: "schema", reasoning_effort: this.settings.effort === "number" ? "effort_number" : "effort",
      max_completion_tokens: "max_tokens" }[param] || param;
    if (!this.fields.get(name)?.wrong || this.fields.get(name).box.hidden) return false;
    this.mark(name, message);
    return true;
  }

  focus(name) {
    const input = name === "key" ? this.keyInput : this.fields.get(name)?.input;
    input?.focus();
    input?.scrollIntoView({ block: "center" });
  }
}
