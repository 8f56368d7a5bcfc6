// "Encode and decode on all GPUs": puts Parallel VAE behind a loader's VAE, or takes it away.
import { app } from "../../../scripts/app.js";
import { say } from "./words.js";

const PARALLEL = "ParallelVAE";

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

app.registerExtension({
  name: "ParallelDiT.ParallelVAE",
  getNodeMenuItems(node) {
    if (node.type === PARALLEL) return [{ content: say("vaeOnOne"), callback: () => takeAway(node) }];
    const slot = slotOf(node);
    if (slot < 0 || node.isSubgraphNode?.()) return [];
    const behind = takers(node, slot);
    if (!behind.length || behind.every((taker) => taker.node.type === PARALLEL)) return [];
    return [{ content: say("vaeOnAll"), callback: () => putBehind(node) }];
  },
});
