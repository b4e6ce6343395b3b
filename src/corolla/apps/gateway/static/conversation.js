// Conversations, kept in this browser only. A message: `{ role, text, note?, answer? }`; `answer` is what the gateway
// said of how it came about. No page elements here.

const STORE = "corolla.conversations";
const SETTINGS = "corolla.settings";
const MOST_CONVERSATIONS = 30;

/** Null: as the model, or the gateway, has it. */
export const DEFAULT_SETTINGS = { model: "", system: "", temperature: null, maxTokens: null };

export function loadSettings() {
  return { ...DEFAULT_SETTINGS, ...read(SETTINGS, {}) };
}

export function saveSettings(settings) {
  write(SETTINGS, settings);
}

export function newConversation() {
  return { id: crypto.randomUUID?.() ?? String(Math.random()), changedAt: Date.now() / 1000, messages: [] };
}

/** All kept ones, the latest first. */
export function loadConversations() {
  const kept = read(STORE, []);
  return Array.isArray(kept) ? kept.filter((one) => Array.isArray(one?.messages)) : [];
}

/** Puts it first; empty ones are not kept. Where the browser's room ends, the oldest are forgotten. */
export function saveConversation(conversation) {
  conversation.changedAt = Date.now() / 1000;
  const others = loadConversations().filter((other) => other.id !== conversation.id);
  const all = conversation.messages.length ? [conversation, ...others] : others;
  for (let room = MOST_CONVERSATIONS; room > 0; room = Math.floor(room / 2)) {
    if (write(STORE, all.slice(0, room))) return;
  }
}

export function forgetConversation(id) {
  write(STORE, loadConversations().filter((other) => other.id !== id));
}

export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user")?.text ?? "";
  return first.replace(/\s+/g, " ").trim().slice(0, 80) || "New chat";
}

/** What the model is given for its next answer. */
export function asPrompt(conversation, system) {
  const said = conversation.messages
    .filter((message) => message.text)
    .map(({ role, text }) => ({ role, content: text }));
  return system.trim() ? [{ role: "system", content: system.trim() }, ...said] : said;
}

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise; // damaged, or the browser keeps nothing
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
