// Puts Parallel VAE behind the VAEs of loaders on the canvas, and takes it away.
import { giverOf, linksFrom, linkTo, takers } from "./connections.js";
import { LOADERS, OURS } from "./loader_table.js";

export const PARALLEL = "ParallelVAE";
const WITHOUT_FILE = ["pixel_space", "taesd", "taesdxl", "taesd3", "taef1", "taef2"]; // of Load VAE's list

export const isLoader = (node) =>
  node.type === "VAELoader" ? !WITHOUT_FILE.includes(node.widgets?.[0]?.value) : node.type in LOADERS || node.type in OURS;

const vaeSlot = (node) => node.outputs.findIndex((each) => each.type === "VAE");
const linksOfVae = (node) => linksFrom(node.graph, node.id, vaeSlot(node));
const takerOf = (node, link) => node.graph.getNodeById(link.target_id); // none where it leaves a subgraph
const giverHere = (node) => node.graph.getNodeById(linkTo(node.graph, node.id, 0)?.origin_id);

// Links by which a node's VAE goes elsewhere than to Parallel VAE.
export const directLinks = (node) =>
  linksOfVae(node).filter((link) => takerOf(node, link)?.type !== PARALLEL);

export const canMove = (node) => (node.type === PARALLEL ? Boolean(giverHere(node)) : directLinks(node).length > 0);

// Puts Parallel VAE behind the VAE of a node, or takes Parallel VAE itself away.
export function moveVae(node) {
  if (!canMove(node)) return;
  if (node.type === PARALLEL) takeAway(node);
  else putBehind(node);
}

function putBehind(giver) {
  const { graph } = giver;
  const direct = directLinks(giver);
  const there = linksOfVae(giver).map((link) => takerOf(giver, link)).find((each) => each?.type === PARALLEL);
  if (there) return lead(direct, there, 0);
  const added = LiteGraph.createNode(PARALLEL);
  added.pos = [giver.pos[0], giver.pos[1] - 120];
  added.mode = giver.mode;
  graph.add(added);
  giver.connect(vaeSlot(giver), added, 0);
  lead(direct, added, 0);
  shareConfig(added);
}

// What it takes must come from a node of the same graph.
function takeAway(node) {
  const { origin_slot } = linkTo(node.graph, node.id, 0);
  lead(linksOfVae(node), giverHere(node), origin_slot);
  node.graph.remove(node);
}

// Links of one output come from another from now on; where they lead is as it was.
function lead(links, giver, slot) {
  const { graph } = giver;
  for (const { target_id, target_slot, parentId } of links) {
    const taker = graph.getNodeById(target_id);
    if (taker) giver.connect(slot, taker, target_slot, parentId);
    else graph.outputs[target_slot].connect(giver.outputs[slot], giver, parentId);
  }
}

// With the configuration of the loader that it works with, it runs in that one's pool; else in one of all GPUs.
function shareConfig(added) {
  const { graph } = added;
  const loader = nearestLoader(added);
  const link = loader?.graph === graph && linkTo(graph, loader.id, loader.findInputSlot("parallel_config"));
  if (!link) return; // none is connected, or it is in another graph
  const giver = graph.getNodeById(link.origin_id);
  if (giver) giver.connect(link.origin_slot, added, 1);
  else graph.inputs[link.origin_slot].connect(added.inputs[1], added);
}

// That of ours which comes first on the ways back from all that the VAE leads to.
function nearestLoader(added) {
  const found = new Set([added]); // its loops come to what they add
  const add = (node) => node && found.add(node);
  for (const node of found) node.outputs.forEach((_, slot) => takers(node, slot).forEach(add));
  for (const node of found) {
    if (node.type in OURS) return node;
    node.inputs.forEach((_, slot) => add(giverOf(node, slot)));
  }
  return null;
}
