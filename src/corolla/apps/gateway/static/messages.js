// The conversation on the page: one element for each message, kept while it grows.

import { el, reconcile, say } from "./dom.js";
import { blocks, ms, serverName, speed, whole } from "./format.js";
import { copyText, showMarkdown } from "./markdown.js";

/** Shows `messages` in `list`. `actions`: `{ edit(place, text), regenerate(place) }`; `busy`: the last one is being written. */
export function showMessages(list, messages, { busy, actions }) {
  const shown = messages.map((message, place) => ({ message, place, isBusy: busy && place === messages.length - 1 }));
  reconcile(
    list,
    shown,
    ({ message, place }) => `${place} ${message.role}`,
    ({ message }) => (message.role === "user" ? userMessage(list, actions) : assistantMessage(list, actions)),
    (element, state) => element.show(state, busy),
  );
}

function userMessage(list, actions) {
  const text = el("div", { class: "text" });
  const edit = el("button", { type: "button", class: "quiet small", onclick: () => startEditing(element, actions) }, "Edit");
  const buttons = el("div", { class: "actions" }, edit);
  const element = el("li", { class: "message user" }, el("h2", { class: "only-read" }, "You"), text, buttons);
  element.show = ({ message }, busy) => {
    say(text, message.text);
    edit.disabled = busy;
  };
  return element;
}

function startEditing(element, actions) {
  const [text, buttons] = [element.querySelector(".text"), element.querySelector(".actions")];
  const place = [...element.parentElement.children].indexOf(element);
  const field = el("textarea", { "aria-label": "Edit your message" });
  field.value = text.textContent;
  const stop = () => {
    form.remove();
    text.hidden = buttons.hidden = false;
    element.classList.remove("editing");
    buttons.querySelector("button").focus();
  };
  const form = el(
    "form",
    {
      onsubmit: (event) => {
        event.preventDefault();
        const changed = field.value.trim();
        stop();
        if (changed) actions.edit(place, changed);
      },
      onkeydown: (event) => {
        if (event.key === "Escape") stop();
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
          event.preventDefault();
          form.requestSubmit();
        }
      },
    },
    field,
    el(
      "div",
      { class: "edit-end" },
      el("button", { type: "button", class: "quiet", onclick: stop }, "Cancel"),
      el("button", { type: "submit" }, "Send again"),
    ),
  );
  text.hidden = buttons.hidden = true;
  element.classList.add("editing");
  element.append(form);
  field.focus();
}

function assistantMessage(list, actions) {
  const text = el("div", { class: "text markdown" });
  const note = el("p", { class: "note", hidden: true });
  const about = el("div", { class: "about", hidden: true });
  const copy = el("button", { type: "button", class: "quiet small" }, "Copy");
  const again = el("button", { type: "button", class: "quiet small" }, "Regenerate");
  const buttons = el("div", { class: "actions" }, copy, again);
  const element = el("li", { class: "message assistant" }, el("h2", { class: "only-read" }, "Model"), text, note, about, buttons);
  copy.addEventListener("click", () => copyText(element.message.text, copy));
  again.addEventListener("click", () => actions.regenerate([...list.children].indexOf(element)));
  element.show = ({ message, isBusy }, busy) => {
    element.message = message;
    element.setAttribute("aria-busy", String(isBusy));
    showMarkdown(text, message.text);
    note.hidden = !message.note;
    say(note, message.note ?? "");
    showAbout(about, message.answer);
    buttons.hidden = isBusy;
    again.disabled = busy;
  };
  return element;
}

/** How fast the answer came, over which servers, and the way to where its time went. */
function showAbout(about, answer) {
  about.hidden = !answer;
  if (!answer || about.answer === answer) return;
  about.answer = answer;
  const parts = [];
  if (answer.tokensPerSecond) parts.push(el("span", { class: "number" }, `${speed(answer.tokensPerSecond)} tokens/s`));
  if (answer.tokens) parts.push(el("span", { class: "number" }, `${whole(answer.tokens)} tokens`));
  if (answer.firstTokenSeconds !== null) {
    parts.push(el("span", { class: "number" }, `first after ${ms(answer.firstTokenSeconds)}`));
  }
  if (answer.route?.length) parts.push(routeOf(answer.route));
  if (answer.traceId) {
    parts.push(el("a", { href: `slow#${encodeURIComponent(answer.traceId)}` }, "Where the time went"));
  }
  about.replaceChildren(...parts);
}

function routeOf(hops) {
  return el(
    "ol",
    { "aria-label": "Route of this answer" },
    ...hops.map((hop) => el("li", { title: hop.peer }, el("span", {}, serverName(hop)), ` ${blocks(`${hop.start}:${hop.end}`)}`)),
  );
}
