// Puts our loaders in the place of ComfyUI's in the workflow on the canvas, and back: same file, links, title and place.
import { app } from "../../../scripts/app.js";
import { linksFrom } from "./connections.js";
import { LOADERS, OURS, THEIR_DTYPES } from "./loader_table.js";

const rowOf = (type) => LOADERS[type] ?? OURS[type];

// The type that would take a node's place; null where none gives what is connected, undefined where it is no loader.
export function counterpart(node, toOurs) {
  if (toOurs) return LOADERS[node.type]?.ours;
  if (!OURS[node.type]) return undefined;
  const file = fileOf(node) ?? "";
  if (file.endsWith("/")) return null; // a folder of diffusers', which earlier versions took
  if (node.type === "ParallelLoader") return file.toLowerCase().endsWith(".gguf") ? "UnetLoaderGGUF" : "UNETLoader";
  const connected = (slot) => linksFrom(node.graph, node.id, slot).length > 0;
  if (!connected(3)) return "CheckpointLoaderSimple";
  return connected(1) ? null : "ImageOnlyCheckpointLoader";
}

export function fileOf(node) {
  const { widgets } = rowOf(node.type);
  return valuesOf(node.serialize(), widgets)[widgets[0]];
}

// The workflow as it is saved, with others in their places; chosen: [node, type that takes its place].
export function replaceLoaders(chosen) {
  for (const [node, type] of chosen) disconnectWhatGoes(node, rowOf(type).widgets);
  const workflow = app.rootGraph.serialize();
  const graphs = [workflow, ...(workflow.definitions?.subgraphs ?? [])];
  const renamed = []; // {graph, id, from, to}: widgets that have another name now
  for (const [shown, type] of chosen) {
    const graph = graphs.find(({ id }) => id === shown.graph.id);
    const node = graph.nodes.find(({ id }) => String(id) === String(shown.id));
    const [from, to] = [rowOf(node.type), rowOf(type)];
    const [file, toFile] = [from.widgets[0], to.widgets[0]];
    const values = { weight_dtype: "default", ...valuesOf(node, from.widgets) };
    values[toFile] = values[file];
    if (type in LOADERS && !THEIR_DTYPES.includes(values.weight_dtype)) values.weight_dtype = "default";

    node.type = type;
    node.widgets_values = to.widgets.map((name) => values[name]);
    delete node.widgets_values_named;
    const { cnr_id, ver, aux_id, ...properties } = node.properties ?? {}; // those of the other pack
    node.properties = { ...properties, "Node name for S&R": type };
    if (node.title === (shown.constructor.title ?? shown.type)) delete node.title;
    replaceInputs(graph, node, file, to.widgets);
    replaceOutputs(graph, node, from.outputs, to.outputs);
    if (file !== toFile) renamed.push({ graph, id: node.id, from: file, to: toFile });
  }
  for (const each of renamed) renamePromoted(graphs, each);
  return workflow;
}

// Inputs that the new node has not (Parallel Config's).
function disconnectWhatGoes(node, widgets) {
  const [file] = rowOf(node.type).widgets;
  node.inputs.forEach(({ name }, index) => {
    if (name !== file && !widgets.includes(name)) node.disconnectInput(index);
  });
}

function valuesOf(node, names) {
  const saved = node.widgets_values ?? [];
  return Object.fromEntries(names.slice(0, saved.length).map((name, index) => [name, saved[index]]));
}

function replaceInputs(graph, node, file, widgets) {
  const named = (node.inputs ?? []).map((entry) => (entry.name === file ? { ...entry, name: widgets[0] } : entry));
  node.inputs = named.filter((entry) => widgets.includes(entry.name));
  node.inputs.forEach((entry, index) => changeLink(graph, entry.link, "target_slot", index));
}

// By their names; of one that the new node has not, nothing is connected, or there would be no counterpart.
function replaceOutputs(graph, node, names, wanted) {
  const old = node.outputs ?? [];
  node.outputs = wanted.map((name, slot) => {
    const output = old[names.indexOf(name)] ?? { name, type: name, links: null };
    for (const id of output.links ?? []) changeLink(graph, id, "origin_slot", slot);
    return output;
  });
}

// Links of a workflow are lists, those of a subgraph objects.
const PLACES = ["id", "origin_id", "origin_slot", "target_id", "target_slot", "type"];

function changeLink(graph, id, name, value) {
  const link = graph.links?.find((each) => (each.id ?? each[0]) === id);
  if (link) link[Array.isArray(link) ? PLACES.indexOf(name) : name] = value;
}

// Widgets shown on a subgraph's outside, in files that name them by node and widget; and those of the app view.
function renamePromoted(graphs, { graph, id, from, to }) {
  const rename = (entries) => {
    const found = (entries ?? []).filter((entry) => String(entry[0]) === String(id) && entry[1] === from);
    for (const entry of found) entry[1] = to;
    return found.length > 0;
  };
  rename(graph.extra?.linearData?.inputs);
  for (const outer of graphs)
    for (const node of outer.nodes)
      if (node.type === graph.id && rename(node.properties?.proxyWidgets))
        renamePromoted(graphs, { graph: outer, id: node.id, from, to });
}
