// The sidebar tab: live over ComfyUI's websocket while it is open, silent when it is closed.
import { api } from "../../../../scripts/api.js";
import { app } from "../../../../scripts/app.js";
import { h } from "./elements.js";
import { view } from "./view.js";
import { say as word } from "../words.js";

const EVENT = "parallel_dit.status";
const ACTIONS = ["start", "park", "unload", "stop", "restart"];
const ID = "parallel-dit";

let shown = null; // what is open: {root, content, told, status}

async function ask(path, wishes) {
  const options = wishes === undefined ? {} : { method: "POST", body: JSON.stringify(wishes) };
  const answer = await api.fetchApi(`/parallel_dit/${path}`, options);
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error ? `${content.error.cause} ${content.error.fix}` : word("failed"));
  return content;
}

function tell(text, role = "status") {
  shown?.told.replaceChildren(text ? h("p", { role }, text) : "");
}

function draw(status) {
  if (!shown) return;
  shown.status = status;
  const focused = document.activeElement?.getAttribute("data-key");
  shown.content.replaceChildren(...view(status, act, Math.max(shown.root.clientWidth - 26, 180)).filter(Boolean));
  if (focused) focusAgain(focused);
}

async function act(action, wishes = {}) {
  tell("");
  const pressed = shown.root.contains(document.activeElement) ? document.activeElement : null;
  const buttons = [...shown.root.querySelectorAll("button")];
  buttons.forEach((button) => (button.disabled = true)); // which takes the focus away, too
  try {
    draw(await ask(action, { ...wishes, at_once: true }));
  } catch (error) {
    tell(error.message, "alert");
    if (shown?.status) draw(shown.status);
  } finally {
    buttons.forEach((button) => (button.disabled = false));
    if (pressed && document.activeElement === document.body) focusAgain(pressed.getAttribute("data-key"), pressed);
  }
}

// Where a button stands now; beside it where it cannot be pressed any more, or on the bar where it has gone.
function focusAgain(key, itself = null) {
  const now = key ? shown?.content.querySelector(`[data-key="${CSS.escape(key)}"]`) : itself;
  const beside = now?.disabled ? now.parentElement.querySelector("button:not(:disabled)") : now;
  (beside ?? shown?.root.querySelector("button"))?.focus();
}

function closeOnEscape(event) {
  if (event.key !== "Escape") return;
  event.stopPropagation();
  app.extensionManager.sidebarTab.toggleSidebarTab(ID);
}

async function copyDiagnostics() {
  try {
    const { text } = await ask("diagnostics");
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else throw new Error(text); // a page that is not secure has none: the text is shown instead
    tell(word("copied"));
  } catch (error) {
    shown?.told.replaceChildren(h("textarea", { rows: 8, style: "width:100%", readonly: "" }, error.message));
  }
}

function watch(on) {
  // A page that is being closed, or a server that has gone, needs no answer.
  ask("watch", { client_id: api.clientId ?? "", on }).catch(() => {});
}

const onStatus = (event) => draw(event.detail);
const onReconnected = () => watch(true);

function open(root) {
  const buttons = ACTIONS.map((action) =>
    h("button", { type: "button", title: word(`${action}Tip`), "data-action": action, onclick: () => act(action) }, word(action)),
  );
  const copy = h("button", { type: "button", "data-action": "copy", onclick: copyDiagnostics }, word("copy"));
  const told = h("div", { "aria-live": "polite" });
  const content = h("div");
  const panel = h("section", { class: "pdit", "aria-label": word("tab"), onkeydown: closeOnEscape }, h("div", { class: "pdit-bar" }, buttons, copy), told, content);
  root.replaceChildren(panel);
  shown = { root: panel, content, told, status: null };
  api.addEventListener(EVENT, onStatus);
  api.addEventListener("reconnected", onReconnected);
  ask("status").then(draw, (error) => tell(error.message, "alert"));
  watch(true);
}

function close() {
  if (!shown) return;
  shown = null;
  api.removeEventListener("reconnected", onReconnected);
  api.removeEventListener(EVENT, onStatus);
  watch(false);
}

app.registerExtension({
  name: "ParallelDiT.Panel",
  setup() {
    app.extensionManager.registerSidebarTab({
      id: ID,
      icon: "pi pi-microchip",
      title: "Parallel DiT",
      tooltip: word("tab"),
      type: "custom",
      render: open,
      destroy: close,
    });
  },
});
