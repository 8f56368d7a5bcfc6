// DOM elements, in one call each.

// An element with attributes and children; `on...` attributes are listeners, a null child is left out.
export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false) made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter((child) => child != null));
  return made;
}

// A table of what its cells hold, row by row.
export function table(rows) {
  return h("table", {}, h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell))))));
}

// A bar of parts in colours, and what these stand for; parts: [colour, share of it, tooltip], keys: [colour, text].
export function bar(name, parts, keys) {
  const part = ([colour, share, title = false]) =>
    h("span", { title, style: `width:${(100 * share).toFixed(1)}%;background:${colour}` });
  const key = ([colour, text]) => h("span", { class: "pdit-key" }, h("i", { style: `background:${colour}` }), text);
  return [
    h("div", { class: name, role: "img", "aria-label": keys.map(([, text]) => text).join(", ") }, parts.map(part)),
    h("div", {}, keys.map(key)),
  ];
}
