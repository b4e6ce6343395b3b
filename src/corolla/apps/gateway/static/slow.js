// The page "Why is it slow?": the caller's recent answers, and one of them in full.

import { getJson } from "./api.js";
import { byId, el, reconcile, say, set } from "./dom.js";
import { ago, blocks, count, ms, percent, serverName, speed, whole } from "./format.js";
import { askForKey } from "./key.js";
import { bar, byKind, fullSecondsOf, meanOf, partsOf, stepTable } from "./waterfall.js";

const PERIOD_MS = 2500;
const STEPS_AT_FIRST = 40;

let shown = null; // the answer in full
let showsAll = false;

const chosen = () => decodeURIComponent(location.hash.slice(1));

async function refresh() {
  let traces;
  try {
    traces = (await getJson("/api/v1/traces")).traces;
    await refreshAnswer(traces);
    byId("problem").hidden = true;
  } catch (error) {
    if (error.status === undefined) throw error;
    if (error.status === 401 && (await askForKey())) return refresh();
    byId("problem").hidden = false;
    say(byId("problem"), error.message);
    return;
  }
  byId("empty").hidden = traces.length > 0;
  byId("answers").hidden = traces.length === 0;
  showList(traces);
}

/** Fetches the chosen answer, or the newest, when it is another than the one shown or has gone on. */
async function refreshAnswer(traces) {
  const wanted = traces.find((trace) => trace.id === chosen()) ?? traces[0];
  if (!wanted) return;
  const isShown = shown?.id === wanted.id && shown.num_steps === wanted.num_steps && shown.finish_reason === wanted.finish_reason;
  if (isShown) return;
  if (shown?.id !== wanted.id) showsAll = false;
  shown = await getJson(`/api/v1/traces/${encodeURIComponent(wanted.id)}`);
  showAnswer(shown);
}

function showList(traces) {
  reconcile(byId("list"), traces, (trace) => trace.id, listItem, (item, trace) => item.show(trace));
}

function listItem(trace) {
  const [name, pace, about] = [el("span", {}), el("span", { class: "number" }), el("small", {})];
  const link = el("a", { href: `#${encodeURIComponent(trace.id)}` }, el("div", { class: "name" }, name, pace), about);
  const item = el("li", {}, link);
  item.show = (now) => {
    say(name, now.model);
    say(pace, now.tokens_per_s ? `${speed(now.tokens_per_s)}/s` : "");
    say(about, [ago(now.started_at), count(now.answered_tokens, "token"), endOf(now)].filter(Boolean).join(" · "));
    set(link, { "aria-current": shown?.id === now.id ? "true" : false });
  };
  return item;
}

function endOf(trace) {
  if (trace.finish_reason === null) return "running";
  return trace.finish_reason === "stop" ? "" : trace.finish_reason;
}

// --- one answer

function showAnswer(trace) {
  byId("answer").hidden = false;
  say(byId("answer-title"), trace.model);
  const facts = [
    ago(trace.started_at),
    count(trace.answered_tokens, "token"),
    trace.tokens_per_s ? `${speed(trace.tokens_per_s)} tokens/s` : "",
    trace.first_token_s === null ? "" : `first after ${ms(trace.first_token_s)}`,
    endOf(trace),
  ];
  say(byId("answer-facts"), facts.filter(Boolean).join(" · "));
  const decode = trace.steps.filter((step) => step.kind === "decode" && step.hops.length > 0);
  const last = decode.at(-1);
  const mean = last ? meanOf(decode.filter((step) => step.route === last.route)) : null;
  const route = last ? trace.routes[last.route] : trace.route;
  say(byId("verdict"), verdictOn(trace, mean, route));
  byId("average").replaceChildren(...(mean ? [average(mean, route)] : []));
  byId("routes").replaceChildren(...routeCards(trace, mean, route));
  showSteps(trace);
}

/** In a sentence: what a token costs, and what most of that is. */
function verdictOn(trace, mean, route) {
  if (!mean) return trace.num_steps ? "Only the prompt has gone round so far." : "Nothing has gone round yet.";
  const sums = byKind(partsOf(mean, route));
  const [kind, seconds] = Object.entries(sums).sort((a, b) => b[1] - a[1])[0];
  const share = `${ms(seconds)} (${percent(seconds / mean.total_s)})`;
  const busiest = [...mean.hops.keys()].sort((a, b) => mean.hops[b][`${kind}_s`] - mean.hops[a][`${kind}_s`])[0];
  const name = route.hops[busiest] ? serverName(route.hops[busiest]) : "";
  const several = route.hops.length > 1;
  const said = {
    local: `most of it, ${share}, is this gateway's own work: embeddings, head and sampling.`,
    wire: `most of it, ${share}, is travel between machines.`,
    send: `most of it, ${share}, is servers sending what they computed${several ? `, longest at ${name}` : ""}.`,
    rest: `most of it, ${share}, is beyond what anybody measured: slower links than their round trips say, or busy machines.`,
    queue: `most of it, ${share}, is waiting for busy servers${several ? `, longest at ${name}` : ""}.`,
    compute: `most of it, ${share}, is computing${several ? `, longest on ${name}` : ` on ${name}`}.`,
  };
  return `A token takes ${ms(mean.total_s)}; ${said[kind]}`;
}

