/* How one message looks: a question, or an answer that may be under way. Views show what a message holds; what buttons do
 * is the page's. */
import { copyButton, formatCount, formatPercent, formatSeconds, formatTokens, h, icon, iconButton } from "./common.js";
import { MarkdownStream, renderMarkdown } from "./markdown.js";

/* Figures of an answer, as [short text, name, value] for those that are known. */
export function facts(m) {
  const usage = m.usage || {};
  const details = usage.completion_tokens_details || {};
  const timing = m.timing || {};
  const rows = [];
  if (usage.completion_tokens) {
    const n = formatTokens(usage.completion_tokens);
    rows.push([n, "Answer", n]);
  }
  if (timing.tokens_per_s) rows.push([`${timing.tokens_per_s.toFixed(1)} tokens/s`, "Speed", `${timing.tokens_per_s.toFixed(1)} tokens/s`]);
  const drafts = (details.accepted_prediction_tokens || 0) + (details.rejected_prediction_tokens || 0);
  if (drafts) {
    const share = formatPercent(details.accepted_prediction_tokens / drafts);
    rows.push([`${share} of drafts accepted`, "Drafts accepted", `${share} of ${formatCount(drafts)}`]);
  }
  if (m.finish === "length") rows.push(["stopped at the length limit", "Ended by", "the length limit"]);
  if (m.state === "stopped") rows.push(["stopped", "Ended by", "you"]);
  if (details.reasoning_tokens) rows.push([null, "Thinking", formatTokens(details.reasoning_tokens)]);
  if (timing.first_s) rows.push([null, "First token", `after ${formatSeconds(timing.first_s)}`]);
  if (timing.total_s) rows.push([null, "Whole answer", `after ${formatSeconds(timing.total_s)}`]);
  if (usage.prompt_tokens) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    rows.push([null, "Prompt", `${formatCount(usage.prompt_tokens)} tokens${cached ? `, ${formatCount(cached)} of them cached` : ""}`]);
  }
  if (Number.isFinite(m.seed)) rows.push([null, "Seed", String(m.seed)]);
  if (m.model) rows.push([null, "Model", m.model]);
  if (m.created) rows.push([null, "Time", new Date(m.created).toLocaleString()]);
  return rows;
}

function branchNav(place, on) {
  if (place.count < 2) return null;
  const button = (name, label, step) => iconButton(name, label, () => on.select(step), {
    "data-action": name, disabled: place.index + step < 0 || place.index + step >= place.count });
  return h("span", { class: "branches", role: "group", "aria-label": "Versions" }, button("left", "Previous version", -1),
    h("span", { "aria-label": `Version ${place.index + 1} of ${place.count}` }, `${place.index + 1} / ${place.count}`),
    button("right", "Next version", 1));
}

function action(name, label, f) {
  return iconButton(name, label, f, { "data-action": name });
}

/* A text area in the place of the text; resolves nothing, but calls save(text) or cancel(). */
function editor(text, label, saveLabel, save, cancel) {
  const area = h("textarea", { value: text, dir: "auto", "aria-label": label });
  const fit = () => {
    area.style.height = "auto";
    area.style.height = Math.min(area.scrollHeight + 2, innerHeight * 0.6) + "px";
  };
  area.addEventListener("input", fit);
  area.addEventListener("keydown", (e) => {
    if (e.isComposing || e.keyCode === 229) return;
    if (e.key === "Escape") {
      e.preventDefault();
      e.stopPropagation();
      cancel();
    } else if (e.key === "Enter" && (e.ctrlKey || e.metaKey || (!e.shiftKey && saveLabel === "Send"))) {
      e.preventDefault();
      if (area.value.trim()) save(area.value);
    }
  });
  setTimeout(() => {
    fit();
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  });
  return h("div", { class: "edit-box" }, area, h("div", { class: "row-end" },
    h("button", { type: "button", class: "button", onclick: cancel }, "Cancel"),
    h("button", { type: "button", class: "button primary", onclick: () => area.value.trim() && save(area.value) }, saveLabel)));
}

