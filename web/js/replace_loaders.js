// Puts our loaders in the place of ComfyUI's in a saved workflow, and back: same file, links, title and place.
import { DEFAULTS, LOADERS, OURS, THEIR_DTYPES, outputsOf, theirsOf } from "./loader_table.js";
import { changeLink, graphsOf, readLink } from "./workflow_graphs.js";

// The type that would take a node's place; null where none does, undefined where it is no loader.
export function counterpart(node, toOurs) {
  if (toOurs) return LOADERS[node.type]?.ours;
  return OURS[node.type] && theirsOf(node, fileOf(node) ?? "");
}

export function fileOf(node) {
  const row = LOADERS[node.type] ?? OURS[node.type];
  return valuesOf(node, row.widgets)[row.file];
}

// chosen: [{graph, node}] of `workflow`, which is changed.
export function replaceLoaders(workflow, chosen, toOurs, defaultTitle) {
  const renamed = []; // {graph, id, from, to}: widgets that have another name now
  for (const { graph, node } of chosen) {
    const old = node.type;
    const type = counterpart(node, toOurs);
    const [from, to] = [LOADERS[old] ?? OURS[old], LOADERS[type] ?? OURS[type]];
    const values = { ...DEFAULTS, ...valuesOf(node, from.widgets) };
    values[to.file] = values[from.file];
    if (!toOurs && !THEIR_DTYPES.includes(values.weight_dtype)) values.weight_dtype = DEFAULTS.weight_dtype;

    node.type = type;
    node.widgets_values = to.widgets.map((name) => values[name]);
    delete node.widgets_values_named;
    const { cnr_id, ver, aux_id, ...properties } = node.properties ?? {}; // those of the other pack
    node.properties = { ...properties, "Node name for S&R": type };
    if (node.title === defaultTitle(old)) delete node.title;
    replaceInputs(graph, node, from.file, to);
    replaceOutputs(graph, node, outputsOf(old), toOurs ? from.outputs : inverse(to.outputs), outputsOf(type));
    if (from.file !== to.file) renamed.push({ graph, id: node.id, from: from.file, to: to.file });
  }
  for (const each of renamed) renamePromoted(workflow, each);
}

function valuesOf(node, names) {
  const saved = node.widgets_values ?? node.widgets_values_named ?? [];
  if (!Array.isArray(saved)) return { ...saved };
  return Object.fromEntries(names.slice(0, saved.length).map((name, index) => [name, saved[index]]));
}

const inverse = (slots) => Object.fromEntries(slots.map((slot, index) => [slot, index]));

// Inputs that the new node has not (Parallel Config's) go, with their links.
function replaceInputs(graph, node, file, to) {
  const isOurs = Boolean(OURS[node.type]);
  const kept = [];
  for (const entry of node.inputs ?? []) {
    const name = entry.name === file ? to.file : entry.name;
    if (!to.widgets.includes(name) && !(isOurs && name === "parallel_config")) {
      removeLink(graph, entry.link);
      continue;
    }
    if (name !== entry.name) {
      const { localized_name, ...rest } = entry;
      kept.push({ ...rest, name, ...(entry.widget && { widget: { ...entry.widget, name } }) });
    } else kept.push(entry);
  }
  node.inputs = kept;
  kept.forEach((entry, index) => changeLinks(graph, [entry.link], { target_slot: index }));
}

function replaceOutputs(graph, node, names, slots, wanted) {
  const old = node.outputs ?? [];
  const outputs = wanted.map((name) => ({ name, type: name, links: null }));
  names.forEach((_, slot) => {
    const links = old[slot]?.links ?? [];
    if (slots[slot] === undefined) return; // nothing is connected, or there would be no counterpart
    outputs[slots[slot]].links = links.length ? [...links] : null;
    if (old[slot]?.label) outputs[slots[slot]].label = old[slot].label;
    changeLinks(graph, links, { origin_slot: slots[slot] });
  });
  node.outputs = outputs;
}

function changeLinks(graph, ids, changes) {
  for (const link of graph.links ?? []) if (ids.includes(readLink(link).id)) changeLink(link, changes);
}

function removeLink(graph, id) {
  if (id == null) return;
  graph.links = graph.links.filter((link) => readLink(link).id !== id);
  const extensions = graph.extra?.linkExtensions; // by which reroutes a link goes
  if (extensions) graph.extra.linkExtensions = extensions.filter((each) => each.id !== id);
  for (const node of graph.nodes)
    for (const output of node.outputs ?? []) output.links = output.links?.filter((each) => each !== id) ?? null;
  for (const input of graph.inputs ?? []) input.linkIds = input.linkIds?.filter((each) => each !== id);
}

// Widgets shown on a subgraph's outside, in files that name them by node and widget; and those of the app view.
function renamePromoted(workflow, { graph, id, from, to }) {
  const rename = (entries) => {
    const found = (entries ?? []).filter((entry) => String(entry[0]) === String(id) && entry[1] === from);
    for (const entry of found) entry[1] = to;
    return found.length > 0;
  };
  if (graph === workflow) {
    rename(workflow.extra?.linearData?.inputs);
    return;
  }
  for (const outer of graphsOf(workflow))
    for (const node of outer.nodes)
      if (node.type === graph.id && rename(node.properties?.proxyWidgets))
        renamePromoted(workflow, { graph: outer, id: node.id, from, to });
}
