// Which models the gateway answers for, and how the chosen one is.

import { getJson } from "./api.js";
import { byId, el, say } from "./dom.js";
import { namedBlocks } from "./format.js";

/** Fills the choice, keeping what was chosen or `preferred` where it is there. Raises ApiError. */
export async function offerModels(choice, preferred) {
  const models = (await getJson("/v1/models")).data;
  const wanted = choice.value || preferred;
  choice.replaceChildren(...models.map((model) => el("option", { value: model.id }, model.id)));
  if (models.some((model) => model.id === wanted)) choice.value = wanted;
  if (models.length === 0) choice.replaceChildren(el("option", { value: "" }, "No model"));
  choice.disabled = models.length === 0;
  await showHealth(choice.value);
}

/** Beside the choice and in the welcome: whether `name` can answer now. */
export async function showHealth(name) {
  let state;
  try {
    state = await getJson("/api/v1/state");
  } catch (error) {
    if (error.status === undefined) throw error;
    return; // asking will say what is wrong
  }
  const model = state.models.find((one) => one.name === name);
  const health = byId("model-health");
  health.hidden = !model || model.health === "healthy";
  if (model) {
    health.className = `health ${model.health}`;
    say(health, model.health);
  }
  say(byId("welcome-title"), name ? `Ask ${name}` : "No model yet");
  say(byId("welcome-text"), welcome(model, name));
}

function welcome(model, name) {
  if (!name) return "This gateway offers no model.";
  if (!model || model.servers.length === 0) return "No server serves this model yet. It can answer once some do.";
  if (model.health === "broken") return `No server serves ${namedBlocks(model.missing_blocks)} yet. It can answer once one does.`;
  const several = model.servers.length > 1 ? `${model.servers.length} servers` : "one server";
  return `Its ${model.num_blocks} blocks run on ${several}. This conversation is kept in your browser.`;
}
