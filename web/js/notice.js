// A sentence at the bottom of the page, with buttons, until it is closed: ComfyUI's toasts have no buttons.
import { say } from "./words.js";


// kind: "error", "warning" or "success"; buttons: [{text, press(notice element)}]. A notice of the same kind is replaced.
// seconds: it goes after; null for one that stays until it is closed.
export function showNotice(kind, title, text, buttons = [], seconds = null) {
  hideNotice(kind);
  const box = document.createElement("div");
  box.className = `parallel-dit-notice ${kind}`;
  box.setAttribute("role", "alert");
  const [head, body] = [document.createElement("strong"), document.createElement("p")];
  head.textContent = title;
  body.textContent = text;
  box.append(head, body);
  for (const { text: label, press } of [...buttons, { text: say("close"), press: () => box.remove() }]) {
    const button = document.createElement("button");
    button.textContent = label;
    button.onclick = () => press(box);
    box.append(button);
  }
  place().append(box);
  if (seconds !== null) setTimeout(() => box.remove(), 1000 * seconds);
}

function place() {
  const there = document.getElementById("parallel-dit-notices");
  if (there) return there;
  const made = document.createElement("div");
  made.id = "parallel-dit-notices";
  document.body.append(made);
  document.addEventListener("keydown", closeOnEscape);
  return made;
}

// The newest notice, unless something else has the keys: a dialog, a menu, a field that is written into.
function closeOnEscape(event) {
  const at = document.activeElement;
  const free = at === document.body || at?.matches?.("canvas") || at?.closest?.("#parallel-dit-notices");
  if (event.key === "Escape" && !event.defaultPrevented && free) place().lastElementChild?.remove();
}

export const hideNotice = (kind) => document.querySelector(`.parallel-dit-notice.${kind}`)?.remove();
