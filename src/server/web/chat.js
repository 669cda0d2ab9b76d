/* The chat page: puts conversations, messages, settings and the server together.
 *
 * A conversation is a tree of messages. What is shown is a path through it: at every message the child that was selected
 * last, or else the newest. Asking again or editing adds a sibling and never overwrites. The address names the
 * conversation, so that reload, history and new tabs work. */
import { $, announce, bindTheme, copyText, formatCount, formatPercent, h, icon, iconButton, readSetting, toast, writeSetting } from "./common.js";
import { AnswerView, QuestionView } from "./message.js";
import { Run } from "./run.js";
import { EFFORTS, NO_SETTINGS, SettingsPanel, cleanSettings, readParams } from "./settings.js";
import { PAGE, ROOT, newId, openStore } from "./store.js";
import { ApiError, getJson } from "./stream.js";

const store = await openStore();
const runs = new Map(); /* conversation id -> the Run in it */
const settingsPanel = new SettingsPanel($("settings"));
const input = $("composer-text");

let conv = null; /* the conversation shown; null: a new one */
let messages = new Map(); /* its messages by id */
let views = new Map(); /* of the messages shown, by id */
let settings = defaultSettings();
let matches = null; /* ids that the search found; null: no search */
let server = { state: "connecting", model: "", contextMax: 0 };

/* ---- the tree ----------------------------------------------------------------------------------------------------- */

function children(parent) {
  const list = [...messages.values()].filter((m) => m.parent === parent);
  return list.sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
}

/* The messages shown, first to last. */
function path() {
  const byParent = new Map();
  for (const m of messages.values()) {
    if (!byParent.has(m.parent)) byParent.set(m.parent, []);
    byParent.get(m.parent).push(m);
  }
  const out = [];
  for (let parent = null; byParent.has(parent); parent = out[out.length - 1].id) {
    const list = byParent.get(parent).sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
    out.push(list.find((m) => m.id === conv.selected[parent ?? ROOT]) || list[list.length - 1]);
    if (out.length > messages.size) break;
  }
  return out;
}

function descendants(id) {
  const out = [id];
  for (let i = 0; i < out.length; i++) for (const m of messages.values()) if (m.parent === out[i]) out.push(m.id);
  return out;
}

async function select(message) {
  conv.selected[message.parent ?? ROOT] = message.id;
  await keep(() => store.patch(conv.id, { selected: { [message.parent ?? ROOT]: message.id } }));
}

async function addMessage(role, parent, content, more = {}) {
  const message = { id: newId(), conv: conv.id, parent, role, content, reasoning: "", created: Date.now(), state: "done", finish: null,
    error: null, usage: null, timing: null, seed: null, model: "", format: null, owner: null, ...more };
  messages.set(message.id, message);
  if (!(await keep(() => store.putMessage(message)))) announce("This message could not be saved.");
  await select(message);
  conv.updated = Date.now();
  await keep(() => store.patch(conv.id, { updated: conv.updated }));
  return message;
}

/* Runs a write; a full or broken storage is told once, and the page goes on with what it has in memory. */
let hasToldStorage = false;
async function keep(write) {
  try {
    return await write();
  } catch (error) {
    if (!hasToldStorage) {
      const isFull = error && error.name === "QuotaExceededError";
      toast(isFull ? "This browser's storage is full: new messages are not kept. Export and delete old conversations."
        : "This browser did not save the message. It is kept until the page is closed.", { seconds: 20 });
    }
    hasToldStorage = true;
    return false;
  }
}

/* ---- asking ------------------------------------------------------------------------------------------------------- */

/* What is wrong with the settings is shown in their panel. */
function checkedParams() {
  const { params, wrong } = readParams(settings);
  const names = Object.keys(wrong);
  if (!names.length) return params;
  openSettings(names[0]);
  settingsPanel.check();
  announce(`Not sent. ${names[0].replace(/_/g, " ")}: ${wrong[names[0]]}`);
  toast(`Not sent: ${names[0].replace(/_/g, " ")}, ${wrong[names[0]]}`);
  return null;
}

/* From the first key to the request there are writes to wait for; nothing else may begin between. */
let isStarting = false;
let isStopWanted = false;

function starting() {
  isStarting = true;
  isStopWanted = false;
  showComposer();
}

function isBusy() {
  return isStarting || (!!conv && runs.has(conv.id));
}

