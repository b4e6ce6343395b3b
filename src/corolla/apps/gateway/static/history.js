// The dialog with the conversations of this browser.

import { forgetConversation, loadConversations, titleOf } from "./conversation.js";
import { byId, el, reconcile } from "./dom.js";
import { ago } from "./format.js";

/** `open(conversation)` is called with the chosen one, `onForgotten(id)` after one was deleted. */
export function showHistory({ open, onForgotten }) {
  const dialog = byId("history-dialog");
  const show = () => {
    const all = loadConversations();
    byId("no-history").hidden = all.length > 0;
    reconcile(byId("history-list"), all, (one) => `${one.id} ${one.changedAt}`, item, () => {});
  };
  const item = (one) => {
    const title = titleOf(one);
    const choose = () => {
      dialog.close();
      open(one);
    };
    const forget = () => {
      forgetConversation(one.id);
      onForgotten(one.id);
      show();
    };
    return el(
      "li",
      {},
      el("button", { type: "button", class: "open", onclick: choose }, el("span", {}, title), el("span", {}, ago(one.changedAt))),
      el("button", { type: "button", class: "quiet small", "aria-label": `Delete: ${title}`, onclick: forget }, "Delete"),
    );
  };
  byId("history-list").replaceChildren();
  show();
  dialog.showModal();
}