function average(mean, route) {
  const parts = partsOf(mean, route);
  const facts = parts
    .filter((part) => part.seconds >= 0.00005)
    .map((part) => el("div", {}, el("dt", { title: part.what }, el("span", { class: `swatch ${part.kind}` }), part.what), el("dd", {}, el("b", {}, ms(part.seconds)), ` · ${percent(part.seconds / mean.total_s)}`)));
  return el("div", { class: "average" }, el("h3", {}, "A token's way, on average"), bar(parts, mean.total_s, mean.total_s), el("dl", {}, ...facts));
}

function routeCards(trace, mean, route) {
  if (!route) return [];
  const changes = trace.routes.length > 1 ? ` The route changed ${trace.route_changes === 1 ? "once" : `${trace.route_changes} times`}.` : "";
  const measured = mean ? `${ms(mean.total_s)} a token, measured` : "not measured yet";
  const expected = route.expected_s === null ? "" : `; ${ms(route.expected_s)} were expected`;
  const taken = routeCard("Route taken", route, `${measured}${expected}.${changes}`, "");
  const other = trace.runner_up;
  if (!other) return [taken, el("div", { class: "card" }, el("h2", {}, "Runner-up"), el("p", { class: "cost quiet-text" }, "No other chain covered every block."))];
  const first = trace.routes[0]; // what it was the runner-up of
  const slower = first.expected_s && other.expected_s ? compared(other.expected_s, first.expected_s, trace.routes.length > 1) : "";
  return [taken, routeCard("Runner-up", other, `${ms(other.expected_s)} a token expected${slower}.`, " is-other")];
}

function compared(other, taken, hasChanged) {
  const change = other / taken - 1;
  const than = hasChanged ? "the first route, when the answer began" : "the route taken";
  if (Math.abs(change) < 0.05) return `: as good as ${than}, within 5 %`;
  return `: ${percent(Math.abs(change))} ${change > 0 ? "slower" : "faster"} than ${than}`;
}

function routeCard(title, route, cost, kind) {
  const hops = route.hops.map((hop) => el("li", { title: hop.peer }, el("span", {}, serverName(hop)), el("span", {}, `blocks ${blocks(hop.blocks)}`)));
  return el("div", { class: `card${kind}` }, el("h2", {}, title), el("ol", { class: "hops" }, ...hops), el("p", { class: "cost quiet-text number" }, cost));
}

// --- steps

function showSteps(trace) {
  const steps = trace.steps.map((step, place) => ({ step, number: numberOf(trace, place) }));
  const visible = showsAll ? steps : steps.slice(0, STEPS_AT_FIRST);
  const full = { prefill: fullSecondsOf(trace.steps.filter((step) => step.kind === "prefill")), decode: fullSecondsOf(trace.steps.filter((step) => step.kind === "decode")) };
  reconcile(
    byId("steps"),
    visible,
    ({ number, step }) => `${trace.id} ${number} ${full[step.kind]}`,
    ({ step, number }) => stepItem(trace, step, number, full[step.kind]),
    () => {},
  );
  const all = byId("all-steps");
  all.hidden = showsAll || steps.length <= STEPS_AT_FIRST;
  say(all, `Show all ${whole(steps.length)} steps${trace.num_steps > steps.length ? ` that were kept, of ${whole(trace.num_steps)}` : ""}`);
}

/** Of a long answer the middle is not kept. */
function numberOf(trace, place) {
  const dropped = trace.num_steps - trace.steps.length;
  return place < trace.num_first_steps ? place : place + dropped;
}

function stepItem(trace, step, number, fullSeconds) {
  const route = trace.routes[step.route];
  const label = step.kind === "prefill" ? `prompt, ${whole(step.tokens)}` : `token ${whole(number + 1)}`;
  const summary = el("summary", {}, el("span", {}, label), bar(partsOf(step, route), step.total_s, fullSeconds), el("span", {}, ms(step.total_s)));
  const details = el("details", {}, summary);
  details.addEventListener("toggle", () => {
    if (details.children.length === 1) details.append(stepTable(step, route));
  });
  const before = trace.steps[trace.steps.indexOf(step) - 1];
  const change = before && before.route !== step.route ? el("p", { class: "change" }, `Another route: ${route.hops.map(serverName).join(" → ")}`) : null;
  return el("li", {}, change, details);
}

byId("all-steps").addEventListener("click", () => {
  showsAll = true;
  showSteps(shown);
});
addEventListener("hashchange", refresh);
refresh();
setInterval(() => {
  if (!document.hidden) refresh();
}, PERIOD_MS);