function requestBody(answer, params, isContinued) {
  const list = [];
  for (let m = messages.get(answer.parent); m; m = messages.get(m.parent)) list.unshift({ role: m.role, content: m.content });
  /* An answer that never got a word says nothing to the model. */
  const said = list.filter((m) => m.role === "user" || m.content);
  if (settings.system.trim()) said.unshift({ role: "system", content: settings.system });
  const body = { model: server.model || "default", messages: said, stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true }, ...params };
  if (isContinued) {
    const last = { role: "assistant", content: answer.content, prefix: true };
    if (answer.reasoning && params.reasoning_effort !== "none") last.reasoning_content = answer.reasoning;
    said.push(last);
    body.continue_final_message = true;
    body.add_generation_prompt = false;
  }
  return body;
}

async function send(text) {
  const params = checkedParams();
  if (!params || isBusy()) return false;
  starting();
  if (!conv) {
    conv = { id: newId(), title: titleOf(text), isNamed: false, created: Date.now(), updated: Date.now(), settings, selected: {} };
    messages = new Map();
    await keep(() => store.create({ ...conv }));
    history.replaceState(null, "", "#" + conv.id);
    showTitle();
  }
  const shown = path();
  const question = await addMessage("user", shown.length ? shown[shown.length - 1].id : null, text);
  await answer(question, params);
  return true;
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? line.slice(0, 57).trimEnd() + "\u2026" : line || "Conversation";
}

/* A new answer to a question. */
async function answer(question, params) {
  const message = await addMessage("assistant", question.id, "", { owner: PAGE, state: "streaming",
    format: params.response_format ? "json" : null });
  begin(message, requestBody(message, params, false));
}

function begin(message, body) {
  const run = new Run(message, body, store);
  const mine = conv;
  runs.set(mine.id, run);
  isStarting = false;
  message.state = "streaming"; /* before the first view of it */
  message.error = null;
  let frame = 0;
  const draw = () => {
    frame = 0;
    if (conv !== mine || !runs.has(mine.id)) return;
    const isAtEnd = atEnd();
    views.get(message.id)?.update(run);
    $("speed").textContent = run.liveText();
    if (message.usage) showContext(message);
    if (isAtEnd) toEnd();
  };
  run.addEventListener("progress", () => {
    if (!frame && !document.hidden) frame = requestAnimationFrame(draw);
  });
  run.addEventListener("unsaved", (e) => keep(() => Promise.reject(e.detail)));
  run.addEventListener("end", () => {
    runs.delete(mine.id);
    if (run.isGone) toast("This conversation was deleted in another tab.");
    if (conv === mine) ended(message, run);
    renderList();
  });
  renderThread();
  toEnd();
  renderList();
  showComposer();
  announce("The answer is being written.");
  run.start();
  if (isStopWanted) run.stop();
}

function ended(message, run) {
  const isAtEnd = atEnd();
  /* The view lives on: a new one would lose what is selected or opened in it. */
  const view = views.get(message.id);
  if (view) {
    view.update(null);
    view.signature = signature(message);
  }
  if (isAtEnd) toEnd();
  showComposer();
  showFigures();
  if (message.state === "stopped") announce("Stopped.");
  else if (message.state === "error") announce(message.error.message);
  else announce(`The answer is complete. ${(views.get(message.id)?.body.textContent || "").slice(0, 400)}`);
  if (["offline", "lost", "loading"].includes(message.error?.kind)) checkServer();
  if (message.error?.kind === "key") setServer("key");
  if (message.error?.param && settingsPanel.refuse(message.error.param, message.error.message)) openSettings(null);
  if (run.isGone) show(null);
}

function stop() {
  if (!isBusy()) return false;
  isStopWanted = true;
  if (!isStarting) runs.get(conv.id).stop();
  return true;
}

async function again(message) {
  const params = checkedParams();
  if (!params || isBusy()) return;
  starting();
  if (message.content || message.reasoning) {
    await answer(messages.get(message.parent), params);
    return;
  }
  /* Nothing came of it: there is nothing to keep beside the new one. */
  Object.assign(message, { owner: PAGE, created: Date.now(), format: params.response_format ? "json" : null });
  begin(message, requestBody(message, params, false));
}

function onward(message) {
  const params = checkedParams();
  if (!params || isBusy()) return;
  starting();
  message.owner = PAGE;
  begin(message, requestBody(message, params, true));
}

