/* Conversations in the browser's IndexedDB.
 *
 * A conversation is a record, and each of its messages is one of its own with the message that it follows: a tree. Tabs
 * therefore write beside each other and never over each other; a conversation's own fields are merged inside one
 * transaction. Other tabs are told what changed. A message that is being written names the page that writes it, so that
 * a page that finds one can ask whether its writer still lives. Where the database can't be opened, history lasts as
 * long as the page. */

export const ROOT = "root"; /* stands for the parent of first messages in `selected` */

const TEXT_MAX = 8 << 20; /* characters of a message that an import takes */

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (b) => b.toString(16).padStart(2, "0")).join("");
}

/* Names this page, not the tab: a reloaded page is a new writer. */
export const PAGE = newId();

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function openDatabase() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open("deepinfer", 1);
    request.onupgradeneeded = () => {
      const db = request.result;
      db.createObjectStore("conversations", { keyPath: "id" });
      db.createObjectStore("messages", { keyPath: "id" }).createIndex("conv", "conv");
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("the database is blocked"));
  });
}

/* The same calls as on a transaction's stores, on maps. */
class MemoryStore {
  constructor() {
    this.rows = new Map();
  }
  get(id) {
    return structuredClone(this.rows.get(id));
  }
  put(row) {
    this.rows.set(row.id, structuredClone(row));
  }
  delete(id) {
    this.rows.delete(id);
  }
  all(conv) {
    const rows = [...this.rows.values()].filter((r) => !conv || r.conv === conv);
    return structuredClone(rows);
  }
}

class Store extends EventTarget {
  constructor(db) {
    super();
    this.db = db;
    this.isKept = !!db;
    this.maps = db ? null : { conversations: new MemoryStore(), messages: new MemoryStore() };
    this.writing = new Set(); /* ids of the messages that this page writes */
    this.channel = new BroadcastChannel("deepinfer");
    this.channel.onmessage = (e) => {
      const data = e.data || {};
      if (data.kind === "alive?" && this.writing.has(data.id)) this.channel.postMessage({ kind: "alive", id: data.id });
      else this.dispatchEvent(new CustomEvent(data.kind === "alive" ? "alive" : "change", { detail: data }));
    };
    if (db) db.onversionchange = () => db.close();
  }

  /* Runs f with the two stores in one transaction; what f returns comes once all is written. */
  async run(f, mode = "readwrite") {
    if (!this.db) return f(this.maps.conversations, this.maps.messages);
    const tx = this.db.transaction(["conversations", "messages"], mode);
    const end = new Promise((resolve, reject) => {
      tx.oncomplete = resolve;
      tx.onabort = () => reject(tx.error || new Error("not written"));
    });
    end.catch(() => {});
    const store = (name) => {
      const s = tx.objectStore(name);
      return {
        get: (id) => done(s.get(id)),
        put: (row) => done(s.put(row)),
        delete: (id) => done(s.delete(id)),
        all: (conv) => done(conv ? s.index("conv").getAll(conv) : s.getAll()),
      };
    };
    try {
      const result = await f(store("conversations"), store("messages"));
      await end;
      return result;
    } catch (error) {
      try {
        tx.abort();
      } catch {
        /* It has ended already. */
      }
      throw error;
    }
  }

  tell(kind, conv, id) {
    this.channel.postMessage({ kind, conv, id });
  }

  list() {
    return this.run((convs) => convs.all(), "readonly").then((all) => all.sort((a, b) => b.updated - a.updated));
  }

  get(id) {
    return this.run((convs) => convs.get(id), "readonly");
  }

  messages(conv) {
    return this.run((_, messages) => messages.all(conv), "readonly");
  }

  async create(conv) {
    await this.run((convs) => convs.put(conv));
    this.tell("conversation", conv.id);
  }

  /* Changes these fields of a conversation; `selected` is merged by key. False if it is gone. */
  async patch(id, fields) {
    const isThere = await this.run(async (convs) => {
      const conv = await convs.get(id);
      if (!conv) return false;
      const selected = { ...conv.selected, ...fields.selected };
      await convs.put({ ...conv, ...fields, selected });
      return true;
    });
    if (isThere) this.tell("conversation", id);
    return isThere;
  }

  /* Writes a message; false if its conversation is gone. */
  async putMessage(message) {
    const isThere = await this.run(async (convs, messages) => {
      if (!(await convs.get(message.conv))) return false;
      await messages.put(message);
      return true;
    });
    if (isThere) this.tell("message", message.conv, message.id);
    return isThere;
  }

  /* Removes a conversation and gives back what it was, for restore. */
  async remove(id) {
    const removed = await this.run(async (convs, messages) => {
      const conv = await convs.get(id);
      const rows = await messages.all(id);
      for (const row of rows) await messages.delete(row.id);
      await convs.delete(id);
      return { conv, messages: rows };
    });
    this.tell("removed", id);
    return removed;
  }

  async removeMessages(conv, ids) {
    await this.run(async (_, messages) => {
      for (const id of ids) await messages.delete(id);
    });
    this.tell("message", conv);
  }

  async restore({ conv, messages: rows }) {
    await this.run(async (convs, messages) => {
      if (conv) await convs.put(conv);
      for (const row of rows) await messages.put(row);
    });
    const id = conv ? conv.id : rows[0].conv;
    this.tell(conv ? "conversation" : "message", id);
  }

