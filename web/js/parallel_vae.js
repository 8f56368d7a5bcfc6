// "Encode and decode on all GPUs": puts Parallel VAE behind a loader's VAE, or takes it away; in its menu, and of all
// loaders of the workflow as a command and in the canvas' menu.
import { app } from "../../../scripts/app.js";
import { showNotice } from "./notice.js";
import { say } from "./words.js";

const PARALLEL = "ParallelVAE";
const LOADERS = ["VAELoader", "CheckpointLoaderSimple", "ParallelCheckpointLoader"];
const SECONDS_SHOWN = 5;

const slotOf = (node) => node.outputs?.findIndex((each) => each.type === "VAE") ?? -1;

// [{node, slot}] that an output is connected to; what leads out of a subgraph stays as it is.
function takers(node, slot) {
  const { graph } = node;
  const links = (node.outputs[slot].links ?? []).map((id) => graph.getLink?.(id) ?? graph.links[id]);
  return links
    .map((link) => ({ node: graph.getNodeById(link.target_id), slot: link.target_slot }))
    .filter((taker) => taker.node);
}

// What takes the place of one: a node between it and its takers.
export function putBehind(loader) {
  const slot = slotOf(loader);
  const before = takers(loader, slot);
  const added = LiteGraph.createNode(PARALLEL);
  changing(loader.graph, () => {
    loader.graph.add(added);
    added.pos = [loader.pos[0] + loader.size[0] + 40, loader.pos[1]];
    for (const taker of before) added.connect(0, taker.node, taker.slot);
    loader.connect(slot, added, 0);
  });
  return added;
}

export function takeAway(node) {
  const { graph } = node;
  const link = graph.getLink?.(node.inputs[0].link) ?? graph.links[node.inputs[0].link];
  const giver = link && graph.getNodeById(link.origin_id);
  const after = takers(node, 0);
  changing(graph, () => {
    for (const taker of giver ? after : []) giver.connect(link.origin_slot, taker.node, taker.slot);
    graph.remove(node);
  });
}

// As one step to undo.
function changing(graph, change) {
  graph.beforeChange();
  change();
  graph.afterChange();
  app.canvas.setDirty(true, true);
}

// A graph and those inside of it, each once.
function graphsIn(graph, found = new Set()) {
  if (!found.has(graph)) {
    found.add(graph);
    for (const node of graph.nodes) if (node.isSubgraphNode?.()) graphsIn(node.subgraph, found);
  }
  return found;
}

// Whether somebody takes a node's VAE and is not Parallel VAE already.
function isOffered(node) {
  const slot = node.isSubgraphNode?.() ? -1 : slotOf(node);
  return slot >= 0 && takers(node, slot).some((taker) => taker.node.type !== PARALLEL);
}

function changeAll(toOurs) {
  const nodes = [...graphsIn(app.rootGraph)].flatMap((graph) => [...graph.nodes]);
  const meant = nodes.filter((node) => (toOurs ? LOADERS.includes(node.type) && isOffered(node) : node.type === PARALLEL));
  changing(app.rootGraph, () => meant.forEach(toOurs ? putBehind : takeAway));
  const said = meant.length ? say("vaesChanged", { count: meant.length }) : say("nothingToDo");
  showNotice(meant.length ? "success" : "info", say(toOurs ? "vaeOnAll" : "vaeOnOne"), said, [], SECONDS_SHOWN);
}

const commands = [
  { id: "ParallelDiT.VaeOnAllGpus", icon: "pi pi-image", label: "Encode and decode on all GPUs", function: () => changeAll(true) },
  { id: "ParallelDiT.VaeOnOneGpu", icon: "pi pi-stop", label: "Encode and decode on one GPU", function: () => changeAll(false) },
];

app.registerExtension({
  name: "ParallelDiT.ParallelVAE",
  commands,
  menuCommands: [{ path: ["Edit"], commands: commands.map((each) => each.id) }],
  getCanvasMenuItems() {
    return [
      { content: say("vaeOnAll"), callback: () => changeAll(true) },
      { content: say("vaeOnOne"), callback: () => changeAll(false) },
    ];
  },
  getNodeMenuItems(node) {
    if (node.type === PARALLEL) return [{ content: say("vaeOnOne"), callback: () => takeAway(node) }];
    return isOffered(node) ? [{ content: say("vaeOnAll"), callback: () => putBehind(node) }] : [];
  },
});
