// Types of nodes that the pool cannot carry, and why: asked of the server once, which has it from nodes/model_nodes.py.
import { api } from "../../../scripts/api.js";

let asked = null;

// Promise of {type: why}.
export function refusedNodes() {
  asked ??= api.fetchApi("/parallel_dit/refused_nodes").then((answer) => (answer.ok ? answer.json() : {}));
  return asked;
}
