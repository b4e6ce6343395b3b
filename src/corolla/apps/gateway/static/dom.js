// Building and updating elements. Everything that comes from the network or a model goes in as text, never as markup:
// the one exception is `markdown.js`, which sanitises.

/** `el("button", { class: "quiet", type: "button", onclick: send }, "Send")`; null children are left out. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  set(element, properties);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Events by `onclick`, the rest as attributes; `false` and null take an attribute away. */
export function set(element, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === false || value === null || value === undefined) element.removeAttribute(name);
    else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value === true ? "" : String(value));
  }
}

/** Sets the text only where it differs, so that a selection in it survives. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Makes the children of `container` show `items` in order, keeping the elements of those that were there before:
 * focus, selection and scrolling survive an update.
 */
export function reconcile(container, items, keyOf, create, update) {
  const known = new Map([...container.children].map((child) => [child.dataset.key, child]));
  let place = container.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = known.get(key);
    known.delete(key);
    if (!child) {
      child = create(item);
      child.dataset.key = key;
    }
    if (child === place) place = place.nextElementSibling;
    else container.insertBefore(child, place);
    update(child, item);
  }
  for (const child of known.values()) child.remove();
}

/** The element with this id, which the page has. */
export function byId(id) {
  return document.getElementById(id);
}
