/* Requests to the server: JSON answers, streams of events, and errors by what a person can do about them. */
import { apiKey } from "./common.js";

/* kind: offline (no answer), busy (429), loading (503), key (401, 403), request (other 4xx), server (5xx), stream (an
 * error inside a stream), lost (a stream that ended early). retryAfter is in seconds, null without one. */
export class ApiError extends Error {
  constructor(kind, message, more = {}) {
    super(message);
    this.kind = kind;
    this.retryAfter = null;
    Object.assign(this, more);
  }
}

function kindOf(status) {
  if (status === 401 || status === 403) return "key";
  if (status === 429) return "busy";
  if (status === 503) return "loading";
  return status >= 500 ? "server" : "request";
}

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", credentials: "omit", ...options,
      headers: { ...apiKey.headers(), ...options.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("offline", "The server can't be reached.");
  }
  if (response.ok) return response;
  let body = {};
  try {
    body = JSON.parse(await response.text());
  } catch {
    /* A proxy's page, or nothing: the status says what there is to say. */
  }
  const after = Number.parseInt(response.headers.get("retry-after"), 10);
  const error = body && typeof body.error === "object" && body.error ? body.error : {};
  throw new ApiError(kindOf(response.status), String(error.message || `The server answered ${response.status} ${response.statusText}`), {
    status: response.status, param: error.param || null, code: error.code || null,
    retryAfter: Number.isFinite(after) ? Math.min(after, 3600) : null, requestId: response.headers.get("x-request-id"),
  });
}

export async function getJson(path, signal) {
  const response = await request(path, { signal });
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("server", `${path}: the answer is no JSON.`);
  }
}

/* The data of server-sent events, as text; null for a comment, which only says that the server is there. */
async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += done ? decoder.decode() + "\n" : decoder.decode(value, { stream: true });
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line[0] === ":") {
          yield null;
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/* The chunks of a chat completion; null for a sign of life. Throws ApiError, or AbortError when signal fires. */
export async function* chatStream(body, signal) {
  const response = await request("/v1/chat/completions", {
    method: "POST", signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json" },
  });
  const isStream = (response.headers.get("content-type") || "").includes("event-stream");
  if (!isStream) {
    const whole = await response.json().catch(() => null);
    if (!whole?.choices) throw new ApiError("server", "The answer is no chat completion.");
    yield { ...whole, choices: whole.choices.map((c) => ({ ...c, delta: c.message })) };
    return;
  }
  let isFinished = false;
  try {
    for await (const data of events(response.body)) {
      if (data === null) {
        yield null;
        continue;
      }
      if (data.trim() === "[DONE]") return;
      let chunk;
      try {
        chunk = JSON.parse(data);
      } catch {
        throw new ApiError("stream", "The server sent an event that can't be read.");
      }
      if (chunk.error) {
        throw new ApiError("stream", String(chunk.error.message || "The server reported an error."), { code: chunk.error.code });
      }
      if (chunk.choices?.some((c) => c.finish_reason)) isFinished = true;
      yield chunk;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("lost", "The connection was lost before the answer was complete.");
  }
  if (!isFinished) throw new ApiError("lost", "The answer ended before it was complete.");
}
