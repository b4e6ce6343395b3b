// The chat page: what the user does, the conversation, and the gateway put together.

import { explain, streamAnswer } from "./answer.js";
import * as kept from "./conversation.js";
import { byId, say } from "./dom.js";
import { showHistory } from "./history.js";
import { askForKey } from "./key.js";
import { showMessages } from "./messages.js";
import { offerModels, showHealth } from "./models.js";

const HEALTH_PERIOD_MS = 15000;
const NEAR_END_PX = 80;

const settings = kept.loadSettings();
let conversation = kept.newConversation();
let answering = null; // the AbortController of the answer that is being written

const scroller = byId("scroller");
const question = byId("question");
const modelChoice = byId("model");

// --- showing

function show() {
  const isEmpty = conversation.messages.length === 0;
  byId("welcome").hidden = !isEmpty || !byId("problem").hidden;
  const follow = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END_PX;
  showMessages(byId("messages"), conversation.messages, { busy: answering !== null, actions: { edit, regenerate } });
  byId("send").hidden = answering !== null;
  byId("stop").hidden = answering === null;
  byId("send").disabled = !question.value.trim() || !modelChoice.value;
  if (follow) scroller.scrollTop = scroller.scrollHeight;
}

let isShowDue = false;

/** At most once a frame, however fast tokens come. */
function showSoon() {
  if (isShowDue) return;
  isShowDue = true;
  requestAnimationFrame(() => {
    isShowDue = false;
    show();
  });
}

let onRetry = null; // what "Try again" does

function showProblem(text, retry = null) {
  byId("problem").hidden = !text;
  byId("retry").hidden = retry === null;
  onRetry = retry;
  say(byId("problem-text"), text);
}

function announce(text) {
  say(byId("announce"), text);
}

// --- asking

function send(text) {
  conversation.messages.push({ role: "user", text });
  kept.saveConversation(conversation);
  scroller.scrollTop = scroller.scrollHeight;
  return answer();
}

function edit(place, text) {
  conversation.messages.length = place;
  return send(text);
}

function regenerate(place) {
  return answer(conversation.messages.splice(place));
}

function answerAgain() {
  const last = conversation.messages.length - 1;
  return conversation.messages[last].role === "assistant" ? regenerate(last) : answer();
}

/**
 * Has the model write the next message. What came before a stop or a failure is kept; when nothing came, what stood
 * there `before` stands there again.
 */
async function answer(before = []) {
  if (answering) return;
  const own = conversation;
  const messages = kept.asPrompt(own, settings.system);
  const message = { role: "assistant", text: "" };
  answering = new AbortController();
  own.messages.push(message);
  showProblem("");
  announce("The model is answering.");
  show();
  try {
    message.answer = await streamAnswer({
      model: modelChoice.value,
      messages,
      settings,
      signal: answering.signal,
      onText: (text) => {
        message.text = text;
        showSoon();
      },
    });
    message.note = noteOf(message);
    announce("The answer is complete.");
  } catch (error) {
    await onFailure(error, own, message);
  } finally {
    answering = null;
    const place = own.messages.indexOf(message); // nowhere, when the conversation was deleted meanwhile
    if (place >= 0 && !message.text && !message.answer) own.messages.splice(place, 1, ...before);
    kept.saveConversation(own);
    show();
    showHealth(modelChoice.value); // an answer, or none, is news of it
  }
}

function noteOf(message) {
  if (message.answer.finish === "length") return "The answer was cut off at its longest length; Settings has that.";
  if (message.answer.finish === "content_filter") return "The gateway held a part back.";
  return message.text ? undefined : "The model said nothing.";
}

async function onFailure(error, own, message) {
  if (error.name === "AbortError") {
    message.note = "Stopped.";
    announce("Stopped.");
    return;
  }
  if (error.status === undefined) throw error; // a mistake of ours: seen in the console, and by the tests
  message.note = message.text ? "The answer broke off." : undefined;
  if (own === conversation) showProblem(explain(error), answerAgain);
  if (error.status === 401 && (await askForKey())) await loadModels();
}

/** As high as its text, where the browser's stylesheet cannot do it (`field-sizing`). */
function fit(field) {
  if (CSS.supports("field-sizing", "content")) return;
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

// --- models and settings

async function loadModels() {
  try {
    await offerModels(modelChoice, settings.model);
    showProblem("");
  } catch (error) {
    if (error.status === undefined) throw error;
    if (error.status === 401 && (await askForKey())) return loadModels();
    showProblem(explain(error), loadModels);
  }
  return show();
}

/** What a field says, within its bounds; null when it says nothing. */
function numberIn(id, least, most) {
  const said = byId(id).value.trim();
  return said === "" || Number.isNaN(Number(said)) ? null : Math.min(most, Math.max(least, Number(said)));
}

// --- other conversations

function open(other) {
  answering?.abort();
  conversation = other;
  showProblem("");
  show();
  scroller.scrollTop = scroller.scrollHeight;
}

function onForgotten(id) {
  if (id !== conversation.id) return;
  conversation.messages.length = 0; // for an answer that is still being written
  open(kept.newConversation());
}

// --- wiring

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (!text || answering || !modelChoice.value) return;
  question.value = "";
  fit(question);
  send(text);
});
question.addEventListener("input", () => {
  fit(question);
  show();
});
question.addEventListener("keydown", (event) => {
  const isTouch = matchMedia("(pointer: coarse)").matches; // there, Enter is for new lines
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !isTouch) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) answering?.abort();
});
byId("stop").addEventListener("click", () => {
  answering?.abort();
  question.focus();
});
byId("retry").addEventListener("click", () => onRetry?.());
byId("new-chat").addEventListener("click", () => {
  open(kept.newConversation());
  question.focus();
});
byId("history").addEventListener("click", () => showHistory({ open, onForgotten }));
modelChoice.addEventListener("change", () => {
  settings.model = modelChoice.value;
  kept.saveSettings(settings);
  showHealth(modelChoice.value);
});

byId("open-settings").addEventListener("click", () => {
  byId("system").value = settings.system;
  byId("temperature").value = settings.temperature ?? "";
  byId("max-tokens").value = settings.maxTokens ?? "";
  byId("settings").showModal();
});
byId("settings").addEventListener("close", () => {
  settings.system = byId("system").value;
  settings.temperature = numberIn("temperature", 0, 2);
  const maxTokens = numberIn("max-tokens", 1, 131072);
  settings.maxTokens = maxTokens === null ? null : Math.floor(maxTokens);
  kept.saveSettings(settings);
});
byId("change-key").addEventListener("click", async () => {
  byId("settings").close();
  if (await askForKey()) loadModels();
});

addEventListener("pagehide", () => {
  if (!answering) return;
  conversation.messages.at(-1).note = "Stopped."; // now: what follows the abort may not run any more
  kept.saveConversation(conversation);
  answering.abort();
});

conversation = kept.loadConversations()[0] ?? conversation;
show();
scroller.scrollTop = scroller.scrollHeight;
if (!matchMedia("(pointer: coarse)").matches) question.focus();
loadModels();
setInterval(() => {
  if (!document.hidden && modelChoice.value) showHealth(modelChoice.value);
}, HEALTH_PERIOD_MS);
