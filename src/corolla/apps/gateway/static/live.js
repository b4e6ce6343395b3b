// A stream of events that comes back by itself, and rests while the page is hidden.

import { request, serverSentEvents } from "./api.js";
import { askForKey } from "./key.js";

const PAUSES_MS = [500, 1000, 2000, 5000];

/** Calls `onData` with each event's JSON, `onState` with `{ isLive, error }`. Runs until the page is left. */
export async function follow(path, onData, onState) {
  let failures = 0;
  for (;;) {
    await untilVisible();
    const hidden = new AbortController();
    const onHidden = () => { if (document.hidden) hidden.abort(); };
    document.addEventListener("visibilitychange", onHidden);
    try {
      const response = await request(path, { signal: hidden.signal });
      for await (const { data } of serverSentEvents(response)) {
        failures = 0;
        onState({ isLive: true, error: null });
        onData(JSON.parse(data));
      }
      onState({ isLive: false, error: null });
    } catch (error) {
      if (error.name !== "AbortError") {
        if (error.status === undefined) throw error;
        onState({ isLive: false, error });
        if (error.status === 401 && (await askForKey())) continue;
      }
    } finally {
      document.removeEventListener("visibilitychange", onHidden);
    }
    await new Promise((resolve) => setTimeout(resolve, PAUSES_MS[Math.min(failures++, PAUSES_MS.length - 1)]));
  }
}

function untilVisible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", function seen() {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", seen);
      resolve();
    });
  });
}
