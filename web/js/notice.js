// A sentence at the bottom of the page, with buttons, until it is closed: ComfyUI's toasts have no buttons.
import { say } from "./words.js";

const STYLE = `
#parallel-dit-notices { position: fixed; bottom: 24px; left: 50%; transform: translateX(-50%); z-index: 1200;
  display: flex; flex-direction: column; gap: 8px; width: min(560px, 90vw); }
.parallel-dit-notice { padding: 12px 16px; border-radius: 8px; border-left: 4px solid var(--error-text, #f55);
  background: var(--comfy-menu-bg, #222); color: var(--fg-color, #ddd); box-shadow: 0 4px 18px #0008;
  font: 14px/1.45 Inter, sans-serif; }
.parallel-dit-notice.warning { border-left-color: #e0a030; }
.parallel-dit-notice.success { border-left-color: #40a060; }
.parallel-dit-notice strong { display: block; margin-bottom: 4px; }
.parallel-dit-notice p { margin: 0 0 8px; overflow-wrap: anywhere; }
.parallel-dit-notice button { margin-right: 8px; padding: 4px 12px; border-radius: 6px; cursor: pointer;
  border: 1px solid var(--border-color, #555); background: var(--comfy-input-bg, #333); color: inherit; }
.parallel-dit-notice button:focus-visible { outline: 2px solid #4a8fe0; outline-offset: 1px; }
.parallel-dit-notice pre { max-height: 45vh; overflow: auto; margin: 8px 0; padding: 8px; border-radius: 6px;
  background: var(--comfy-input-bg, #111); font: 12px/1.4 monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
`;

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
  const [made, style] = [document.createElement("div"), document.createElement("style")];
  made.id = "parallel-dit-notices";
  style.textContent = STYLE;
  document.head.append(style);
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
