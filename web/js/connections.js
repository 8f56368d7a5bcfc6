// The graph on the canvas with its subgraphs, and how a connection goes on through them.
import { app } from "../../../scripts/app.js";

// A graph, and those of the subgraphs in it.
function graphsIn(graph, found = new Set()) {
  if (found.has(graph)) return found;
  found.add(graph);
  for (const node of graph.nodes) if (node.subgraph) graphsIn(node.subgraph, found);
  return found;
}

export const nodesIn = (graph) => [...graphsIn(graph)].flatMap((each) => each.nodes);

export const allNodes = () => nodesIn(app.rootGraph);

// Nodes that stand for a subgraph.
export const hostsOf = (graph) => allNodes().filter((node) => node.subgraph === graph);

// Links of an output; of an input of the subgraph itself with the id of its inputs.
export const linksFrom = (graph, id, slot) =>
  [...graph.links.values()].filter((link) => link.origin_id === id && link.origin_slot === slot);

export const linkTo = (graph, id, slot) =>
  [...graph.links.values()].find((link) => link.target_id === id && link.target_slot === slot);

// All nodes that an output leads to.
export const takers = (node, slot) => ends(node.graph, node.id, slot, new Set());

function ends(graph, id, slot, seen) {
  return linksFrom(graph, id, slot).flatMap((link) => {
    if (seen.has(link)) return [];
    seen.add(link);
    if (link.target_id === graph.outputNode?.id)
      return hostsOf(graph).flatMap((host) => ends(host.graph, host.id, link.target_slot, seen));
    const node = graph.getNodeById(link.target_id);
    if (!node?.subgraph) return node ?? [];
    const input = node.subgraph.inputs.findIndex(({ name }) => name === node.inputs[link.target_slot]?.name);
    return ends(node.subgraph, node.subgraph.inputNode.id, input, seen);
  });
}

// The node whose output an input is connected to; null where there is none.
export function giverOf(node, slot) {
  const { graph } = node;
  const link = linkTo(graph, node.id, slot);
  if (!link) return null;
  if (link.origin_id === graph.inputNode?.id) {
    const name = graph.inputs[link.origin_slot]?.name;
    const givers = hostsOf(graph).map((host) => giverOf(host, host.findInputSlot(name)));
    return givers.find(Boolean) ?? null;
  }
  const giver = graph.getNodeById(link.origin_id);
  return giver?.subgraph ? giver.resolveSubgraphOutputLink(link.origin_slot)?.outputNode : giver;
}
