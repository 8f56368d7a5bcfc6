// What Use all GPUs offers for text encoders that have no room beside the model: asked of the server, said in words.
import { api } from "../../../scripts/api.js";
import { OURS } from "./loader_table.js";
import { choicesOf, titleOf } from "./node_names.js";
import { bytes } from "./panel/numbers.js";
import { fileOf } from "./replace_loaders.js";
import { say } from "./words.js";
import { movableClips, SELECT } from "./workflow_clips.js";
import { graphsOf } from "./workflow_graphs.js";

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