export class QuestionView {
  constructor(message, place, on) {
    this.message = message;
    this.on = on;
    this.text = h("div", { class: "text", dir: "auto" }, message.content);
    this.actions = h("div", { class: "actions" },
      h("span", { class: "buttons" }, copyButton(() => message.content, "Copy message"),
        action("edit", "Edit and send again", () => this.edit()), action("trash", "Delete from here on", () => on.remove())),
      branchNav(place, on));
    this.el = h("article", { class: "message user", "aria-label": "You" }, this.text, this.actions);
  }

  edit() {
    if (this.el.classList.contains("is-editing")) return;
    const end = () => {
      this.el.classList.remove("is-editing");
      box.replaceWith(this.text, this.actions);
      this.actions.querySelector("[data-action=edit]").focus();
    };
    const box = editor(this.message.content, "Edit message", "Send", (text) => this.on.edit(text), end);
    this.el.classList.add("is-editing");
    this.text.replaceWith(box);
    this.actions.remove();
  }

  setLast() {}
  update() {}
}

export class AnswerView {
  /* run is what is known of an answer under way, or null. */
  constructor(message, place, on, run) {
    this.message = message;
    this.on = on;
    this.place = place;
    this.fed = 0;
    this.fedThinking = 0;
    this.stream = null;
    this.thinkingStream = null;
    this.isEditing = false;
    this.figures = h("span", { class: "figures" });
    this.preview = h("span", { class: "preview", "aria-hidden": "true" });
    this.thinkingBody = h("div", { class: "body md" });
    this.thinking = h("details", { class: "thinking", hidden: true },
      h("summary", {}, icon("right"), this.figures, this.preview), this.thinkingBody);
    this.thinking.addEventListener("toggle", () => this.showThinking());
    this.body = h("div", { class: "md" });
    this.waitText = h("span");
    this.wait = h("div", { class: "waiting", hidden: true }, h("span", { class: "dots", "aria-hidden": "true" }, h("i"), h("i"), h("i")), this.waitText);
    this.trouble = h("div", { class: "trouble", hidden: true });
    this.actions = h("div", { class: "actions" });
    this.el = h("article", { class: "message answer", "aria-label": "Answer" }, this.thinking, this.body, this.wait, this.trouble, this.actions);
    this.update(run);
  }

  setLast(isLast) {
    this.el.classList.toggle("is-last", isLast);
  }

  showThinking() {
    const m = this.message;
    if (!this.thinking.open) return;
    if (!this.thinkingStream) {
      this.thinkingBody.replaceChildren();
      this.thinkingStream = new MarkdownStream(this.thinkingBody);
      this.fedThinking = 0;
    }
    if (m.reasoning.length > this.fedThinking) this.thinkingStream.append(m.reasoning.slice(this.fedThinking));
    this.fedThinking = m.reasoning.length;
  }

  /* Brings the view to the message; while it is under way, only what is new is looked at. */
  update(run) {
    const m = this.message;
    const isThinking = !!run && !m.content && !!m.reasoning;
    this.el.setAttribute("aria-busy", String(!!run));
    this.thinking.hidden = !m.reasoning;
    if (m.reasoning) {
      const seconds = run?.thinkingSeconds() || m.timing?.thinking_s;
      const tokens = run?.thinkingTokens || m.timing?.thinking_tokens;
      this.figures.textContent = [isThinking ? "Thinking" : "Thought", seconds ? formatSeconds(seconds) : "",
        tokens ? formatTokens(tokens) : ""].filter(Boolean).join(" \u00B7 ");
      this.preview.textContent = isThinking && !this.thinking.open ? m.reasoning.slice(-160).replace(/\s+/g, " ").trim().slice(-90) : "";
      this.showThinking();
    }
    if (!this.isEditing) this.feed(!!run);
    this.wait.hidden = !run || !!m.content || (!!m.reasoning && !run.waitUntil);
    if (!this.wait.hidden) this.waitText.textContent = run.waitingText();
    this.showTrouble(run);
    if (!run || !this.actions.childElementCount) this.showActions(run);
  }

