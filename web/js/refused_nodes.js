// Types of nodes that the pool cannot carry, and why: asked of the server once, which has it from nodes/model_nodes.py.
import { api } from "../../../scripts/api.js";
import { sentences } from "./sentences.js";

let asked = null;

// Promise of {type: why}, in the canvas' language.
export async function refusedNodes() {
  asked ??= api.fetchApi("/parallel_dit/refused_nodes").then((answer) => (answer.ok ? answer.json() : {}));
  const found = Object.entries(await asked);
  return Object.fromEntries(await Promise.all(found.map(async ([type, why]) => [type, await sentences(why)])));
}
