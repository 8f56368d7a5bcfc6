// Marks nodes that are at fault, and the subgraphs around them, until the next prompt.
import { app } from "../../../scripts/app.js";
import { writeBadge } from "./text_badge.js";

// Of a node's frames on the canvas. has_errors is for Nodes 2.0 and the minimap: the frontend of ComfyUI 0.18 takes it
// away from all nodes a moment later.
const FRAME = "parallel-dit-fault";

let marked = [];

// The nodes of an execution id such as 12:5, from the outermost subgraph to the node itself.
export function nodesOfPath(path) {
  const found = [];
  let graph = app.rootGraph;
  for (const id of String(path).split(":")) {
    const node = graph?.getNodeById(Number(id)) ?? graph?.getNodeById(id);
    if (!node) return found;
    found.push(node);
    graph = node.subgraph;
  }
  return found;
}

// Nodes on the canvas with this id in this graph, each with the subgraph nodes that stand for it outside.
export function withOutside(graphId, id) {
  const graphs = [app.rootGraph, ...app.rootGraph.subgraphs.values()];
  const graph = graphs.find((each) => each.id === graphId);
  const node = graph?.getNodeById(Number(id)) ?? graph?.getNodeById(id);
  if (!node) return [];
  const outside = graphs.flatMap((outer) =>
    outer.nodes.filter((each) => each.subgraph === graph).flatMap((each) => withOutside(outer.id, each.id)),
  );
  return [...outside, node];
}

export function markFault(nodes, text) {
  for (const node of nodes) {
    marked.push(node);
    writeBadge(node, text, { fgColor: "#fff", bgColor: "#a02020" });
    node.has_errors = true;
    if (node.strokeStyles) node.strokeStyles[FRAME] = () => ({ padding: 12, lineWidth: 10, color: LiteGraph.NODE_ERROR_COLOUR });
  }
  app.canvas.setDirty(true, true);
}

export function clearFaults() {
  for (const node of marked) {
    node.has_errors = false; // of the prompt before, whoever said so: ComfyUI tells of this one's anew
    delete node.strokeStyles?.[FRAME];
    writeBadge(node, "");
  }
  marked = [];
  app.canvas?.setDirty(true, true);
}

export function goTo(nodes) {
  const node = nodes.at(-1);
  if (!node) return;
  if (app.canvas.graph !== node.graph) app.canvas.setGraph(node.graph);
  app.canvas.centerOnNode(node);
}