  feed(isOpen) {
    const m = this.message;
    const isJson = m.format === "json";
    if (!isOpen && isJson && m.content) {
      let text = m.content;
      try {
        text = JSON.stringify(JSON.parse(text), null, 2);
      } catch {
        /* Cut off: shown as it came. */
      }
      this.body.replaceChildren();
      renderMarkdown(this.body, "```json\n" + text + "\n```");
      return;
    }
    if (!this.stream) {
      this.stream = new MarkdownStream(this.body);
      if (isJson) this.stream.append("```json\n");
    }
    if (m.content.length > this.fed) this.stream.append(m.content.slice(this.fed));
    this.fed = m.content.length;
    if (!isOpen) {
      this.stream.finish();
      this.thinkingStream?.finish();
    }
  }

  showTrouble(run) {
    const m = this.message;
    const on = this.on;
    const say = (isMild, text, ...buttons) => {
      const key = text + buttons.length;
      if (this.troubleKey === key) return;
      this.troubleKey = key;
      this.trouble.className = isMild ? "trouble mild" : "trouble";
      this.trouble.replaceChildren(h("span", { class: "what" }, text), ...buttons.filter(Boolean));
      this.trouble.hidden = false;
    };
    const button = (text, f, name) => h("button", { type: "button", class: "link-button", onclick: f, "data-action": name }, text);
    if (run?.waitUntil) {
      const left = Math.max(0, Math.ceil((run.waitUntil - performance.now()) / 1000));
      const why = run.waitReason;
      say(true, `${why} Next attempt in ${left} s.`, button("Try now", () => run.retryNow(), "now"), button("Cancel", () => on.stop(), "cancel"));
    } else if (run) {
      this.trouble.hidden = true;
      this.troubleKey = "";
    } else if (m.state === "error" && m.error) {
      const has = m.content || m.reasoning;
      say(false, has ? `${m.error.message} What had come is kept.` : m.error.message,
        m.error.kind === "key" ? button("Enter the API key", on.key, "key") : null,
        has ? button("Continue", on.onward, "onward") : null, button(has ? "From the beginning" : "Try again", on.again, "again"));
    } else if (m.state === "interrupted") {
      say(true, "The page was closed while this was written. What had come is kept.", button("Continue", on.onward, "onward"));
    } else if (m.state === "streaming") {
      say(true, "This answer is being written in another tab.");
    } else {
      this.trouble.hidden = true;
      this.troubleKey = "";
    }
  }

  showActions(run) {
    const m = this.message;
    const on = this.on;
    if (run) {
      this.actions.replaceChildren(...[branchNav(this.place, on)].filter(Boolean));
      return;
    }
    const rows = facts(m);
    const list = h("dl", { class: "keys", hidden: true }, rows.flatMap(([, name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
    const short = rows.map((r) => r[0]).filter(Boolean).join(" \u00B7 ") || "Details";
    const more = h("button", { type: "button", class: "link-button facts-button", "aria-expanded": "false", "data-action": "facts",
      "aria-label": `Figures: ${short}`, onclick: () => {
        list.hidden = !list.hidden;
        more.setAttribute("aria-expanded", String(!list.hidden));
      } }, short);
    const isBusy = m.state === "streaming";
    this.actions.replaceChildren(...[branchNav(this.place, on), isBusy ? null : h("span", { class: "buttons" },
      m.content ? copyButton(() => m.content, "Copy answer") : null, action("again", "Regenerate", on.again),
      m.content || m.reasoning ? action("onward", "Continue this answer", on.onward) : null,
      m.content ? action("edit", "Edit this answer", () => this.edit()) : null,
      action("trash", "Delete from here on", on.remove)), rows.length && !isBusy ? more : null, list].filter(Boolean));
  }

  edit() {
    const end = () => {
      this.isEditing = false;
      box.replaceWith(this.body);
      this.actions.hidden = false;
      this.actions.querySelector("[data-action=edit]")?.focus();
    };
    const box = editor(this.message.content, "Edit answer", "Save", (text) => {
      end();
      this.on.edit(text);
    }, end);
    this.isEditing = true;
    this.body.replaceWith(box);
    this.actions.hidden = true;
  }
}
