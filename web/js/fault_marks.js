// Marks nodes that are at fault, and the subgraphs around them, until the next prompt.
import { app } from "../../../scripts/app.js";
import { hostsOf } from "./connections.js";
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
    const node = graph?.getNodeById(id);
    if (!node) return found;
    found.push(node);
    graph = node.subgraph;
  }
  return found;
}

// A node behind the subgraph nodes that stand for it outside.
export const withOutside = (node) => [...hostsOf(node.graph).flatMap(withOutside), node];

export function markFault(nodes, text) {
  for (const node of nodes) {
    marked.push(node);
    writeBadge(node, text, { fgColor: "#fff", bgColor: "#a02020" });
    node.has_errors = true;
    node.strokeStyles[FRAME] = () => ({ padding: 12, lineWidth: 10, color: LiteGraph.NODE_ERROR_COLOUR });
  }
}

export function clearFaults() {
  for (const node of marked) {
    node.has_errors = false; // of the prompt before, whoever said so: ComfyUI tells of this one's anew
    delete node.strokeStyles[FRAME];
    writeBadge(node, "");
  }
  marked = [];
}

export function goTo(node) {
  if (app.canvas.graph !== node.graph) app.canvas.setGraph(node.graph);
  app.canvas.centerOnNode(node);
}
