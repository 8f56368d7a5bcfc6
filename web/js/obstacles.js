// What stands against a MODEL in the pool: nodes on its way that nodes/model_nodes.py refuses by name.
import { api } from "../../../scripts/api.js";
import { giverOf, takers } from "./connections.js";
import { readTable } from "./said.js";

export const NEVER = 2; // modes of a node
export const BYPASS = 4;

let asked = null;

// Promise of {type: why}, in the canvas' language; the server is asked once.
export async function refusedNodes() {
  asked ??= api.fetchApi("/parallel_dit/refused_nodes").then((answer) => (answer.ok ? answer.json() : {}));
  const table = await readTable();
  return Object.fromEntries(Object.entries(await asked).map(([type, why]) => [type, table[why] ?? why]));
}

// [node, why] between a loader and its samplers, each once; refused: type -> why.
export function obstacles(loader, refused) {
  const found = new Map();
  const seen = new Set();
  const ask = (node) => {
    const why = node.mode !== BYPASS && refused[node.type];
    if (why) found.set(node, why);
  };
  const follow = (from, slot) => {
    for (const taker of takers(from, slot)) {
      if (seen.has(taker) || taker.mode === NEVER) continue;
      seen.add(taker);
      ask(taker);
      // What a guider or a sampler node is given to sample with acts on this MODEL, too.
      taker.inputs.forEach((entry, index) => {
        const giver = entry.type === "SAMPLER" && giverOf(taker, index);
        if (giver) ask(giver);
      });
      taker.outputs.forEach((entry, index) => {
        if (["MODEL", "GUIDER", "*"].includes(entry.type)) follow(taker, index);
      });
    }
  };
  follow(loader, 0);
  return [...found];
}
