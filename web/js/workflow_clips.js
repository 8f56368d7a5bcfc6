// Puts ComfyUI's Select CLIP Device behind CLIP loaders of a saved workflow, and takes away those that were put in so.
import { api } from "../../../scripts/api.js";
import { insertBehind, newNode, takeAway } from "./inserted_nodes.js";
import { OURS } from "./loader_table.js";
import { choicesOf, titleOf } from "./node_names.js";
import { bytes } from "./panel/numbers.js";
import { fileOf } from "./replace_loaders.js";
import { say } from "./words.js";
import { Connections, graphsOf } from "./workflow_graphs.js";

const SELECT = "SelectCLIPDevice";
const LOADERS = ["CLIPLoader", "DualCLIPLoader", "TripleCLIPLoader", "QuadrupleCLIPLoader"];
const MARK = "ParallelDiT.offered";

const textsOf = (node) =>
  Object.values(node.widgets_values ?? node.widgets_values_named ?? []).filter((each) => typeof each === "string");

// {graph, node, files} of each loader whose CLIP could be on another GPU. Where a node gives the CLIP on (LoRA, another
// Select CLIP Device), it stays: of ComfyUI 0.33's node on another GPU, a LoRA has no effect on the text encoder.
function movableClips(workflow) {
  const connections = new Connections(workflow);
  const movable = (graph, node) => {
    const takers = LOADERS.includes(node.type) && !node.mode ? connections.takers(graph, node.id, 0) : [];
    const givesOn = (taker) => (taker.node.outputs ?? []).some((each) => ["CLIP", "*"].includes(each.type));
    return takers.length > 0 && !takers.some(givesOn) && !textsOf(node).includes("cpu");
  };
  return connections.graphs.flatMap((graph) =>
    graph.nodes.filter((node) => movable(graph, node)).map((node) => ({ graph, node, files: textsOf(node) })),
  );
}

// What Use all GPUs offers for text encoders that have no room beside the model, as the server knows:
// [{graph, node, gpu, text}]; chosen: loaders that move to all GPUs now.
export async function clipOffers(workflow, chosen) {
  const gpus = choicesOf(SELECT, "device") ?? []; // of an older ComfyUI, which has no such node, none
  const ours = graphsOf(workflow).flatMap((graph) => graph.nodes.filter((node) => node.type in OURS));
  const models = [...chosen.map(({ node }) => node), ...ours].map(fileOf);
  const clips = gpus.includes("gpu:1") && models.length ? movableClips(workflow) : [];
  if (!clips.length) return [];
  const body = JSON.stringify({ encoders: clips.map(({ files }) => files), models });
  const answer = await api.fetchApi("/parallel_dit/encoders", { method: "POST", body }).catch(() => null);
  const { places } = answer?.ok ? await answer.json() : { places: [] };
  return clips.flatMap(({ graph, node }, index) => {
    const place = places[index];
    if (!place || !gpus.includes(`gpu:${place.gpu}`)) return [];
    const sizes = { encoder: bytes(place.encoder), model: bytes(place.model) };
    return [{ graph, node, gpu: place.gpu, text: say("clipSaves", { ...place, ...sizes, node: titleOf(node) }) }];
  });
}

// chosen: [{graph, node, gpu}] of `workflow`.
export function putClipsOnGpus(workflow, chosen) {
  for (const { graph, node, gpu } of chosen) {
    const added = newNode(workflow, node, {
      type: SELECT, size: [270, 60], widgets_values: [`gpu:${gpu}`], properties: { [MARK]: true },
      inputs: [{ name: "clip", type: "CLIP", link: null }], outputs: [{ name: "CLIP", type: "CLIP", links: [] }],
    });
    insertBehind(workflow, graph, node, 0, added);
  }
}

// How many were taken away of those that `putClipsOnGpus` put in.
export function takeClipsBack(workflow) {
  let count = 0;
  for (const graph of graphsOf(workflow))
    for (const node of graph.nodes.filter((each) => each.type === SELECT && each.properties?.[MARK]))
      count += takeAway(graph, node);
  return count;
}
