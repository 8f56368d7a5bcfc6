// A node between an output and all that it leads to in a saved workflow: put in, and taken away again.
import { changeLink, connect, nextId, readLink, removeLinks } from "./workflow_graphs.js";

// Links of an output, as they are saved.
export const linksOf = (graph, id, slot) =>
  (graph.links ?? []).filter((link) => {
    const { origin_id, origin_slot } = readLink(link);
    return String(origin_id) === String(id) && origin_slot === slot;
  });

export const nodeAt = (graph, id) => graph.nodes.find((node) => String(node.id) === String(id));

// Above the node whose output it takes; what: type, size, inputs, outputs, widgets_values, further properties.
export const newNode = (workflow, giver, { type, properties = {}, ...what }) => ({
  id: nextId(workflow, "node"), type, pos: [giver.pos[0], giver.pos[1] - 120], flags: {},
  order: giver.order ?? 0, mode: giver.mode ?? 0, ...what,
  properties: { "Node name for S&R": type, ...properties },
});

// added: its first input takes the output, its first output leads to where the output led.
export function insertBehind(workflow, graph, giver, slot, added) {
  const links = linksOf(graph, giver.id, slot);
  graph.nodes.push(added);
  connect(workflow, graph, { origin_id: giver.id, origin_slot: slot, node: added, slot: 0 });
  lead(links, giver, slot, added, 0);
}

// Whether it could be: what it takes must come from a node of the same graph.
export function takeAway(graph, node) {
  const ids = node.inputs.map((each) => each.link).filter((id) => id != null);
  const given = graph.links.map(readLink).find((link) => link.id === node.inputs[0].link);
  const giver = given && nodeAt(graph, given.origin_id);
  if (!giver) return false;
  lead(linksOf(graph, node.id, 0), node, 0, giver, given.origin_slot);
  graph.nodes.splice(graph.nodes.indexOf(node), 1);
  removeLinks(graph, ids);
  return true;
}

// Links of one output come from another from now on; where they lead is as it was.
export function lead(links, from, fromSlot, to, toSlot) {
  const ids = links.map((link) => readLink(link).id);
  for (const link of links) changeLink(link, { origin_id: to.id, origin_slot: toSlot });
  const output = from.outputs[fromSlot];
  output.links = (output.links ?? []).filter((id) => !ids.includes(id));
  to.outputs[toSlot].links = [...(to.outputs[toSlot].links ?? []), ...ids];
}
