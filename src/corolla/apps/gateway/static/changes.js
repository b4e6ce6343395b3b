// What changed lately, in sentences.

import { el, reconcile, say } from "./dom.js";
import { ago, blocks, serverName } from "./format.js";

const MOST_SHOWN = 20;

const SENTENCES = {
  joined: (change) => `${serverName(change)} joined with blocks ${blocks(change.blocks)}`,
  left: (change) => `${serverName(change)} left; it had blocks ${blocks(change.blocks)}`,
  silent: (change) => `${serverName(change)} does not answer; it had blocks ${blocks(change.blocks)}`,
  answers: (change) => `${serverName(change)} answers again`,
  state: (change) => `${serverName(change)} is ${change.now}, was ${change.before}`,
  moved: (change) => `${serverName(change)} moved from blocks ${blocks(change.before)} to ${blocks(change.now)}`,
  health: (change) => healthSentence(change),
};
const TONES = { silent: "bad", joined: "", answers: "" };

export function showChanges(list, changes, models) {
  const named = models.length > 1;
  const shown = changes.slice(0, MOST_SHOWN);
  reconcile(
    list,
    shown,
    (change) => [change.at, change.kind, change.model, change.peer, change.now].join(" "),
    (change) => {
      const text = SENTENCES[change.kind]?.(change) ?? change.kind;
      const model = named && change.kind !== "health" ? ` (${change.model})` : "";
      const time = el("time", { datetime: new Date(change.at * 1000).toISOString() });
      return Object.assign(el("li", {}, time, el("span", { class: toneOf(change) }, text + model)), { time });
    },
    (element, change) => say(element.time, ago(change.at)),
  );
}

function healthSentence(change) {
  if (change.now === "broken" && change.blocks) return `${change.model} is broken: no server for blocks ${ranges(change.blocks)}`;
  return `${change.model} is ${change.now}, was ${change.before}`;
}

/** `"4:6, 9:10"` as people count blocks. */
function ranges(text) {
  return text.split(",").map((span) => blocks(span.trim())).join(", ");
}

function toneOf(change) {
  if (change.kind === "health") return change.now === "broken" ? "bad" : change.now === "healthy" ? "good" : "";
  return TONES[change.kind] ?? "";
}