async function edited(message, text) {
  if (isBusy()) return;
  if (message.role === "assistant") {
    await addMessage("assistant", message.parent, text, { model: message.model, format: message.format });
    renderThread();
    return;
  }
  const params = checkedParams();
  if (!params) return;
  starting();
  await answer(await addMessage("user", message.parent, text), params);
}

async function removeFrom(message) {
  const ids = descendants(message.id);
  if (runs.has(conv.id) && ids.includes(runs.get(conv.id).message.id)) await halt(conv.id);
  const removed = ids.map((id) => messages.get(id));
  const from = conv;
  ids.forEach((id) => messages.delete(id));
  await keep(() => store.removeMessages(conv.id, ids));
  renderThread();
  input.focus();
  toast(ids.length > 1 ? `${ids.length} messages deleted` : "Message deleted", { label: "Undo", action: async () => {
    await keep(() => store.restore({ messages: removed }));
    if (conv === from) await reload();
  } });
}

/* Stops a run and waits for its end. */
function halt(id) {
  const run = runs.get(id);
  if (!run) return Promise.resolve();
  const end = new Promise((resolve) => run.addEventListener("end", resolve, { once: true }));
  run.stop();
  return end;
}

/* ---- the thread --------------------------------------------------------------------------------------------------- */

function handlers(message) {
  return {
    select: async (step) => {
      const list = children(message.parent);
      const next = list[list.indexOf(message) + step];
      if (!next) return;
      await select(next);
      renderThread();
    },
    edit: (text) => edited(message, text),
    remove: () => removeFrom(message),
    again: () => again(message),
    onward: () => onward(message),
    stop,
    key: () => openSettings("key"),
  };
}

/* Two views of the same signature look the same. */
function signature(m) {
  const siblings = children(m.parent);
  return [m.state, m.content.length, m.reasoning.length, siblings.indexOf(m), siblings.length, m.error?.message, m.finish].join();
}

function renderThread() {
  const thread = $("thread");
  const list = conv ? path() : [];
  const focused = document.activeElement?.closest?.("#thread [data-action]");
  const place = focused && [[...thread.children].indexOf(focused.closest(".message")), focused.dataset.action];
  const next = new Map();
  list.forEach((m) => {
    const run = conv && runs.get(conv.id)?.message === m ? runs.get(conv.id) : null;
    const sign = run ? "run" + [...children(m.parent)].length : signature(m);
    let view = views.get(m.id);
    if (!view || view.message !== m || view.signature !== sign) {
      const siblings = children(m.parent);
      const where = { index: siblings.indexOf(m), count: siblings.length };
      view = m.role === "user" ? new QuestionView(m, where, handlers(m)) : new AnswerView(m, where, handlers(m), run);
      view.signature = sign;
    }
    next.set(m.id, view);
  });
  views = next;
  const wanted = list.map((m) => views.get(m.id).el);
  if (!wanted.length) wanted.push(welcome());
  [...thread.children].forEach((el) => wanted.includes(el) || el.remove());
  wanted.forEach((el, i) => thread.children[i] === el || thread.insertBefore(el, thread.children[i] || null));
  list.forEach((m, i) => views.get(m.id).setLast(i === list.length - 1));
  if (place && !document.activeElement.closest("#thread")) {
    const again = thread.children[place[0]]?.querySelector(`[data-action="${place[1]}"]:not(:disabled)`) ||
      thread.children[place[0]]?.querySelector(".branches button:not(:disabled)");
    (again || input).focus();
  }
  showFigures();
  showToEnd();
}

function welcome() {
  const starts = ["What is 47 + 38?", "Tell me a story about a little fox.", "What is the capital of France?", "Write a short poem about the sea."];
  return h("div", { class: "welcome" }, h("h2", {}, "What is on your mind?"),
    h("p", {}, "Everything stays here: the model runs on your server, the history in this browser."),
    h("div", { class: "starts" }, starts.map((text) => h("button", { type: "button", onclick: () => {
      input.value = text;
      fitInput();
      submit();
    } }, text))));
}

const scroller = $("scroller");
let isFollowing = true; /* the end of the thread stays in view until the reader scrolls up */

function atEnd() {
  return isFollowing;
}

function toEnd() {
  scroller.scrollTop = scroller.scrollHeight;
  isFollowing = true;
  showToEnd();
}

function showToEnd() {
  const isNear = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 80;
  $("to-end").hidden = isNear;
  return isNear;
}

