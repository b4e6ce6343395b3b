// The table of a model's servers. On a phone its rows become cards, so each cell names its column.

import { el, reconcile, say, set } from "./dom.js";
import { blocks, ms, serverName, speed, whole } from "./format.js";

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
  return Object.assign(table, { body });
}

export function showServers(table, servers, caption) {
  set(table, { "aria-label": caption });
  reconcile(table.body, servers, (server) => server.peer, row, (element, server) => element.show(server));
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
