/* One answer under way: the request, what comes of it, waiting for a server that is busy, saving, and its speed.
 *
 * A run writes into its message and tells its listener that something came; it goes on when another conversation is
 * looked at. Events: progress, end. */
import { formatPercent, formatSeconds, formatTokens } from "./common.js";
import { ApiError, chatStream, getJson } from "./stream.js";

const SAVE_MS = 700;
const ATTEMPTS_MAX = 30;
const RATE_WINDOW_MS = 3000;
const SILENCE_MS = 30000; /* the server gives a sign of life every ten seconds */

export class Run extends EventTarget {
  constructor(message, body, store) {
    super();
    this.message = message;
    this.body = body;
    this.store = store;
    this.controller = new AbortController();
    this.t0 = performance.now();
    this.firstAt = 0;
    this.thinkingAt = 0;
    this.contentAt = 0;
    this.lastAt = this.t0;
    this.tokens = 0; /* pieces that came, until the server says how many tokens they are */
    this.thinkingTokens = 0;
    this.isCounted = false; /* the server tells the count with every chunk */
    this.marks = []; /* [time, tokens] of the last seconds */
    this.stats = null; /* {first, last, rate} of /stats.json */
    this.waitUntil = 0;
    this.waitReason = "";
    this.lastSave = 0;
    this.saving = null;
    this.isGone = false; /* the conversation was deleted */
  }

  /* ---- figures ------------------------------------------------------------------------------------------------ */

  thinkingSeconds() {
    return this.thinkingAt ? ((this.contentAt || performance.now()) - this.thinkingAt) / 1000 : 0;
  }

  /* Tokens a second: the server's own when this is its only request, else from the pieces that came. */
  rate() {
    if (this.stats?.rate) return this.stats.rate;
    const first = this.marks[0];
    const last = this.marks[this.marks.length - 1];
    return first && last[0] - first[0] > 250 ? ((last[1] - first[1]) * 1000) / (last[0] - first[0]) : 0;
  }

  liveText() {
    const rate = this.rate();
    const parts = [];
    if (rate) parts.push(`${rate.toFixed(1)} tokens/s`);
    if (this.tokens) parts.push((this.isCounted ? "" : "about ") + formatTokens(this.tokens));
    const s = this.stats;
    const drafts = s ? s.last.engine.draft_tokens - s.first.engine.draft_tokens : 0;
    if (drafts > 0) {
      const accepted = s.last.engine.accepted_tokens - s.first.engine.accepted_tokens;
      parts.push(`${formatPercent(accepted / drafts)} of drafts accepted`);
    }
    return parts.join(" \u00B7 ");
  }

  waitingText() {
    if (this.waitUntil) return "";
    const now = performance.now();
    const s = Math.round((now - this.t0) / 1000);
    if (now - this.lastAt > SILENCE_MS) return `No sign of the server for ${formatSeconds((now - this.lastAt) / 1000)}`;
    return s < 2 ? "" : `Waiting for the first words, ${formatSeconds(s)}`;
  }

  /* ---- course ------------------------------------------------------------------------------------------------- */

  stop() {
    this.controller.abort();
    this.retryNow();
  }

  retryNow() {
    this.wake?.();
  }

  tell(name) {
    this.dispatchEvent(new Event(name));
  }

  async start() {
    const m = this.message;
    m.state = "streaming";
    m.error = null;
    m.finish = null;
    this.store.writing.add(m.id);
    const ticker = setInterval(() => this.tell("progress"), 500);
    const watcher = this.watch();
    try {
      await this.save(true);
      await this.attempts();
      m.state = "done";
    } catch (error) {
      if (error.name === "AbortError" || this.controller.signal.aborted) {
        m.state = "stopped";
      } else {
        m.state = "error";
        const isOurs = error instanceof ApiError;
        m.error = { kind: isOurs ? error.kind : "page", message: error.message, param: error.param || null };
        if (!isOurs) console.error(error);
      }
    }
    clearInterval(ticker);
    clearTimeout(watcher.timer);
    watcher.isOver = true;
    const now = performance.now();
    const end = this.lastPieceAt || now;
    const n = m.usage?.completion_tokens || this.tokens;
    const before = m.timing || {}; /* an answer that was continued has its thinking from then */
    m.timing = {
      first_s: this.firstAt ? (this.firstAt - this.t0) / 1000 : null,
      total_s: (now - this.t0) / 1000,
      thinking_s: this.thinkingSeconds() || before.thinking_s || null,
      thinking_tokens: this.thinkingTokens || before.thinking_tokens || null,
      tokens_per_s: this.firstAt && end - this.firstAt > 50 && n > 1 ? ((n - 1) * 1000) / (end - this.firstAt) : null,
    };
    await this.saving?.catch(() => {});
    this.store.writing.delete(m.id);
    m.owner = null;
    await this.save(true);
    this.tell("end");
  }