scroller.addEventListener("scroll", () => (isFollowing = showToEnd()), { passive: true });
new ResizeObserver(() => (isFollowing ? (scroller.scrollTop = scroller.scrollHeight) : showToEnd())).observe($("thread"));
$("to-end").addEventListener("click", () => {
  toEnd();
  input.focus();
});

function showFigures() {
  const list = conv ? path() : [];
  $("speed").textContent = (conv && runs.get(conv.id)?.liveText()) || "";
  showContext(list.findLast((m) => m.usage));
}

function showContext(message) {
  const box = $("context");
  const used = message?.usage?.total_tokens || (message?.usage?.prompt_tokens || 0) + (message?.usage?.completion_tokens || 0);
  box.hidden = !used;
  if (!used) return;
  const meter = $("context-meter");
  meter.hidden = !server.contextMax;
  $("context-text").textContent = server.contextMax ? `Context ${formatCount(used)} of ${formatCount(server.contextMax)}` : `Context ${formatCount(used)} tokens`;
  if (!server.contextMax) return;
  const share = Math.min(1, used / server.contextMax);
  meter.firstChild.style.width = share * 100 + "%";
  meter.classList.toggle("is-high", share > 0.9);
  meter.setAttribute("aria-valuenow", Math.round(share * 100));
  meter.setAttribute("aria-valuetext", formatPercent(share));
}

/* ---- the composer ------------------------------------------------------------------------------------------------- */

function fitInput() {
  input.style.height = "auto";
  input.style.height = input.scrollHeight + "px";
  showComposer();
}

function showComposer() {
  const isRunning = isBusy();
  const button = $("send");
  if (button.classList.contains("is-stop") !== isRunning || !button.dataset.shown) {
    button.dataset.shown = "1";
    button.classList.toggle("is-stop", isRunning);
    button.replaceChildren(icon(isRunning ? "stop" : "send"));
    button.setAttribute("aria-label", isRunning ? "Stop" : "Send");
    button.title = isRunning ? "Stop (Esc)" : "Send (Enter)";
  }
  button.disabled = !isRunning && !input.value.trim();
  $("schema-mark").hidden = !settings.is_schema;
}

const draftName = () => "draft." + (conv ? conv.id : "new");

async function submit() {
  const text = input.value;
  if (isBusy()) {
    announce("An answer is being written. Escape stops it.");
    return;
  }
  if (!text.trim()) return;
  const draft = draftName();
  input.value = "";
  fitInput();
  if (await send(text)) writeSetting(draft, null, true);
  else {
    input.value = text;
    fitInput();
  }
}

$("composer").addEventListener("submit", (e) => {
  e.preventDefault();
  if (isBusy()) {
    stop();
    input.focus();
  } else {
    submit();
  }
});
input.addEventListener("input", () => {
  fitInput();
  writeSetting(draftName(), input.value || null, true);
});
input.addEventListener("keydown", (e) => {
  /* While an input method composes, Enter is its own. */
  if (e.isComposing || e.keyCode === 229) return;
  if (e.key === "Enter" && !e.shiftKey && !e.altKey && !matchMedia("(hover: none) and (pointer: coarse)").matches) {
    e.preventDefault();
    submit();
  } else if (e.key === "ArrowUp" && !input.value && editLast()) {
    e.preventDefault();
  }
});
$("attach").addEventListener("click", () => {
  toast("Images can't be sent yet: this version of the engine reads text only.");
});

function editLast() {
  if (!conv || isBusy()) return false;
  const last = path().findLast((m) => m.role === "user");
  if (!last) return false;
  views.get(last.id).edit();
  return true;
}

/* ---- conversations ------------------------------------------------------------------------------------------------ */

async function show(id) {
  while (isStarting) await new Promise((resolve) => setTimeout(resolve, 20));
  const found = id ? await store.get(id) : null;
  conv = found || null;
  /* The run of a conversation keeps its own copy of the message: that one is shown. */
  messages = new Map();
  if (conv) {
    const rows = await store.messages(conv.id);
    if (conv.id !== found.id) return;
    for (const row of rows) messages.set(row.id, row);
    const run = runs.get(conv.id);
    if (run) messages.set(run.message.id, run.message);
  }
  settings = conv ? cleanSettings(conv.settings) : defaultSettings();
  settingsPanel.load(settings);
  views = new Map();
  input.value = readSetting(draftName(), true) || "";
  if ((location.hash.slice(1) || null) !== (conv ? conv.id : null)) {
    history.replaceState(null, "", conv ? "#" + conv.id : location.pathname);
  }
  showTitle();
  showEffort();
  fitInput();
  renderThread();
  renderList();
  toEnd();
  askForWriters();
}

