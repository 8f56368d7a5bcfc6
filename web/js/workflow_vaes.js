// Puts Parallel VAE behind the VAEs of loaders in a saved workflow, in all its graphs, and takes it away.
import { LOADERS, OURS } from "./loader_table.js";
import { changeLink, graphsOf, newLink, readLink } from "./workflow_graphs.js";

const PARALLEL = "ParallelVAE";
const WITHOUT_FILE = ["pixel_space", "taesd", "taesdxl", "taesd3", "taef1", "taef2"]; // of Load VAE's list

const isLoader = (node) =>
  node.type === "VAELoader" ? !WITHOUT_FILE.includes(node.widgets_values?.[0]) : node.type in LOADERS || node.type in OURS;

const vaeSlot = (node) => node.outputs?.findIndex((each) => each.type === "VAE") ?? -1;

// Links of an output, as they are saved.
const linksOf = (graph, id, slot) =>
  (graph.links ?? []).filter((link) => {
    const { origin_id, origin_slot } = readLink(link);
    return String(origin_id) === String(id) && origin_slot === slot;
  });

const nodeAt = (graph, id) => graph.nodes.find((node) => String(node.id) === String(id));

// How many loaders' VAEs are led through Parallel VAE that were not.
export function putBehindLoaders(workflow) {
  let count = 0;
  for (const graph of graphsOf(workflow))
    for (const loader of graph.nodes.filter(isLoader)) {
      const links = linksOf(graph, loader.id, vaeSlot(loader));
      const toOurs = (link) => nodeAt(graph, readLink(link).target_id)?.type === PARALLEL;
      const direct = links.filter((link) => !toOurs(link));
      if (!direct.length) continue;
      const there = links.find(toOurs);
      const added = there ? nodeAt(graph, readLink(there).target_id) : addBehind(workflow, graph, loader);
      lead(direct, loader, vaeSlot(loader), added, 0);
      count += 1;
    }
  return count;
}

// How many were taken away.
export function takeAllAway(workflow) {
  let count = 0;
  for (const graph of graphsOf(workflow))
    for (const node of graph.nodes.filter((each) => each.type === PARALLEL)) {
      const ids = node.inputs.map((each) => each.link);
      const given = graph.links.map(readLink).find((link) => link.id === node.inputs[0].link);
      const giver = given && nodeAt(graph, given.origin_id);
      if (!giver) continue; // it comes from outside of a subgraph, or from nowhere
      lead(linksOf(graph, node.id, 0), node, 0, giver, given.origin_slot);
      graph.nodes.splice(graph.nodes.indexOf(node), 1);
      graph.links = graph.links.filter((link) => !ids.includes(readLink(link).id));
      for (const each of graph.nodes)
        for (const output of each.outputs ?? []) output.links = output.links?.filter((id) => !ids.includes(id)) ?? null;
      count += 1;
    }
  return count;
}

// Links of one output come from another from now on; where they lead is as it was.
function lead(links, from, fromSlot, to, toSlot) {
  const ids = links.map((link) => readLink(link).id);
  for (const link of links) changeLink(link, { origin_id: to.id, origin_slot: toSlot });
  const output = from.outputs[fromSlot];
  output.links = (output.links ?? []).filter((id) => !ids.includes(id));
  to.outputs[toSlot].links = [...(to.outputs[toSlot].links ?? []), ...ids];
}

function addBehind(workflow, graph, loader) {
  const graphs = graphsOf(workflow);
  const next = (all, last) => Math.max(0, ...all.map(Number).filter(Number.isFinite), ...last.map((each) => each ?? 0)) + 1;
  const id = next(
    graphs.flatMap((each) => each.nodes.map((node) => node.id)),
    graphs.map((each) => each.last_node_id ?? each.state?.lastNodeId),
  );
  const link = next(
    graphs.flatMap((each) => (each.links ?? []).map((one) => readLink(one).id)),
    graphs.map((each) => each.last_link_id ?? each.state?.lastLinkId),
  );
  for (const each of graphs) {
    if (each.last_node_id !== undefined) Object.assign(each, { last_node_id: id, last_link_id: link });
    if (each.state) Object.assign(each.state, { lastNodeId: id, lastLinkId: link });
  }
  const [x, y] = [loader.pos[0], loader.pos[1]];
  const slot = vaeSlot(loader);
  const added = {
    id, type: PARALLEL, pos: [x, y - 120], size: [210, 46], flags: {}, order: loader.order ?? 0, mode: loader.mode ?? 0,
    inputs: [
      { name: "vae", type: "VAE", link },
      { name: "parallel_config", type: "PARALLEL_CONFIG", shape: 7, link: null },
    ],
    outputs: [{ name: "VAE", type: "VAE", links: [] }],
    properties: { "Node name for S&R": PARALLEL }, widgets_values: [],
  };
  graph.nodes.push(added);
  const values = { id: link, origin_id: loader.id, origin_slot: slot, target_id: id, target_slot: 0, type: "VAE" };
  graph.links.push(newLink(workflow, graph, values));
  loader.outputs[slot].links = [...(loader.outputs[slot].links ?? []), link];
  return added;
}
