// Coverage at a glance: a strip that says how many servers each block has, and below it each span where it lies.
// Sizes are set through the style object: the page's policy allows no styles in markup.

import { el, reconcile, say, set } from "./dom.js";
import { blocks, serverName } from "./format.js";

const MOST_LANES = 10;
const MOST_TICKS = 8;

export function blockMap() {
  const coverage = el("div", { class: "row" });
  const axis = el("div", { class: "row axis" });
  const lanes = el("div", {});
  const more = el("p", { class: "more", hidden: true });
  const parts = el("div", { "aria-hidden": "true" }, coverage, axis, lanes, more);
  return Object.assign(el("div", { class: "map", role: "img" }, parts), { coverage, axis, lanes, more });
}

export function showBlockMap(map, model) {
  const numBlocks = model.num_blocks;
  const runs = model.coverage.length ? model.coverage : [{ blocks: `0:${numBlocks}`, servers: 0 }];
  set(map, { "aria-label": `Servers of each block: ${runs.map(saidRun).join(", ")}` });
  reconcile(map.coverage, runs, (run) => run.blocks, () => el("div", {}, el("span", {})), (cell, run) => {
    set(cell, { class: `run ${kindOf(run.servers)}`, title: saidRun(run) });
    say(cell.firstChild, String(run.servers));
    place(cell, run.blocks, numBlocks);
  });
  reconcile(map.axis, ticks(numBlocks), (tick) => `${numBlocks} ${tick}`, (tick) => el("span", {}, String(tick)), (mark, tick) => {
    mark.style.left = `${(100 * tick) / numBlocks}%`;
  });
  const packed = pack(groups(model.servers));
  reconcile(map.lanes, packed.slice(0, MOST_LANES), (lane) => packed.indexOf(lane), () => el("div", { class: "row" }), (row, lane) => {
    reconcile(row, lane, (group) => group.key, () => el("div", {}), (bar, group) => showSpan(bar, group, numBlocks));
  });
  const hidden = packed.slice(MOST_LANES).flat().length;
  map.more.hidden = hidden === 0;
  map.more.textContent = `and ${hidden} more spans, in the table below`;
}

/** Servers of the same span and state are one bar, so that a thousand servers stay readable. */
function groups(servers) {
  const found = new Map();
  for (const server of servers) {
    const state = server.is_silent ? "silent" : server.state;
    const key = `${server.blocks} ${state}`;
    if (!found.has(key)) {
      const [start, end] = server.blocks.split(":").map(Number);
      found.set(key, { key, start, end, blocks: server.blocks, state, servers: [] });
    }
    found.get(key).servers.push(server);
  }
  return [...found.values()].sort((a, b) => a.start - b.start || b.end - a.end);
}

/** Each in the first lane where it overlaps nothing. */
function pack(spans) {
  const lanes = [];
  for (const span of spans) {
    const lane = lanes.find((one) => one.at(-1).end <= span.start);
    if (lane) lane.push(span);
    else lanes.push([span]);
  }
  return lanes;
}

function showSpan(bar, group, numBlocks) {
  const names = group.servers.map(serverName);
  const label = names.length === 1 ? names[0] : `${names.length} servers`;
  set(bar, {
    class: `span ${group.state}`,
    title: `${names.slice(0, 8).join(", ")}${names.length > 8 ? " …" : ""}: blocks ${blocks(group.blocks)}, ${group.state}`,
  });
  say(bar, label);
  place(bar, group.blocks, numBlocks);
}

function place(element, span, numBlocks) {
  const [start, end] = span.split(":").map(Number);
  element.style.left = `calc(${(100 * start) / numBlocks}% + 1px)`;
  element.style.width = `calc(${(100 * (end - start)) / numBlocks}% - 2px)`;
}

function ticks(numBlocks) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((one) => numBlocks / one <= MOST_TICKS) ?? numBlocks;
  const found = [];
  for (let tick = 0; tick <= numBlocks - step / 2; tick += step) found.push(tick);
  return [...found, numBlocks];
}

function kindOf(servers) {
  return servers === 0 ? "none" : servers === 1 ? "one" : servers < 4 ? "some" : "many";
}

function saidRun({ blocks: span, servers }) {
  const who = servers === 0 ? "no server" : servers === 1 ? "one server" : `${servers} servers`;
  return `${blocks(span)}: ${who}`;
}
