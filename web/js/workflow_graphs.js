// A workflow as ComfyUI saves it: its graph and those of its subgraphs, and how a connection goes on through them.

const GRAPH_INPUT = -10;
const GRAPH_OUTPUT = -20;

const PLACES = ["id", "origin_id", "origin_slot", "target_id", "target_slot", "type"];

// A link; a workflow has lists, a subgraph objects.
export function readLink(link) {
  if (!Array.isArray(link)) return link;
  return Object.fromEntries(PLACES.map((name, index) => [name, link[index]]));
}

export function changeLink(link, changes) {
  if (!Array.isArray(link)) return Object.assign(link, changes);
  for (const [name, value] of Object.entries(changes)) link[PLACES.indexOf(name)] = value;
  return link;
}

// The workflow first, then the subgraphs that it defines.
export const graphsOf = (workflow) => [workflow, ...(workflow.definitions?.subgraphs ?? [])];

// A number that no "node" or "link" of the workflow has.
export function nextId(workflow, kind) {
  const graphs = graphsOf(workflow);
  const used = graphs.flatMap((graph) =>
    kind === "node" ? graph.nodes.map((node) => node.id) : (graph.links ?? []).map((link) => readLink(link).id),
  );
  const [saved, state] = kind === "node" ? ["last_node_id", "lastNodeId"] : ["last_link_id", "lastLinkId"];
  const last = graphs.map((graph) => graph[saved] ?? graph.state?.[state] ?? 0);
  const id = Math.max(0, ...used.map(Number).filter(Number.isFinite), ...last) + 1;
  for (const graph of graphs) {
    if (graph[saved] !== undefined) graph[saved] = id;
    if (graph.state) graph.state[state] = id;
  }
  return id;
}

// A new link from an output, or from an input of the subgraph itself, to an input of a node.
export function connect(workflow, graph, { origin_id, origin_slot, node, slot }) {
  const id = nextId(workflow, "link");
  const values = { id, origin_id, origin_slot, target_id: node.id, target_slot: slot, type: node.inputs[slot].type };
  graph.links.push(changeLink(graph === workflow ? [] : {}, values));
  node.inputs[slot].link = id;
  if (origin_id === GRAPH_INPUT) graph.inputs[origin_slot].linkIds = [...(graph.inputs[origin_slot].linkIds ?? []), id];
  else {
    const output = graph.nodes.find((each) => String(each.id) === String(origin_id)).outputs[origin_slot];
    output.links = [...(output.links ?? []), id];
  }
}

export function removeLinks(graph, ids) {
  const left = (id) => !ids.includes(id);
  if (graph.links) graph.links = graph.links.filter((link) => left(readLink(link).id));
  const extensions = graph.extra?.linkExtensions; // by which reroutes a link goes
  if (extensions) graph.extra.linkExtensions = extensions.filter((each) => left(each.id));
  for (const node of graph.nodes)
    for (const output of node.outputs ?? []) output.links = output.links?.filter(left) ?? null;
  for (const input of graph.inputs ?? []) input.linkIds = input.linkIds?.filter(left);
}

// Ends of connections, wherever they lead: {graph, node}, each node as saved.
export class Connections {
  constructor(workflow) {
    this.graphs = graphsOf(workflow);
    this.definitions = new Map(this.graphs.slice(1).map((graph) => [graph.id, graph]));
    this.nodes = new Map(this.graphs.map((graph) => [graph, new Map(graph.nodes.map((node) => [node.id, node]))]));
    this.links = new Map(this.graphs.map((graph) => [graph, (graph.links ?? []).map(readLink)]));
  }

  // {graph, node, name of the input, type} of all that an output is connected to.
  takers(graph, id, slot, seen = new Set()) {
    const found = [];
    for (const link of this.links.get(graph)) {
      if (String(link.origin_id) !== String(id) || link.origin_slot !== slot) continue;
      if (link.target_id === GRAPH_OUTPUT) {
        for (const outer of this.outside(graph)) found.push(...this._once(outer, link.target_slot, seen));
        continue;
      }
      const node = this.nodes.get(graph).get(link.target_id);
      const entry = node?.inputs?.[link.target_slot];
      if (!entry) continue;
      const inner = this.definitions.get(node.type);
      if (!inner) found.push({ graph, node, name: entry.name, type: link.type });
      else {
        const input = inner.inputs.findIndex((each) => each.name === entry.name);
        if (input >= 0) found.push(...this._once({ graph: inner, id: GRAPH_INPUT }, input, seen));
      }
    }
    return found;
  }

  // {graph, node} whose output an input is connected to; null where there is none.
  giver(graph, node, input) {
    const entry = node.inputs[input];
    const link = this.links.get(graph).find((each) => each.id === entry?.link);
    if (!link) return null;
    if (link.origin_id === GRAPH_INPUT) {
      const name = graph.inputs[link.origin_slot]?.name;
      for (const outer of this.outside(graph)) {
        const host = this.nodes.get(outer.graph).get(outer.id);
        const index = (host.inputs ?? []).findIndex((each) => each.name === name);
        const found = index >= 0 && this.giver(outer.graph, host, index);
        if (found) return found;
      }
      return null;
    }
    const origin = this.nodes.get(graph).get(link.origin_id);
    const inner = origin && this.definitions.get(origin.type);
    if (!inner) return origin ? { graph, node: origin } : null;
    const out = this.links.get(inner).find(
      (each) => each.target_id === GRAPH_OUTPUT && each.target_slot === link.origin_slot,
    );
    const source = out && this.nodes.get(inner).get(out.origin_id);
    return source ? { graph: inner, node: source } : null;
  }

  // Nodes that stand for a subgraph.
  outside(graph) {
    return this.graphs.flatMap((outer) =>
      outer.nodes.filter((node) => node.type === graph.id).map((node) => ({ graph: outer, id: node.id })),
    );
  }

  _once(place, slot, seen) {
    const key = `${place.graph.id} ${place.id} ${slot}`;
    if (seen.has(key)) return [];
    seen.add(key);
    return this.takers(place.graph, place.id, slot, seen);
  }
}
