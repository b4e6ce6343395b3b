// The dialog that asks for an API key, on any page that has it.

import { apiKey, keepApiKey } from "./api.js";
import { byId } from "./dom.js";

let asking = null;

/** True once a key was entered, false when the user will not. Asked once, however many wait for it. */
export function askForKey() {
  asking ??= ask().finally(() => { asking = null; });
  return asking;
}

function ask() {
  const dialog = byId("key-dialog");
  let isSubmitted = false;
  byId("key").value = apiKey();
  byId("cancel-key").onclick = () => dialog.close();
  byId("key-form").onsubmit = () => { isSubmitted = true; };
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        const key = byId("key").value.trim();
        if (isSubmitted) keepApiKey(key, byId("keep-key").checked);
        resolve(isSubmitted && key !== "");
      },
      { once: true },
    );
  });
}
