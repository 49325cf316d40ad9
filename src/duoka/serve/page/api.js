// Speaks to the server: OpenAI's form for chats, and duoka's own status.

import { key } from "./store.js";

/** What the server refused; `status` is 0 where it could not be reached. */
export class ApiError extends Error {
  constructor(status, error = {}, retrySeconds = null) {
    super(typeof error.message === "string" ? error.message : "");
    this.status = status;
    this.code = error.code ?? null;
    this.retrySeconds = retrySeconds;
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  const secret = key.read();
  if (secret) headers.Authorization = `Bearer ${secret}`;
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options, headers });
  } catch (fault) {
    if (options.signal?.aborted) throw fault;
    throw new ApiError(0);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  const retrySeconds = parseRetryAfter(response.headers.get("Retry-After"));
  return new ApiError(response.status, body?.error ?? {}, retrySeconds);
}

/** Seconds, or a date, as HTTP allows. */
export function parseRetryAfter(value) {
  if (!value) return null;
  const seconds = /^\d+$/.test(value) ? Number(value) : (Date.parse(value) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.max(0, Math.ceil(seconds)) : null;
}

export async function fetchJson(path, timeoutMs = 10000) {
  const response = await request(path, { signal: AbortSignal.timeout(timeoutMs) }).catch((fault) => {
    throw fault instanceof ApiError ? fault : new ApiError(0);
  });
  return response.json();
}

/** The data of each server-sent event, whole, however the network has cut them up. */
async function* readEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (buffer + decoder.decode(value, { stream: true })).split("\n");
      buffer = lines.pop();
      for (const line of lines.map((text) => text.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * Yields the chunks of a streamed answer. A stream that ends without `[DONE]` was cut off: an
 * answer that stops in the middle must not look like a whole one.
 */
export async function* streamChat(body, signal) {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  try {
    for await (const data of readEvents(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(response.status, chunk.error);
      yield chunk;
    }
  } catch (fault) {
    if (signal.aborted || fault instanceof ApiError) throw fault;
  }
  throw new ApiError(0, { code: "cut_off" });
}
