// Puts Parallel VAE behind the VAEs of loaders in a saved workflow, in all its graphs, and takes it away.
import { insertBehind, lead, linksOf, newNode, nodeAt, takeAway } from "./inserted_nodes.js";
import { LOADERS, OURS } from "./loader_table.js";
import { connect, Connections, graphsOf, readLink } from "./workflow_graphs.js";

export const PARALLEL = "ParallelVAE";
const WITHOUT_FILE = ["pixel_space", "taesd", "taesdxl", "taesd3", "taef1", "taef2"]; // of Load VAE's list

const isLoader = (node) =>
  node.type === "VAELoader" ? !WITHOUT_FILE.includes(node.widgets_values?.[0]) : node.type in LOADERS || node.type in OURS;

export const vaeSlot = (node) => node.outputs?.findIndex((each) => each.type === "VAE") ?? -1;

// How many nodes' VAEs are led through Parallel VAE that were not.
// only: whether (graph, node) is meant; null for all loaders.
export function putBehindLoaders(workflow, only = null) {
  let count = 0;
  for (const graph of graphsOf(workflow))
    for (const loader of graph.nodes.filter((node) => (only ? only(graph, node) : isLoader(node)))) {
      const links = linksOf(graph, loader.id, vaeSlot(loader));
      const toOurs = (link) => nodeAt(graph, readLink(link).target_id)?.type === PARALLEL;
      const direct = links.filter((link) => !toOurs(link));
      if (!direct.length) continue;
      const there = links.find(toOurs);
      const added = there ? nodeAt(graph, readLink(there).target_id) : makeNode(workflow, loader);
      if (there) lead(direct, loader, vaeSlot(loader), added, 0);
      else {
        insertBehind(workflow, graph, loader, vaeSlot(loader), added);
        shareConfig(workflow, graph, added);
      }
      count += 1;
    }
  return count;
}

// How many were taken away.
// only: whether (graph, node) is meant; null for all.
export function takeAllAway(workflow, only = null) {
  let count = 0;
  for (const graph of graphsOf(workflow))
    for (const node of graph.nodes.filter((each) => each.type === PARALLEL && (!only || only(graph, each))))
      count += takeAway(graph, node);
  return count;
}

const makeNode = (workflow, loader) =>
  newNode(workflow, loader, {
    type: PARALLEL, size: [210, 46], widgets_values: [],
    inputs: [
      { name: "vae", type: "VAE", link: null },
      { name: "parallel_config", type: "PARALLEL_CONFIG", shape: 7, link: null },
    ],
    outputs: [{ name: "VAE", type: "VAE", links: [] }],
  });

// With the configuration of the loader that it works with, it runs in that one's pool; else in one of all GPUs.
function shareConfig(workflow, graph, added) {
  const loader = nearestLoader(new Connections(workflow), graph, added);
  const id = loader?.inputs?.find((each) => each.name === "parallel_config")?.link;
  const link = id != null && (graph.links ?? []).map(readLink).find((each) => each.id === id);
  if (!link) return; // none is connected, or it is in another graph
  connect(workflow, graph, { origin_id: link.origin_id, origin_slot: link.origin_slot, node: added, slot: 1 });
}

// That of ours which comes first on the ways back from all that the VAE leads to.
function nearestLoader(connections, graph, added) {
  const seen = new Set([added]);
  const queue = [{ graph, node: added }];
  const visit = (places) => {
    for (const place of places)
      if (place && !seen.has(place.node)) {
        seen.add(place.node);
        queue.push(place);
      }
  };
  for (let at = 0; at < queue.length; at += 1) {
    const place = queue[at];
    (place.node.outputs ?? []).forEach((_, slot) => visit(connections.takers(place.graph, place.node.id, slot)));
  }
  for (let at = 0; at < queue.length; at += 1) {
    const place = queue[at];
    if (place.node.type in OURS) return place.node;
    (place.node.inputs ?? []).forEach((_, index) => visit([connections.giver(place.graph, place.node, index)]));
  }
  return null;
}
