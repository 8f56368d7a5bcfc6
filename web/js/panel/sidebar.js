// The sidebar tab: asks how things stand while it is open and the page is seen.
import { api } from "../../../../scripts/api.js";
import { app } from "../../../../scripts/app.js";
import { h } from "../elements.js";
import { view } from "./view.js";
import { say } from "../said.js";

const EVERY = 1000; // milliseconds from an answer to the next question
const ACTIONS = ["start", "park", "unload", "stop", "restart"];
const ID = "parallel-dit";

let shown = null; // what is open: {root, content, told, drawn}

async function ask(path, wishes) {
  const options = wishes === undefined ? {} : { method: "POST", body: JSON.stringify(wishes) };
  const answer = await api.fetchApi(`/parallel_dit/${path}`, options);
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error ? `${content.error.cause} ${content.error.fix}` : say("failed"));
  return content;
}

function tell(text, role = "status") {
  shown?.told.replaceChildren(text ? h("p", { role }, text) : "");
}

function draw(status) {
  if (!shown) return;
  const fresh = h("div", {}, view(status, act));
  const drawn = fresh.innerHTML; // before its sentences are in the language of the canvas
  if (shown.drawn === drawn) return; // or a button that is being pressed would go from under the pointer
  shown.drawn = drawn;
  const focused = document.activeElement?.getAttribute("data-key");
  shown.content.replaceChildren(...fresh.childNodes);
  if (focused) focusAgain(focused);
}

async function act(action, wishes = {}) {
  tell("");
  const pressed = shown.root.contains(document.activeElement) ? document.activeElement : null;
  const buttons = [...shown.root.querySelectorAll("button:not(:disabled)")];
  buttons.forEach((button) => (button.disabled = true)); // which takes the focus away, too
  try {
    draw(await ask(action, { ...wishes, at_once: true }));
  } catch (error) {
    tell(error.message, "alert");
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
    tell(say("copied"));
  } catch (error) {
    shown?.told.replaceChildren(h("textarea", { rows: 8, style: "width:100%", readonly: "" }, error.message));
  }
}

async function follow(opened) {
  while (shown === opened) {
    if (!document.hidden) {
      const before = opened.drawn;
      try {
        const status = await ask("status");
        if (shown === opened && opened.drawn === before) draw(status); // else an action's answer is newer
      } catch (error) {
        if (shown === opened && !before) tell(error.message, "alert"); // later, ComfyUI says that its server has gone
      }
    }
    await new Promise((resolve) => setTimeout(resolve, EVERY));
  }
}

function open(root) {
  const buttons = ACTIONS.map((action) =>
    h("button", { title: say(`${action}Tip`), "data-action": action, onclick: () => act(action) }, say(action)),
  );
  const copy = h("button", { "data-action": "copy", onclick: copyDiagnostics }, say("copy"));
  const told = h("div", { "aria-live": "polite" });
  const content = h("div");
  const bar = h("div", { class: "pdit-bar" }, buttons, copy);
  const panel = h("section", { class: "pdit", "aria-label": say("tab"), onkeydown: closeOnEscape }, bar, told, content);
  root.replaceChildren(panel);
  shown = { root: panel, content, told, drawn: "" };
  follow(shown);
}

app.registerExtension({
  name: "ParallelDiT.Panel",
  setup() {
    app.extensionManager.registerSidebarTab({
      id: ID,
      icon: "pi pi-microchip",
      title: "Parallel DiT",
      tooltip: say("tab"),
      type: "custom",
      render: open,
      destroy: () => (shown = null),
    });
  },
});