/* Answers that no page writes any more were cut off by a closed page. */
async function askForWriters() {
  const mine = conv;
  for (const m of messages.values()) {
    if (m.state !== "streaming" || runs.get(mine.id)?.message === m) continue;
    if (await store.isWritten(m.id)) continue;
    m.state = "interrupted";
    m.owner = null;
    await keep(() => store.putMessage(m));
    if (conv === mine) renderThread();
  }
}

/* Reads the shown conversation again: another tab, or an undo, changed it. */
async function reload() {
  if (!conv) return;
  const [fresh, rows] = await Promise.all([store.get(conv.id), store.messages(conv.id)]);
  if (!fresh) {
    if (!runs.has(conv.id)) {
      toast("This conversation was deleted in another tab.");
      show(null);
    }
    return;
  }
  if (fresh.id !== conv.id) return;
  const isAtEnd = atEnd();
  Object.assign(conv, fresh);
  const run = runs.get(conv.id);
  const old = messages;
  messages = new Map();
  for (const row of rows) {
    const before = old.get(row.id);
    /* Views belong to objects: what is the same stays the same object. */
    messages.set(row.id, run?.message.id === row.id ? run.message : before ? Object.assign(before, row) : row);
  }
  if (JSON.stringify(settings) !== JSON.stringify(cleanSettings(conv.settings)) && !document.activeElement.closest("#settings")) {
    settings = cleanSettings(conv.settings);
    settingsPanel.load(settings);
    showEffort();
  }
  showTitle();
  renderThread();
  if (isAtEnd) toEnd();
}

let reloadTimer = 0;
store.addEventListener("change", (e) => {
  clearTimeout(reloadTimer);
  reloadTimer = setTimeout(async () => {
    await renderList();
    await reload();
    askForWriters();
  }, 150);
  if (e.detail.kind === "removed" && runs.has(e.detail.conv)) {
    runs.get(e.detail.conv).isGone = true;
    runs.get(e.detail.conv).stop();
  }
});

function newConversation() {
  closeSide();
  show(null);
  input.focus();
}

function showTitle() {
  const title = conv ? conv.title : "New conversation";
  $("title").textContent = title;
  $("title").disabled = !conv;
  document.title = conv ? `${title} - DeepInfer` : "DeepInfer";
}

const DAY = 86400000;

function group(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  if (time >= midnight - 7 * DAY) return "Last seven days";
  return new Date(time).toLocaleDateString("en", { month: "long", year: "numeric" });
}

async function renderList() {
  const all = (await store.list()).filter((c) => !matches || matches.has(c.id));
  const box = $("conversations");
  const open = box.querySelector(".menu")?.dataset.conv;
  if (open) return; /* a list that changes under an open menu would be a trap */
  const focused = document.activeElement?.closest?.(".conv")?.dataset.conv;
  const groups = new Map();
  for (const c of all) {
    const name = group(c.updated);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(c);
  }
  const parts = [];
  for (const [name, list] of groups) {
    parts.push(h("h2", {}, name), h("ul", {}, list.map(listRow)));
  }
  if (!all.length) parts.push(h("p", { class: "empty-note" }, matches ? "Nothing found." : "Conversations that you have will be here. They stay in this browser."));
  box.replaceChildren(...parts);
  if (focused) box.querySelector(`[data-conv="${focused}"] a`)?.focus();
}

function listRow(c) {
  const isCurrent = conv?.id === c.id;
  const link = h("a", { href: "#" + c.id, dir: "auto", title: c.title, onclick: closeSide },
    runs.has(c.id) ? h("span", { class: "busy", role: "img", "aria-label": "Answer under way:" }) : null, c.title);
  if (isCurrent) link.setAttribute("aria-current", "page");
  const more = iconButton("more", `Menu of ${c.title}`, () => openMenu(row, more, c), { "aria-expanded": "false", "aria-haspopup": "true" });
  const row = h("li", { class: isCurrent ? "conv is-current" : "conv", "data-conv": c.id }, link, more);
  return row;
}

