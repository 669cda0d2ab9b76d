/* What both pages use: making elements, icons, notices, the colour scheme, the API key, and how figures are written. */

/* An element: props are properties, or attributes where a name has a dash or is none of the element's. */
export function h(tag, props = {}, ...children) {
  const el = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name === "class") el.className = value;
    else if (name.startsWith("on")) el.addEventListener(name.slice(2), value);
    else if (name in el && !name.includes("-")) el[name] = value;
    else el.setAttribute(name, value);
  }
  el.append(...children.flat(2).filter((c) => c !== null && c !== undefined && c !== false));
  return el;
}

export const $ = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

/* An element of a drawing. */
export function svg(tag, attributes = {}, ...children) {
  const el = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) el.setAttribute(name, value);
  el.append(...children);
  return el;
}

/* One of the page's symbols. The text beside it, or the button's label, says what it means. */
export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true", viewBox: "0 0 24 24" }, svg("use", { href: "#i-" + name }));
}

export function iconButton(name, label, onclick, props = {}) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...props }, icon(name));
}

/* ---- storage ------------------------------------------------------------------------------------------------------
 * Reading and writing can be forbidden; then choices last as long as the page. */

const memory = new Map();

function area(isSession) {
  try {
    return isSession ? sessionStorage : localStorage;
  } catch {
    return null;
  }
}

export function readSetting(name, isSession = false) {
  try {
    return area(isSession).getItem("deepinfer." + name);
  } catch {
    return memory.get(name) ?? null;
  }
}

/* null removes it. */
export function writeSetting(name, value, isSession = false) {
  try {
    if (value === null) area(isSession).removeItem("deepinfer." + name);
    else area(isSession).setItem("deepinfer." + name, value);
  } catch {
    memory.set(name, value);
  }
}

/* The API key is kept for this tab, or for this browser when that was asked for. */
export const apiKey = {
  get: () => readSetting("key", true) ?? readSetting("key") ?? "",
  isRemembered: () => readSetting("key") !== null,
  set(value, isRemembered) {
    writeSetting("key", value && !isRemembered ? value : null, true);
    writeSetting("key", value && isRemembered ? value : null);
  },
  headers() {
    const key = apiKey.get();
    return key ? { Authorization: "Bearer " + key } : {};
  },
};

/* ---- colour scheme ------------------------------------------------------------------------------------------------ */

const THEMES = { auto: "Like the system", light: "Light", dark: "Dark" };

/* Makes a button go through the schemes: the system's, light, dark. */
export function bindTheme(button) {
  const show = () => {
    const theme = document.documentElement.dataset.theme || "auto";
    button.replaceChildren(icon("theme-" + theme));
    button.title = `Colours: ${THEMES[theme].toLowerCase()}`;
    button.setAttribute("aria-label", button.title);
  };
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    const theme = names[(names.indexOf(document.documentElement.dataset.theme || "auto") + 1) % 3];
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    writeSetting("theme", theme === "auto" ? null : theme);
    show();
  });
  window.addEventListener("storage", (e) => {
    if (e.key !== "deepinfer.theme") return;
    if (e.newValue) document.documentElement.dataset.theme = e.newValue;
    else delete document.documentElement.dataset.theme;
    show();
  });
  show();
}

/* ---- notices ------------------------------------------------------------------------------------------------------ */

/* A line at the bottom for a few seconds, with an action if one is given. Read out politely. */
export function toast(text, { action, label, seconds = 6 } = {}) {
  const box = $("toasts");
  const el = h("div", { class: "toast" }, h("span", {}, text));
  let timer = 0;
  const close = () => {
    clearTimeout(timer);
    el.remove();
  };
  const start = () => {
    clearTimeout(timer);
    timer = setTimeout(close, seconds * 1000);
  };
  if (action) {
    el.append(h("button", { type: "button", class: "link-button", onclick: () => {
      close();
      action();
    } }, label));
  }
  el.append(iconButton("close", "Dismiss", close));
  /* Whoever is about to use it has time to. */
  el.addEventListener("pointerenter", () => clearTimeout(timer));
  el.addEventListener("pointerleave", start);
  el.addEventListener("focusin", () => clearTimeout(timer));
  el.addEventListener("focusout", start);
  while (box.children.length > 2) box.firstChild.remove();
  box.append(el);
  start();
  return close;
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    /* Off loopback without TLS there is no clipboard API: a selection can be copied all the same. */
    const area = h("textarea", { class: "visually-hidden", value: text, "aria-hidden": "true" });
    const focused = document.activeElement;
    document.body.append(area);
    area.select();
    const isDone = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return isDone;
  }
}

export function copyButton(text, label) {
  const button = iconButton("copy", label, async () => {
    const isDone = await copyText(text());
    button.replaceChildren(icon(isDone ? "check" : "close"));
    announce(isDone ? "Copied" : "The browser did not allow copying");
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

/* Says something to screen readers once. */
export function announce(text) {
  const el = $("announcer");
  el.textContent = "";
  setTimeout(() => (el.textContent = text), 50);
}

/* ---- figures ------------------------------------------------------------------------------------------------------ */

const number = new Intl.NumberFormat("en");

export function formatCount(n) {
  return number.format(Math.round(n));
}

export function formatTokens(n) {
  return `${formatCount(n)} token${n === 1 ? "" : "s"}`;
}

export function formatShort(n) {
  const a = Math.abs(n);
  if (a >= 1e9) return (n / 1e9).toFixed(1) + "G";
  if (a >= 1e6) return (n / 1e6).toFixed(1) + "M";
  if (a >= 1e4) return (n / 1e3).toFixed(a >= 1e5 ? 0 : 1) + "k";
  if (a >= 100 || Number.isInteger(n)) return String(Math.round(n));
  return n.toFixed(a >= 10 ? 1 : 2);
}

export function formatSeconds(s) {
  if (s < 10) return s.toFixed(1) + " s";
  if (s < 60) return Math.round(s) + " s";
  const m = Math.floor(s / 60);
  return m < 60 ? `${m} min ${Math.round(s % 60)} s` : `${Math.floor(m / 60)} h ${m % 60} min`;
}

export function formatPercent(share) {
  return `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}