  /* A busy or loading server is asked again, as long as nothing has come. */
  async attempts() {
    for (let attempt = 1; ; attempt++) {
      try {
        return await this.attempt();
      } catch (error) {
        const canWait = (error.kind === "busy" || error.kind === "loading") && !this.firstAt;
        if (!canWait || attempt >= ATTEMPTS_MAX) throw error;
        const seconds = error.retryAfter ?? Math.min(30, 2 ** Math.min(attempt, 5));
        this.waitReason = error.kind === "busy" ? "The server is busy." : `The server is not ready: ${error.message.replace(/\.$/, "")}.`;
        await this.sleep(Math.max(1, seconds) * 1000);
        this.controller.signal.throwIfAborted();
        this.t0 = this.lastAt = performance.now();
      }
    }
  }

  sleep(ms) {
    this.waitUntil = performance.now() + ms;
    this.tell("progress");
    return new Promise((resolve) => {
      const timer = setTimeout(() => this.wake(), ms);
      this.wake = () => {
        clearTimeout(timer);
        this.waitUntil = 0;
        this.wake = null;
        resolve();
      };
    });
  }

  async attempt() {
    const m = this.message;
    for await (const chunk of chatStream(this.body, this.controller.signal)) {
      const now = performance.now();
      this.lastAt = now;
      if (!chunk) continue;
      if (typeof chunk.model === "string") m.model = chunk.model;
      const choice = chunk.choices?.[0];
      const seed = choice?.seed ?? chunk.seed;
      if (Number.isFinite(seed)) m.seed = seed;
      if (choice?.finish_reason) m.finish = choice.finish_reason;
      const delta = choice?.delta || {};
      const thought = delta.reasoning_content || "";
      const text = delta.content || "";
      if (thought || text) {
        this.firstAt ||= now;
        this.lastPieceAt = now;
        if (thought) this.thinkingAt ||= now;
        if (text) this.contentAt ||= now;
        m.reasoning += thought;
        m.content += text;
        if (!this.isCounted) this.tokens++;
        if (thought && !text) this.thinkingTokens++;
      }
      if (chunk.usage) {
        m.usage = chunk.usage;
        if (!choice?.finish_reason && choice && thought + text) this.isCounted = true;
        this.tokens = chunk.usage.completion_tokens ?? this.tokens;
        this.thinkingTokens = chunk.usage.completion_tokens_details?.reasoning_tokens || this.thinkingTokens;
      }
      if (thought || text) {
        this.marks.push([now, this.tokens]);
        while (now - this.marks[0][0] > RATE_WINDOW_MS && this.marks.length > 2) this.marks.shift();
      }
      if (now - this.lastSave > SAVE_MS) this.save(false);
      this.tell("progress");
    }
  }

  /* The engine's counters while the answer is written: its speed when nothing else runs, and acceptance. */
  watch() {
    const state = { timer: 0, isOver: false };
    const look = async () => {
      if (!document.hidden) {
        try {
          const now = await getJson("/stats.json", this.controller.signal);
          if (this.stats) {
            const { last } = this.stats;
            const s = now.uptime_s - last.uptime_s;
            const isAlone = now.engine.n_running <= 1 && last.engine.n_running <= 1;
            this.stats.rate = isAlone && s > 0 && this.firstAt ? (now.engine.output_tokens - last.engine.output_tokens) / s : 0;
            this.stats.last = now;
          } else {
            this.stats = { first: now, last: now, rate: 0 };
          }
        } catch {
          return; /* Not given: the pieces tell enough. */
        }
      }
      if (!state.isOver) state.timer = setTimeout(look, 1000);
    };
    look();
    return state;
  }

  /* Writes the message; one write at a time, the last state is always written. */
  async save(isNeeded) {
    if (this.saving && !isNeeded) return;
    this.lastSave = performance.now();
    this.saving = this.store.putMessage({ ...this.message }).then((isThere) => {
      if (!isThere && !this.isGone) {
        this.isGone = true;
        this.stop();
      }
    }, (error) => {
      if (!this.hasFailed) this.dispatchEvent(new CustomEvent("unsaved", { detail: error }));
      this.hasFailed = true;
    });
    await this.saving;
    this.saving = null;
  }
}