function openMenu(row, button, c) {
  const isOpen = row.querySelector(".menu");
  closeMenus();
  if (isOpen) return;
  const item = (name, text, f, cls) => h("button", { type: "button", class: cls, onclick: () => {
    closeMenus();
    f();
  } }, icon(name), text);
  const menu = h("div", { class: "menu", role: "group", "aria-label": `Of ${c.title}`, "data-conv": c.id },
    item("edit", "Rename", () => rename(c)), item("export", "Export", () => exportFile(c)), item("trash", "Delete", () => removeConversation(c), "bad"));
  row.append(menu);
  button.setAttribute("aria-expanded", "true");
  menu.firstChild.focus();
  menu.scrollIntoView({ block: "nearest" });
}

/* True if one was open. */
function closeMenus() {
  const menu = document.querySelector(".menu");
  if (!menu) return false;
  const button = menu.parentElement.querySelector("[aria-expanded]");
  const hadFocus = menu.contains(document.activeElement);
  menu.remove();
  button.setAttribute("aria-expanded", "false");
  if (hadFocus) button.focus();
  return true;
}

document.addEventListener("pointerdown", (e) => e.target.closest(".conv") || closeMenus());

function ask(title, value) {
  const dialog = $("ask");
  $("ask-title").textContent = title;
  $("ask-input").value = value;
  dialog.showModal();
  $("ask-input").select();
  return new Promise((resolve) => {
    const end = (answer) => {
      $("ask-form").onsubmit = $("ask-cancel").onclick = dialog.onclose = null;
      dialog.close();
      resolve(answer);
    };
    $("ask-form").onsubmit = (e) => {
      e.preventDefault();
      end($("ask-input").value.trim());
    };
    $("ask-cancel").onclick = () => end("");
    dialog.onclose = () => end("");
  });
}

async function rename(c) {
  const title = await ask("Name of the conversation", c.title);
  if (!title) return;
  await keep(() => store.patch(c.id, { title, isNamed: true }));
  if (conv?.id === c.id) {
    conv.title = title;
    showTitle();
  }
  renderList();
}

async function removeConversation(c) {
  await halt(c.id);
  const removed = await store.remove(c.id);
  if (conv?.id === c.id) await show(null);
  renderList();
  toast("Conversation deleted", { label: "Undo", action: async () => {
    await keep(() => store.restore(removed));
    renderList();
  } });
}

