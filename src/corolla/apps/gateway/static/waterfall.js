// Steps as bars: where each one's time went, from the gateway through every hop and back. Pure but for the elements.

import { el } from "./dom.js";
import { ms, serverName } from "./format.js";

const NAMES = { local: "here", wire: "on the wire", queue: "queue", compute: "compute", send: "send", rest: "rest" };

/** A step in the order in which its time passed: `{ kind, what, seconds }`; last what nobody can place. */
export function partsOf(step, route) {
  const hops = step.hops.flatMap((hop, place) => {
    const name = serverName(route.hops[place] ?? { peer: "?" });
    return [
      { kind: "wire", what: `to ${name}`, seconds: hop.wire_s ?? 0 },
      { kind: "queue", what: `queue at ${name}`, seconds: hop.queue_s },
      { kind: "compute", what: `${name} computes`, seconds: hop.compute_s },
      { kind: "send", what: `${name} sends`, seconds: hop.send_s ?? 0 },
    ];
  });
  const back = step.hops.length ? [{ kind: "wire", what: `back from ${serverName(route.hops.at(-1))}`, seconds: step.return_s ?? 0 }] : [];
  const rest = { kind: "rest", what: restName(step), seconds: step.rest_s };
  return [{ kind: "local", what: "here", seconds: step.local_s }, ...hops, ...back, rest];
}

const restName = (step) => (step.hops.length ? "rest" : "servers and travel");

/** The mean of steps over the same route, as a step: of those whose sending is known, if there are any. */
export function meanOf(all) {
  const told = all.filter((step) => step.hops.every((hop) => hop.send_s !== null));
  const steps = told.length ? told : all;
  const mean = (pick) => steps.reduce((sum, step) => sum + (pick(step) ?? 0), 0) / steps.length;
  return {
    local_s: mean((step) => step.local_s),
    return_s: mean((step) => step.return_s),
    rest_s: mean((step) => step.rest_s),
    total_s: mean((step) => step.total_s),
    hops: steps[0].hops.map((_, place) => ({
      queue_s: mean((step) => step.hops[place].queue_s),
      compute_s: mean((step) => step.hops[place].compute_s),
      send_s: mean((step) => step.hops[place].send_s),
      wire_s: mean((step) => step.hops[place].wire_s),
    })),
  };
}

/** Seconds by kind. */
export function byKind(parts) {
  const sums = Object.fromEntries(Object.keys(NAMES).map((kind) => [kind, 0]));
  for (const { kind, seconds } of parts) sums[kind] += seconds;
  return sums;
}

/** `parts` as a bar that is full at `fullSeconds`; where they overlapped they are drawn to fit `totalSeconds`. */
export function bar(parts, totalSeconds, fullSeconds) {
  const sum = parts.reduce((all, part) => all + part.seconds, 0);
  const scale = sum > 0 ? (100 * Math.min(totalSeconds, fullSeconds)) / fullSeconds / sum : 0;
  const segments = parts
    .filter((part) => part.seconds > 0)
    .map((part) => {
      const segment = el("span", { class: part.kind, title: `${part.what}: ${ms(part.seconds)}` });
      segment.style.width = `${part.seconds * scale}%`;
      return segment;
    });
  const box = el("div", { class: totalSeconds > fullSeconds * 1.001 ? "bar-box over" : "bar-box", "aria-hidden": "true" });
  box.append(el("div", { class: "bar-of" }, ...segments));
  return box;
}

/** What a bar's width should mean: the slowest step, unless a few are so slow that the others would vanish. */
export function fullSecondsOf(steps) {
  const totals = steps.map((step) => step.total_s).sort((a, b) => a - b);
  const usual = totals[Math.floor(0.95 * (totals.length - 1))] ?? 1;
  return Math.min(totals.at(-1) ?? 1, 1.5 * usual) || 1;
}

/** Every number of one step. */
export function stepTable(step, route) {
  const cell = (seconds) => el("td", {}, seconds === undefined ? "" : ms(seconds));
  const row = (name, ...seconds) => el("tr", {}, el("th", { scope: "row" }, name), ...seconds.map(cell));
  const head = el("tr", {}, ...["where", NAMES.wire, NAMES.queue, NAMES.compute, NAMES.send].map((name) => el("th", { scope: "col" }, name)));
  const hops = step.hops.map((hop, place) => row(serverName(route.hops[place]), hop.wire_s, hop.queue_s, hop.compute_s, hop.send_s));
  const nothing = undefined;
  const ends = [row(restName(step), step.rest_s, nothing, nothing, nothing)];
  if (step.hops.length) ends.unshift(row("back", step.return_s, nothing, nothing, nothing));
  const table = el(
    "table",
    {},
    el("thead", {}, head),
    el("tbody", {}, row("here", nothing, nothing, step.local_s, nothing), ...hops, ...ends),
  );
  return el("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Times of this step" }, table);
}
