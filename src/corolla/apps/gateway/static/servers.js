// The table of a model's servers. On a phone its rows become cards, so each cell names its column.

import { el, reconcile, say, set } from "./dom.js";
import { blocks, ms, serverName, speed, whole } from "./format.js";

const ROWS_AT_FIRST = 50;

const COLUMNS = [
  { name: "Server", class: "who" },
  { name: "Blocks", text: (server) => blocks(server.blocks) },
  { name: "State", class: "state", text: (server) => stateOf(server) },
  { name: "Tokens/s", class: "right", text: (server) => speed(server.decode_tokens_per_s), title: "One sequence, through this server's blocks" },
  { name: "Cache left", class: "right", text: (server) => whole(server.free_cache_tokens), title: "Tokens for new sessions" },
  { name: "Queue", class: "right", text: (server) => ms(server.queue_s), title: "How long a step waits there now" },
  { name: "Round trip", class: "right", text: (server) => ms(server.rtt_s), title: "From this gateway" },
  { name: "Format", text: (server) => [server.dtype, server.quantization].filter(Boolean).join(" ") },
  { name: "Version", text: (server) => server.version || "–" },
];

export function serverTable() {
  const head = el("tr", { role: "row" }, ...COLUMNS.map(({ name, class: kind, title }) => el("th", { scope: "col", role: "columnheader", class: kind, title }, name)));
  const body = el("tbody", { role: "rowgroup" });
  const table = el("table", { class: "servers", role: "table" }, el("thead", { role: "rowgroup" }, head), body);
  const all = el("button", { type: "button", class: "plain small all-servers", hidden: true });
  const box = Object.assign(el("div", {}, table, all), { table, body, all, showsAll: false });
  all.addEventListener("click", () => {
    box.showsAll = true;
    showServers(box, box.servers, table.getAttribute("aria-label"));
  });
  return box;
}

/** Of a large swarm the first ones, until all are asked for: what changed stands below the table. */
export function showServers(box, servers, caption) {
  box.servers = servers;
  set(box.table, { "aria-label": caption });
  box.all.hidden = box.showsAll || servers.length <= ROWS_AT_FIRST;
  say(box.all, `Show all ${whole(servers.length)} servers`);
  const shown = box.all.hidden ? servers : servers.slice(0, ROWS_AT_FIRST);
  reconcile(box.body, shown, (server) => server.peer, row, (element, server) => element.show(server));
}

function row() {
  const name = el("span", {});
  const id = el("small", {});
  const cells = COLUMNS.map((column) =>
    el("td", { role: "cell", class: column.class, "data-label": column.name }, column.text ? null : [name, id]),
  );
  const element = el("tr", { role: "row" }, ...cells);
  element.show = (server) => {
    say(name, serverName(server));
    say(id, server.name ? `…${server.peer.slice(-6)}` : "");
    set(cells[0], { title: server.peer });
    COLUMNS.forEach((column, place) => {
      if (column.text) sayIn(cells[place], column.text(server));
    });
    set(cells[2], { class: `state ${server.is_silent ? "silent" : server.state}` });
  };
  return element;
}

function sayIn(cell, text) {
  if (!cell.firstChild) cell.append(el("span", {}));
  say(cell.firstChild, text);
}

function stateOf(server) {
  return server.is_silent ? "no answer" : server.state;
}