async function exportFile(c) {
  const data = await store.exportAll(c?.id);
  const url = URL.createObjectURL(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }));
  const name = c ? c.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40).replace(/^-|-$/g, "") || "conversation" : "conversations";
  h("a", { href: url, download: `${name}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

async function importFile(file) {
  try {
    const n = await store.importAll(JSON.parse(await file.text()));
    toast(n === 1 ? "One conversation imported" : `${n} conversations imported`);
    renderList();
  } catch (error) {
    toast(`'${file.name}' was not imported: ${error instanceof SyntaxError ? "it is not valid JSON" : error.message}`, { seconds: 12 });
  }
}

let searchTimer = 0;
$("search").addEventListener("input", () => {
  clearTimeout(searchTimer);
  searchTimer = setTimeout(async () => {
    const text = $("search").value.trim();
    const found = text ? await store.search(text) : null;
    if (text !== $("search").value.trim()) return;
    matches = found;
    await renderList();
    if (found) announce(found.size === 1 ? "One conversation found" : `${found.size} conversations found`);
  }, 150);
});
$("new-chat").addEventListener("click", newConversation);
$("title").addEventListener("click", () => conv && rename(conv));
$("export").addEventListener("click", () => exportFile(null));
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", () => {
  const [file] = $("import-file").files;
  if (file) importFile(file);
  $("import-file").value = "";
});
window.addEventListener("hashchange", () => {
  const id = location.hash.slice(1);
  if (/^[0-9a-f]{24}$/.test(id) || !id) {
    if (id !== (conv?.id || "")) show(id || null);
  }
});

/* ---- settings ----------------------------------------------------------------------------------------------------- */

function defaultSettings() {
  try {
    return cleanSettings(JSON.parse(readSetting("defaults")));
  } catch {
    return { ...NO_SETTINGS };
  }
}

let settingsTimer = 0;
settingsPanel.addEventListener("change", (e) => {
  settings = e.detail;
  showEffort();
  showComposer();
  if (!conv) return;
  conv.settings = settings;
  const { id } = conv;
  clearTimeout(settingsTimer);
  settingsTimer = setTimeout(() => keep(() => store.patch(id, { settings })), 300);
});
settingsPanel.addEventListener("defaults", () => {
  writeSetting("defaults", JSON.stringify(settings));
  toast("New conversations begin with these settings");
});
settingsPanel.addEventListener("key", () => checkServer());
settingsPanel.addEventListener("close", () => closeSettings());

const effortPick = $("effort-quick");
effortPick.replaceChildren(...EFFORTS.map(([value, text]) => h("option", { value }, text)));
effortPick.addEventListener("change", () => {
  settingsPanel.load({ ...settings, effort: effortPick.value });
  settingsPanel.changed("effort");
  if (effortPick.value === "number") openSettings("effort_number");
});

function showEffort() {
  effortPick.value = settings.effort;
  effortPick.options[5].textContent = settings.effort === "number" && settings.effort_number ? `Thinking: ${settings.effort_number}` : EFFORTS[5][1];
}

const isNarrow = () => matchMedia("(max-width: 1100px)").matches;
const isPhone = () => matchMedia("(max-width: 700px)").matches;

/* What lies over the page keeps the rest of it out of reach. */
function cover() {
  const isSettings = !$("settings").hidden && isNarrow();
  const isSide = $("app").classList.contains("side-open") && isPhone();
  $("centre").inert = isSettings || isSide;
  $("sidebar").inert = isSettings;
  $("veil").hidden = !(isSettings || isSide);
}

function openSettings(field) {
  $("settings").hidden = false;
  $("settings-toggle").setAttribute("aria-expanded", "true");
  closeSide();
  cover();
  if (field) settingsPanel.focus(field);
  else if (isNarrow()) $("settings").querySelector("button").focus();
}

function closeSettings() {
  if ($("settings").hidden) return false;
  $("settings").hidden = true;
  $("settings-toggle").setAttribute("aria-expanded", "false");
  cover();
  $("settings-toggle").focus();
  return true;
}

function toggleSide() {
  if (isPhone()) {
    $("app").classList.toggle("side-open");
    cover();
    if ($("app").classList.contains("side-open")) $("new-chat").focus();
    return;
  }
  const isHidden = $("app").classList.toggle("side-hidden");
  writeSetting("side", isHidden ? "hidden" : null);
}

function closeSide() {
  if (!$("app").classList.contains("side-open")) return false;
  $("app").classList.remove("side-open");
  cover();
  if (!$("centre").inert) $("side-toggle").focus();
  return true;
}

$("settings-toggle").addEventListener("click", () => ($("settings").hidden ? openSettings(null) : closeSettings()));
$("side-toggle").addEventListener("click", toggleSide);
$("side-close").addEventListener("click", closeSide);
$("veil").addEventListener("click", () => closeSettings() || closeSide());
window.addEventListener("resize", cover);

/* ---- keys --------------------------------------------------------------------------------------------------------- */

const MAC = /Mac|iP/.test(navigator.platform);
const KEYS = [
  ["Enter", "Send the message"],
  ["Shift+Enter", "A new line"],
  ["Esc", "Stop the answer, or close what is open"],
  ["\u2191", "Edit the last message, from an empty message box"],
  ["Alt+N", "New conversation", () => newConversation()],
  ["Alt+M", "To the message box", () => input.focus()],
  ["Alt+R", "Regenerate the last answer", () => withLast((m) => again(m))],
  ["Alt+G", "Continue the last answer", () => withLast((m) => onward(m))],
  ["Alt+C", "Copy the last answer", () => withLast(async (m) => toast((await copyText(m.content)) ? "Answer copied" : "The browser did not allow copying"))],
  ["Alt+E", "Edit the last message", () => editLast()],
  ["Alt+L", "List of conversations", () => toggleSide()],
  ["Alt+S", "Settings", () => ($("settings").hidden ? openSettings("system") : closeSettings())],
  ["Ctrl+K", "Search conversations", () => {
    if (isPhone()) $("app").classList.contains("side-open") || toggleSide();
    else $("app").classList.remove("side-hidden");
    $("search").focus();
  }],
  ["Ctrl+/", "This list", () => $("help").showModal()],
];

function withLast(f) {
  const last = conv && path().findLast((m) => m.role === "assistant");
  if (last && !isBusy()) f(last);
}

$("help-list").replaceChildren(...KEYS.flatMap(([keys, text]) => [
  h("dt", {}, keys.split("+").flatMap((k, i) => [i ? " + " : "", h("kbd", {}, k === "Ctrl" && MAC ? "\u2318" : k)])), h("dd", {}, text)]));
$("help-open").addEventListener("click", () => $("help").showModal());
$("help-close").addEventListener("click", () => $("help").close());

document.addEventListener("keydown", (e) => {
  if (e.isComposing || e.keyCode === 229 || e.defaultPrevented) return;
  const isDialog = document.querySelector("dialog[open]");
  if (e.key === "Escape" && !isDialog) {
    if (closeMenus() || closeSide() || (isNarrow() && closeSettings()) || stop()) e.preventDefault();
    return;
  }
  /* By the place of the key: Alt changes the letter on some keyboards. */
  const letter = e.code.startsWith("Key") ? e.code.slice(3) : e.key;
  const name = (e.altKey && !e.ctrlKey && !e.metaKey ? "Alt+" : (MAC ? e.metaKey : e.ctrlKey) && !e.altKey ? "Ctrl+" : "") + letter;
  const key = KEYS.find(([keys, , f]) => f && keys === name && keys.includes("+"));
  if (!key || isDialog || e.shiftKey) return;
  e.preventDefault();
  key[2]();
});

/* ---- the server --------------------------------------------------------------------------------------------------- */

const SERVER_TEXT = { connecting: "Connecting", loading: "Not ready", down: "Server not reached", key: "API key needed" };
let serverTimer = 0;
let failures = 0;

function setServer(state, more = {}) {
  server = { ...server, ...more, state };
  $("server").className = `server is-${state === "key" ? "loading" : state}`;
  $("server-text").textContent = state === "ready" ? server.model : SERVER_TEXT[state];
  $("server").title = state === "ready" && server.contextMax ? `${server.model}, context of ${formatCount(server.contextMax)} tokens` : $("server-text").textContent;
  const notice = $("notice");
  const button = (text, f) => h("button", { type: "button", class: "link-button", onclick: f }, text);
  notice.classList.toggle("bad", state === "down");
  if (state === "down") notice.replaceChildren("The server can't be reached. Trying again.", button("Try now", checkServer));
  else if (state === "key") notice.replaceChildren("This server asks for an API key.", button("Enter the API key", () => openSettings("key")));
  else if (state === "loading") notice.replaceChildren("The server is not ready: the model is still loading, or it is about to end. What you send now waits for it.");
  notice.hidden = !["down", "key", "loading"].includes(state);
  showFigures();
}

async function checkServer() {
  clearTimeout(serverTimer);
  let next = 20000;
  try {
    await fetch("/health", { cache: "no-store" }).then((r) => {
      if (r.status === 503) throw new ApiError("loading", "");
      if (!r.ok) throw new ApiError("server", "");
    }, () => {
      throw new ApiError("offline", "");
    });
    if (server.state !== "ready") {
      const list = await getJson("/v1/models");
      const model = list.data?.[0] || {};
      setServer("ready", { model: String(model.id || ""), contextMax: Number(model.max_model_len) || 0 });
    }
    failures = 0;
  } catch (error) {
    failures++;
    next = error.kind === "loading" ? 1500 : Math.min(15000, 1000 * 2 ** Math.min(failures, 4));
    const state = error.kind === "loading" ? "loading" : error.kind === "key" ? "key" : "down";
    if (server.state !== state) setServer(state);
    if (state === "key") return;
  }
  serverTimer = setTimeout(() => document.hidden || checkServer(), next);
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  checkServer();
  if (conv && runs.has(conv.id)) views.get(runs.get(conv.id).message.id)?.update(runs.get(conv.id));
});

/* Only the page that goes away knows the last words of its answers. */
window.addEventListener("pagehide", () => {
  for (const run of runs.values()) store.leave(run.message);
});

/* ---- begin -------------------------------------------------------------------------------------------------------- */

bindTheme($("theme"));
if (readSetting("side") === "hidden" && !isPhone()) $("app").classList.add("side-hidden");
if (!store.isKept) toast("This browser does not allow storage here: conversations last until the page is closed.", { seconds: 15 });
showComposer();
checkServer();
await show(location.hash.slice(1));
if (!isPhone()) input.focus();
document.documentElement.dataset.ready = "1";
