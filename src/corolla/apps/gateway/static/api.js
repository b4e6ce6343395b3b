// Talks to the gateway: JSON, streamed answers, and the API key where it asks for one.

import { namedBlocks } from "./format.js";

const KEY = "corolla.apiKey";

/** What the gateway said instead of an answer, in words for people. */
export class ApiError extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export function apiKey() {
  return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
}

/** Kept until this tab is closed, or on this device. */
export function keepApiKey(key, onThisDevice) {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
  if (key) (onThisDevice ? localStorage : sessionStorage).setItem(KEY, key);
}

/** `path` is the gateway's, wherever a proxy puts that. Raises ApiError; an AbortError passes through. */
export async function request(path, { method = "GET", body = null, signal = null } = {}) {
  const headers = {};
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  if (body !== null) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path.slice(1), { method, headers, signal, body: body === null ? null : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The gateway does not answer. Is it still running?");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

export async function getJson(path, options) {
  return (await request(path, options)).json();
}

/** The gateway's own words; blocks that nobody serves as people count them. */
export function sayError(error) {
  if (Array.isArray(error?.blocks) && error.blocks.length) return `No server serves ${namedBlocks(error.blocks)} yet.`;
  return typeof error?.message === "string" ? error.message : "";
}

async function errorOf(response) {
  let said = "";
  try {
    said = sayError((await response.json()).error);
  } catch {
    // No JSON: the status has to do.
  }
  const retryAfter = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
  return new ApiError(
    response.status,
    said || `The gateway answered ${response.status}.`,
    Number.isNaN(retryAfter) ? null : retryAfter,
  );
}

/** The events of a `text/event-stream` response: `{ event, data }`, the data as text. */
export async function* serverSentEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  try {
    for (;;) {
      let chunk;
      try {
        chunk = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError(0, "The connection to the gateway was lost.");
      }
      if (chunk.done) return;
      unread += chunk.value.replaceAll("\r\n", "\n");
      const events = unread.split("\n\n");
      unread = events.pop();
      for (const text of events) {
        const event = parse(text);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(text) {
  let event = "message";
  const data = [];
  for (const line of text.split("\n")) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  return data.length ? { event, data: data.join("\n") } : null;
}
