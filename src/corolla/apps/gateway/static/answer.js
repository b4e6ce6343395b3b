// One streamed answer: asks, and tells what comes as it comes.

import { ApiError, request, sayError, serverSentEvents } from "./api.js";

/**
 * Streams an answer to `messages`; calls `onText` with all of it so far. Gives
 * `{ finish, seconds, tokens, tokensPerSecond, firstTokenSeconds, traceId, route }`. Raises ApiError or AbortError.
 */
export async function streamAnswer({ model, messages, settings, signal, onText }) {
  const body = {
    model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (settings.temperature !== null) body.temperature = settings.temperature;
  if (settings.maxTokens !== null) body.max_completion_tokens = settings.maxTokens;
  const began = performance.now();
  const response = await request("/v1/chat/completions", { method: "POST", body, signal });
  const about = { finish: null, tokens: null, tokensPerSecond: null, firstTokenSeconds: null, traceId: null, route: [] };
  let text = "";
  for await (const { data } of serverSentEvents(response)) {
    if (data === "[DONE]") continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, sayError(chunk.error) || "The answer broke off.");
    const choice = chunk.choices?.[0];
    if (choice?.delta?.content) {
      about.firstTokenSeconds ??= (performance.now() - began) / 1000;
      text += choice.delta.content;
      onText(text);
    }
    about.finish = choice?.finish_reason ?? about.finish;
    about.tokens = chunk.usage?.completion_tokens ?? about.tokens;
    if (chunk.corolla) {
      about.traceId = chunk.corolla.trace_id;
      about.tokensPerSecond = chunk.corolla.tokens_per_s;
      about.route = chunk.corolla.route ?? [];
    }
  }
  if (about.finish === null) throw new ApiError(0, "The answer broke off before its end.");
  return { ...about, seconds: (performance.now() - began) / 1000 };
}

/** What went wrong, for people: the gateway's own words, and what to do. */
export function explain(error) {
  if (error.status === 401) return "This gateway asks for an API key.";
  if (error.status === 429) {
    return error.retryAfter ? `The gateway is busy. Try again in ${error.retryAfter} s.` : "The gateway is busy. Try again soon.";
  }
  return error.message;
}
