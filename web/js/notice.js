// A sentence at the bottom of the page, with buttons, until it is closed: ComfyUI's toasts have no buttons.
import { h } from "./elements.js";
import { say } from "./said.js";

const place = h("div", { id: "parallel-dit-notices" });
document.body.append(place);

// kind: "error", "warning", or "success", which goes by itself. A notice of the same kind is replaced.
// buttons: [{text, press(notice element)}]
export function showNotice(kind, title, text, buttons = []) {
  hideNotice(kind);
  const shown = [...buttons, { text: say("close"), press: () => box.remove() }];
  const box = h(
    "div",
    { class: `parallel-dit-notice ${kind}`, role: "alert" },
    h("strong", {}, title),
    h("p", {}, text),
    shown.map(({ text: label, press }) => h("button", { onclick: () => press(box) }, label)),
  );
  place.append(box);
  if (kind === "success") setTimeout(() => box.remove(), 5000);
}

// The newest notice, unless something else has the keys: a dialog, a menu, a field that is written into.
document.addEventListener("keydown", (event) => {
  const at = document.activeElement;
  const free = at === document.body || at?.matches("canvas") || place.contains(at);
  if (event.key === "Escape" && !event.defaultPrevented && free) place.lastElementChild?.remove();
});

export const hideNotice = (kind) => place.querySelector(`.${kind}`)?.remove();