  /* Ids of the conversations in whose title or messages the text is. */
  async search(text) {
    const wanted = text.toLowerCase();
    const found = new Set();
    await this.run(async (convs, messages) => {
      for (const conv of await convs.all()) {
        if (conv.title.toLowerCase().includes(wanted)) {
          found.add(conv.id);
          continue;
        }
        const rows = await messages.all(conv.id);
        if (rows.some((m) => m.content.toLowerCase().includes(wanted))) found.add(conv.id);
      }
    }, "readonly");
    return found;
  }

  /* ---- export and import -------------------------------------------------------------------------------------- */

  async exportAll(onlyId) {
    const conversations = await this.run(async (convs, messages) => {
      const out = [];
      for (const conv of onlyId ? [await convs.get(onlyId)] : await convs.all()) {
        out.push({ ...conv, messages: (await messages.all(conv.id)).map(({ owner, ...m }) => m) });
      }
      return out;
    }, "readonly");
    return { format: "deepinfer-conversations", version: 1, conversations };
  }

  /* Adds the conversations of an export, under new ids, and returns how many there were. */
  async importAll(data) {
    if (!data || data.format !== "deepinfer-conversations" || !Array.isArray(data.conversations)) {
      throw new Error("this is no export of conversations");
    }
    const text = (v, max = TEXT_MAX) => (typeof v === "string" ? v.slice(0, max) : "");
    const time = (v) => (Number.isFinite(v) ? v : Date.now());
    const plain = (v) => (v && typeof v === "object" && !Array.isArray(v) ? v : undefined);
    const read = data.conversations.map((c) => {
      if (!plain(c) || !Array.isArray(c.messages)) throw new Error("a conversation without messages");
      const conv = { id: newId(), title: text(c.title, 300) || "Imported", isNamed: c.isNamed === true, created: time(c.created),
        updated: time(c.updated), settings: plain(c.settings) || {}, selected: {} };
      const ids = new Map(c.messages.map((m) => [m && m.id, newId()]));
      ids.set(ROOT, ROOT);
      const rows = c.messages.map((m) => {
        if (!plain(m) || (m.role !== "user" && m.role !== "assistant")) throw new Error("a message without a role");
        if (m.parent !== null && !ids.has(m.parent)) throw new Error("a message whose predecessor is missing");
        return { id: ids.get(m.id), conv: conv.id, parent: m.parent === null ? null : ids.get(m.parent), role: m.role,
          content: text(m.content), reasoning: text(m.reasoning), created: time(m.created), model: text(m.model, 200),
          state: ["done", "stopped", "interrupted", "error"].includes(m.state) ? m.state : "done",
          finish: text(m.finish, 40) || null, format: m.format === "json" ? "json" : null,
          seed: Number.isFinite(m.seed) ? m.seed : null, usage: plain(m.usage) || null, timing: plain(m.timing) || null,
          error: plain(m.error) ? { kind: text(m.error.kind, 20), message: text(m.error.message, 2000) } : null };
      });
      for (const [parent, child] of Object.entries(plain(c.selected) || {})) {
        if (ids.has(parent) && ids.has(child)) conv.selected[ids.get(parent)] = ids.get(child);
      }
      return { conv, rows };
    });
    await this.run(async (convs, messages) => {
      for (const { conv, rows } of read) {
        await convs.put(conv);
        for (const row of rows) await messages.put(row);
      }
    });
    this.tell("conversation", read[0]?.conv.id);
    return read.length;
  }

  /* ---- messages under way ------------------------------------------------------------------------------------- */

  /* Whether some page still writes this message. */
  isWritten(id) {
    if (this.writing.has(id)) return Promise.resolve(true);
    return new Promise((resolve) => {
      const end = (answer) => {
        clearTimeout(timer);
        this.removeEventListener("alive", listen);
        resolve(answer);
      };
      const listen = (e) => e.detail.id === id && end(true);
      const timer = setTimeout(() => end(false), 400);
      this.addEventListener("alive", listen);
      this.channel.postMessage({ kind: "alive?", id });
    });
  }

  /* A page that goes away can't wait for the database, so it leaves the last state of a message where writing is
   * immediate, and the next page takes it over. */
  leave(message) {
    try {
      localStorage.setItem("deepinfer.rescue." + message.id, JSON.stringify(message));
    } catch {
      /* Too long for that place: what the database has is at most a second old. */
    }
  }

  async rescue() {
    let names = [];
    try {
      names = Object.keys(localStorage).filter((k) => k.startsWith("deepinfer.rescue."));
    } catch {
      return;
    }
    for (const name of names) {
      try {
        const message = JSON.parse(localStorage.getItem(name));
        localStorage.removeItem(name);
        await this.run(async (convs, messages) => {
          const old = await messages.get(message.id);
          const length = (m) => m.content.length + m.reasoning.length;
          if (old && old.state === "streaming" && length(old) <= length(message)) await messages.put(message);
        });
      } catch {
        /* Damaged: the database's own state holds. */
      }
    }
  }
}

export async function openStore() {
  let db = null;
  try {
    db = await openDatabase();
  } catch {
    /* Forbidden or broken: memory it is, and the page says so. */
  }
  const store = new Store(db);
  if (db) await store.rescue();
  return store;
}
