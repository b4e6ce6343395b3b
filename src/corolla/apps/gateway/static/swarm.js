// The swarm page: shows each state that the gateway tells of, in place.

import { blockMap, showBlockMap } from "./blockmap.js";
import { showChanges } from "./changes.js";
import { byId, el, reconcile, say } from "./dom.js";
import { ago, count, namedBlocks, serverName } from "./format.js";
import { follow } from "./live.js";
import { serverTable, showServers } from "./servers.js";

let latest = null;

function show(state) {
  latest = state;
  byId("empty").hidden = state.models.length > 0;
  reconcile(byId("models"), state.models, (model) => model.fingerprint, modelCard, (card, model) => card.show(model));
  byId("changes-section").hidden = false;
  byId("no-changes").hidden = state.changes.length > 0;
  showChanges(byId("changes"), state.changes, state.models);
  say(byId("summary"), summaryOf(state.models));
  document.title = `${titleOf(state.models)} · corolla`;
}

function modelCard(model) {
  const name = el("h2", { id: `model-${model.fingerprint.replace(/\W/g, "")}` });
  const health = el("span", {});
  const facts = el("span", { class: "facts number" });
  const verdict = el("p", { class: "verdict" });
  const command = el("code", {});
  const help = el("p", { class: "help quiet-text" }, "On any machine that reaches this swarm: ", command);
  const map = blockMap();
  const table = serverTable();
  const card = el(
    "section",
    { class: "card model", "aria-labelledby": name.id },
    el("div", { class: "model-head" }, name, health, facts),
    verdict,
    help,
    map,
    table,
  );
  card.show = (now) => {
    say(name, now.name);
    health.className = `health ${now.health}`;
    say(health, now.health);
    say(facts, `${count(now.num_blocks, "block")} · ${count(now.servers.length, "server")} · weights ${now.fingerprint.slice(0, 8)}`);
    say(verdict, verdictOn(now));
    help.hidden = now.health !== "broken";
    say(command, `corolla serve MODEL${firstGap(now)} --join ADDRESS`);
    showBlockMap(map, now);
    table.hidden = now.servers.length === 0;
    showServers(table, now.servers, `Servers of ${now.name}`);
  };
  return card;
}

/** What the health means, and what would help. */
function verdictOn(model) {
  if (model.servers.length === 0) return "No server serves this model yet.";
  if (model.health === "broken") {
    return `No server serves ${namedBlocks(model.missing_blocks)} yet: the model cannot answer until one does.`;
  }
  if (model.health === "fragile") {
    const alone = model.fragile.map(({ peer }) => model.servers.find((server) => server.peer === peer)).filter(Boolean);
    const who = alone.slice(0, 3).map(serverName).join(", ") + (alone.length > 3 ? ` and ${alone.length - 3} more` : "");
    return `It answers, but ${namedBlocks(model.fragile_blocks)} ${model.fragile_blocks.length === 1 ? "hangs" : "hang"} on one server only (${who}).`;
  }
  return "Every block is on two servers or more: any one of them may leave.";
}

/** Which blocks a new server should take: the first that are missing. All of them: it needs no telling. */
function firstGap(model) {
  const missing = model.missing_blocks;
  if (missing.length === 0 || missing.length === model.num_blocks) return "";
  const start = missing[0];
  let end = start;
  while (missing.includes(end)) end += 1;
  return ` --blocks ${start}:${end}`;
}

function summaryOf(models) {
  const servers = new Set(models.flatMap((model) => model.servers.map((server) => server.peer)));
  return models.length ? `${count(models.length, "model")} on ${count(servers.size, "server")}` : "";
}

function titleOf(models) {
  const broken = models.filter((model) => model.health === "broken");
  return broken.length ? `${broken.length} broken` : "Swarm";
}

function showLink({ isLive, error }) {
  const live = byId("live");
  live.className = `live ${isLive ? "on" : "off"}`;
  say(live, isLive ? "Live" : "Reconnecting…");
  byId("problem").hidden = !error;
  if (error) say(byId("problem"), error.message + (latest ? ` What is shown was true ${ago(latest.at)}.` : ""));
}

follow("/api/v1/events", show, showLink);
setInterval(() => {
  if (latest) showChanges(byId("changes"), latest.changes, latest.models); // the times pass without news, too
}, 10000);
