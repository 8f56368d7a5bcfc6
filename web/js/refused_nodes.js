// Types of nodes that the pool cannot carry, and why: asked of the server once, which has it from nodes/model_nodes.py.
import { api } from "../../../scripts/api.js";
import { readTable } from "./said.js";

let asked = null;

// Promise of {type: why}, in the canvas' language.
export async function refusedNodes() {
  asked ??= api.fetchApi("/parallel_dit/refused_nodes").then((answer) => (answer.ok ? answer.json() : {}));
  const table = await readTable();
  return Object.fromEntries(Object.entries(await asked).map(([type, why]) => [type, table[why] ?? why]));
}
