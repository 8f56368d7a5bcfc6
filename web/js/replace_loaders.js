// Puts our loaders in the place of ComfyUI's in a saved workflow, and back: same file, links, title and place.
import { DEFAULTS, LOADERS, OURS, THEIR_DTYPES, rowOf, theirsOf } from "./loader_table.js";
import { changeLink, graphsOf, readLink, removeLinks } from "./workflow_graphs.js";

// The type that would take a node's place; null where none does, undefined where it is no loader.
export function counterpart(node, toOurs) {
  if (toOurs) return LOADERS[node.type]?.ours;
  return OURS[node.type] && theirsOf(node, fileOf(node) ?? "");
}

export function fileOf(node) {
  const { widgets } = rowOf(node.type);
  return valuesOf(node, widgets)[widgets[0]];
}

// chosen: [{graph, node}] of `workflow`, which is changed.
export function replaceLoaders(workflow, chosen, toOurs, defaultTitle) {
  const renamed = []; // {graph, id, from, to}: widgets that have another name now
  for (const { graph, node } of chosen) {
    const old = node.type;
    const type = counterpart(node, toOurs);
    const [from, to] = [rowOf(old), rowOf(type)];
    const [file, toFile] = [from.widgets[0], to.widgets[0]];
    const values = { ...DEFAULTS, ...valuesOf(node, from.widgets) };
    values[toFile] = values[file];
    if (!toOurs && !THEIR_DTYPES.includes(values.weight_dtype)) values.weight_dtype = DEFAULTS.weight_dtype;

    node.type = type;
    node.widgets_values = to.widgets.map((name) => values[name]);
    delete node.widgets_values_named;
    const { cnr_id, ver, aux_id, ...properties } = node.properties ?? {}; // those of the other pack
    node.properties = { ...properties, "Node name for S&R": type };
    if (node.title === defaultTitle(old)) delete node.title;
    replaceInputs(graph, node, file, to.widgets);
    replaceOutputs(graph, node, from.outputs, to.outputs);
    if (file !== toFile) renamed.push({ graph, id: node.id, from: file, to: toFile });
  }
  for (const each of renamed) renamePromoted(workflow, each);
}

function valuesOf(node, names) {
  const saved = node.widgets_values ?? node.widgets_values_named ?? [];
  if (!Array.isArray(saved)) return { ...saved };
  return Object.fromEntries(names.slice(0, saved.length).map((name, index) => [name, saved[index]]));
}

// Inputs that the new node has not (Parallel Config's) go, with their links.
function replaceInputs(graph, node, file, widgets) {
  const known = [...widgets, ...(OURS[node.type] ? ["parallel_config"] : [])];
  const named = (node.inputs ?? []).map((entry) => {
    if (entry.name !== file || file === widgets[0]) return entry;
    const { localized_name, ...rest } = entry;
    const name = widgets[0];
    return { ...rest, name, ...(entry.widget && { widget: { ...entry.widget, name } }) };
  });
  node.inputs = named.filter((entry) => known.includes(entry.name));
  removeLinks(graph, named.filter((entry) => !known.includes(entry.name)).map((entry) => entry.link));
  node.inputs.forEach((entry, index) => changeLinks(graph, [entry.link], { target_slot: index }));
}

// By their names; of one that the new node has not, nothing is connected, or there would be no counterpart.
function replaceOutputs(graph, node, names, wanted) {
  const old = node.outputs ?? [];
  node.outputs = wanted.map((name, slot) => {
    const before = old[names.indexOf(name)];
    const links = before?.links?.length ? [...before.links] : null;
    changeLinks(graph, links ?? [], { origin_slot: slot });
    return { name, type: name, links, ...(before?.label && { label: before.label }) };
  });
}

function changeLinks(graph, ids, changes) {
  for (const link of graph.links ?? []) if (ids.includes(readLink(link).id)) changeLink(link, changes);
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
