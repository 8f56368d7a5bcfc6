// Texts of our runs on nodes. A node keeps its size: where it has the room, the text stands on it, else as a badge.
import { api } from "../../../../scripts/api.js";
import { app } from "../../../../scripts/app.js";
import { nodesOfPath } from "../fault_marks.js";
import { writeBadge } from "../text_badge.js";
import { h } from "../elements.js";
import { REPORT } from "./report.js";

const OURS = new Set(["ParallelConfig", "ParallelLoader", "ParallelCheckpointLoader", "ParallelSampler", "ParallelDoctor"]);
const WIDGET = "$$node-text-preview"; // the canvas' own for it
const LEAST = 58; // its height

const style = h("style", { id: "pdit-text-style" });
const texts = new Map(); // execution id -> what it showed last

const isOurs = (id) => OURS.has(nodesOfPath(id).at(-1)?.type);
const widgetOf = (node) => node.widgets?.find(({ name }) => name === REPORT || name === WIDGET);

function hasRoom(node) {
  return OURS.has(node.type) && (widgetOf(node) || node.size[1] - node.computeSize()[1] >= LEAST);
}

const dispatch = api.dispatchCustomEvent;

// The node that an execution id means, and the subgraph nodes around it.
function show(id, text) {
  const nodes = nodesOfPath(id);
  const node = nodes.pop();
  if (!node) return;
  texts.set(String(id), text);
  // What its loader foresees matters more than what a config asks for.
  if (node.type !== "ParallelConfig") for (const around of nodes) writeBadge(around, text);
  if (LiteGraph.vueNodesMode) makeReadable(id);
  if (widgetOf(node)?.name === REPORT) widgetOf(node).value = text;
  else if (hasRoom(node)) dispatch.call(api, "progress_text", { nodeId: String(id), text });
  else writeBadge(node, text);
}

// Of nodes of ours the server tells the canvas, which would make a node grow that has no room.
api.dispatchCustomEvent = function (type, detail) {
  const ours = type === "progress_text" && detail?.text && isOurs(detail.nodeId);
  return ours ? show(detail.nodeId, detail.text) : dispatch.call(this, type, detail);
};
api.addEventListener("parallel_dit.text", ({ detail }) => show(detail.node, detail.text));
// A cached node runs not again, and a page that was loaded since then has not heard of it.
api.addEventListener("executed", ({ detail }) => {
  const text = detail.output?.text?.[0];
  if (text && !texts.has(String(detail.node)) && isOurs(detail.node)) show(detail.node, text);
});

// The canvas of frontend 1.58 takes its texts away when a prompt ends, or the next one begins.
const shows = (node) => Boolean(node?.parallelDitText || (node && widgetOf(node)?.value));
function showAgain() {
  for (const [id, text] of texts) if (!shows(nodesOfPath(id).at(-1))) show(id, text);
}
for (const event of ["execution_start", "execution_success", "execution_error", "execution_interrupted"])
  api.addEventListener(event, () => setTimeout(showAgain)); // when the canvas has heard of it

app.registerExtension({
  name: "ParallelDiT.NodeText",
  setup() {
    // Texts that came while another graph was open.
    app.canvas.canvas.addEventListener("litegraph:set-graph", () =>
      requestAnimationFrame(() => texts.forEach((text, id) => show(id, text))),
    );
  },
  // Another workflow: its nodes have the same numbers.
  beforeConfigureGraph() {
    texts.clear();
  },
});

// Nodes 2.0 write such texts smaller than anything else on a node.
function makeReadable(id) {
  const rule = `[data-node-id="${String(id).split(":").at(-1)}"] .comfy-markdown-content { font-size: 13px; }`;
  if (!style.textContent.includes(rule)) style.append(rule);
}

document.head.append(style);
