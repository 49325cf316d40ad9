// Asks the server how it is, about once a second: less often when nobody looks, or nobody answers.

import { ApiError, fetchJson } from "./api.js";

const PERIOD_MS = 1000;
const MAX_PERIOD_MS = 15000;

export class StatusPoll {
  #timer = null;
  #failures = 0;
  #asking = false;

  /** `onStatus(status)` has null for a server that doesn't answer, `onKey()` that it wants a key. */
  constructor({ onStatus, onKey }) {
    this.onStatus = onStatus;
    this.onKey = onKey;
    document.addEventListener("visibilitychange", () => document.hidden || this.ask());
  }

  async ask() {
    clearTimeout(this.#timer);
    if (this.#asking) return;
    this.#asking = true;
    try {
      this.onStatus(await fetchJson("/duoka/status"));
      this.#failures = 0;
    } catch (fault) {
      this.#failures += 1;
      if (fault instanceof ApiError && fault.status === 401) this.onKey();
      else this.onStatus(null);
    } finally {
      this.#asking = false;
      this.#timer = setTimeout(() => this.ask(), this.#period());
    }
  }

  #period() {
    if (document.hidden) return MAX_PERIOD_MS;
    return Math.min(MAX_PERIOD_MS, PERIOD_MS * 2 ** Math.min(this.#failures, 4));
  }
}

/** One word for all engines: ready, some, or what the first one does that is not. */
export function overallState(engines) {
  const ready = engines.filter((engine) => engine.state === "ready").length;
  if (ready === engines.length && ready > 0) return { state: "ready" };
  if (ready > 0) return { state: "some", ready, total: engines.length };
  // One that comes up again matters more than one that doesn't.
  const states = ["restarting", "starting", "failed"];
  const state = states.find((name) => engines.some((engine) => engine.state === name));
  const reason = engines.find((engine) => engine.state === state)?.reason;
  return { state: state ?? "starting", reason: reason ?? null };
}
