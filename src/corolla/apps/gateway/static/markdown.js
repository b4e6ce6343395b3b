// A model's markdown as elements. It is not trusted: marked parses it, with markup in it shown as the text that it is,
// and DOMPurify sanitises what comes out. No images: they would tell strangers that somebody reads this.

import { el } from "./dom.js";
import DOMPurify from "./vendor/dompurify.js";
import { Marked } from "./vendor/marked.js";

const markdown = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ text, href }) => escaped(text || href),
  },
});
const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "kbd", "li",
    "ol", "p", "pre", "s", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** Shows `text` in `container`; called again with a longer text, it touches only the blocks that changed. */
export function showMarkdown(container, text) {
  if (container.source === text) return;
  container.source = text;
  const lexed = markdown.lexer(text);
  const tokens = lexed.filter((token) => token.type !== "space" && token.type !== "def");
  tokens.forEach((token, place) => {
    const shown = container.children[place];
    if (shown?.source === token.raw) return;
    const block = el("div", { class: "block" });
    block.source = token.raw;
    block.append(sanitised(token, lexed.links));
    if (shown) shown.replaceWith(block);
    else container.append(block);
  });
  while (container.children.length > tokens.length) container.lastElementChild.remove();
}

function sanitised(token, links) {
  const only = [token];
  only.links = links;
  const fragment = DOMPurify.sanitize(markdown.parser(only), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    if (!link.hasAttribute("href")) {
      link.replaceWith(...link.childNodes); // one that was not allowed
      continue;
    }
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const element of fragment.querySelectorAll("[class]")) {
    if (!/^language-[\w+#.-]{1,24}$/.test(element.className)) element.removeAttribute("class");
  }
  for (const pre of fragment.querySelectorAll("pre")) pre.replaceWith(codeBlock(pre));
  for (const table of fragment.querySelectorAll("table")) {
    table.replaceWith(el("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Table" }, table.cloneNode(true)));
  }
  return fragment;
}

function escaped(text) {
  return text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
}

function codeBlock(pre) {
  const code = pre.textContent.replace(/\n$/, "");
  const language = pre.querySelector("code")?.className.replace("language-", "") ?? "";
  const copy = el("button", { type: "button", class: "quiet small" }, "Copy");
  copy.addEventListener("click", () => copyText(code, copy));
  return el(
    "figure",
    { class: "code" },
    el("figcaption", {}, el("span", {}, language || "text"), copy),
    el("pre", { tabindex: "0", role: "group", "aria-label": `Code, ${language || "text"}` }, el("code", {}, code)),
  );
}

/** Puts `text` on the clipboard and says so on the button. */
export async function copyText(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed"; // a page that is not served over https or from this machine
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}
