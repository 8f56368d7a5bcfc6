// Texts of our runs on nodes: outside of a subgraph too, and on nodes whose result came from the cache.
import { api } from "../../../../scripts/api.js";
import { app } from "../../../../scripts/app.js";
import { makeRoom } from "./room_for_text.js";
import { writeBelow } from "./text_below.js";

const OURS = new Set(["ParallelConfig", "ParallelLoader", "ParallelCheckpointLoader", "ParallelSampler", "ParallelDoctor"]);

const texts = new Map(); // execution id -> what it showed last
const outputs = new Map(); // execution id -> the text of its output
let passingOn = false;

// The node of an execution id such as "5:3": node 3 inside of the subgraph node 5.
function nodeOf(id) {
  let graph = app.rootGraph ?? app.graph;
  let node = null;
  for (const part of String(id).split(":")) {
    node = graph?.getNodeById(Number(part)) ?? graph?.getNodeById(part);
    graph = node?.subgraph;
  }
  return node;
}

function usesOurs(graph) {
  return (graph?.nodes ?? []).some((node) => OURS.has(node.comfyClass ?? node.type) || usesOurs(node.subgraph));
}

function show(nodeId, text) {
  texts.set(String(nodeId), text);
  api.dispatchCustomEvent("progress_text", { nodeId: String(nodeId), text });
}

// The canvas shows a text on nodes of the graph that is open alone: the nodes around it get it as well.
function passOn(id, text) {
  const steps = String(id).split(":");
  if (nodeOf(id)?.comfyClass === "ParallelConfig") return; // what ran matters more, and its loader says it
  if (steps.length < 2 || !usesOurs(nodeOf(steps[0])?.subgraph)) return;
  for (let depth = 1; depth < steps.length; depth++) writeBelow(nodeOf(steps.slice(0, depth).join(":")), text);
}

api.addEventListener("progress_text", ({ detail }) => {
  if (passingOn || !detail?.text) return;
  texts.set(String(detail.nodeId), detail.text);
  passOn(detail.nodeId, detail.text);
  if (!usesOurs(app.rootGraph ?? app.graph)) return;
  makeRoom(nodeOf(detail.nodeId)); // before it is drawn; and where the canvas makes its widget later, then
  requestAnimationFrame(() => makeRoom(nodeOf(detail.nodeId)));
});

// A cached node's output comes again, as it was when it ran; what was shown since then is newer.
api.addEventListener("executed", ({ detail }) => {
  const id = String(detail?.node);
  const text = detail?.output?.text?.[0];
  if (typeof text !== "string" || !OURS.has(nodeOf(id)?.comfyClass)) return;
  const shown = nodeOf(id).widgets?.find((widget) => widget.name === "$$node-text-preview")?.value;
  const known = outputs.get(id) === text && shown;
  outputs.set(id, text);
  if (known) return;
  show(id, text);
});

// A page that was loaded since has none of the texts of a cached node, and of most nodes ComfyUI does not repeat them.
api.addEventListener("execution_cached", async ({ detail }) => {
  const cached = new Map((detail?.nodes ?? []).map((id) => [String(id), texts.get(String(id))]));
  if (!cached.size || !usesOurs(app.rootGraph ?? app.graph)) return;
  const answer = await api.fetchApi(`/parallel_dit/texts?prompt_id=${encodeURIComponent(detail.prompt_id)}`);
  if (!answer.ok) return;
  for (const [id, text] of Object.entries(await answer.json()))
    if (cached.has(id) && nodeOf(id) && texts.get(id) === cached.get(id) && text !== cached.get(id)) show(id, text);
});

app.registerExtension({
  name: "ParallelDiT.NodeText",
  setup() {
    // Texts that came while another graph was open.
    app.canvas?.canvas?.addEventListener("litegraph:set-graph", () =>
      requestAnimationFrame(() => {
        passingOn = true;
        try {
          for (const [id, text] of texts) if (nodeOf(id)) show(id, text);
        } finally {
          passingOn = false;
        }
      }),
    );
  },
  // Another workflow: its nodes have the same numbers.
  beforeConfigureGraph() {
    texts.clear();
    outputs.clear();
  },
});
