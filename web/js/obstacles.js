// What stands against a MODEL in the pool: nodes on its way that nodes/model_nodes.py refuses by name.

const NEVER = 2;
const BYPASS = 4;

// [{node, why}] between a loader and its samplers, each once; refused: type -> why.
export function obstacles(connections, graph, loader, refused) {
  const found = new Map();
  const seen = new Set();
  const ask = (node) => {
    if (refused[node.type] && node.mode !== BYPASS) found.set(node, { node, why: refused[node.type] });
  };
  const follow = (from, slot) => {
    for (const taker of connections.takers(from.graph, from.node.id, slot)) {
      if (seen.has(taker.node) || taker.node.mode === NEVER) continue;
      seen.add(taker.node);
      ask(taker.node);
      // What a guider or a sampler node is given to sample with acts on this MODEL, too.
      (taker.node.inputs ?? []).forEach((entry, index) => {
        const giver = entry.type === "SAMPLER" && connections.giver(taker.graph, taker.node, index);
        if (giver) ask(giver.node);
      });
      (taker.node.outputs ?? []).forEach((entry, index) => {
        if (["MODEL", "GUIDER", "*"].includes(entry.type)) follow(taker, index);
      });
    }
  };
  follow({ graph, node: loader }, 0);
  return [...found.values()];
}

// Whether anything takes a loader's MODEL.
export const isUsed = (connections, graph, loader) => connections.takers(graph, loader.id, 0).length > 0;
