// The plan by device: the part of the picture's tokens and of the model's blocks that each computes.
import { table } from "../elements.js";
import { say } from "../said.js";

const AXES = ["ulysses", "ring", "pipe", "cfg", "data"]; // innermost first, as ranks are numbered

// What a rank computes, in words; one entry each.
function share(rank, { degrees, stage_blocks, heads }) {
  const at = {}; // where it is on each axis
  let rest = rank;
  for (const axis of AXES) {
    at[axis] = rest % degrees[axis];
    rest = Math.floor(rest / degrees[axis]);
  }
  if (rest > 0) return [say("idleRank")];
  const found = [];
  if (degrees.data > 1) found.push(say("dataPart", { part: at.data + 1, count: degrees.data }));
  if (degrees.cfg > 1) found.push(say("cfgPart", { part: at.cfg + 1, count: degrees.cfg }));
  if (degrees.pipe > 1) {
    const first = stage_blocks.slice(0, at.pipe).reduce((sum, count) => sum + count, 0);
    found.push(say("blocks", { first: first + 1, last: first + stage_blocks[at.pipe] }));
  }
  const sequence = degrees.ring * degrees.ulysses;
  if (sequence > 1) found.push(say("tokens", { part: at.ring * degrees.ulysses + at.ulysses + 1, count: sequence }));
  if (degrees.ulysses > 1) {
    const each = heads / degrees.ulysses;
    const [first, last] = [Math.round(at.ulysses * each) + 1, Math.round((at.ulysses + 1) * each)];
    found.push(say("heads", { first, last }));
  }
  return found.length ? found : [say("everything")];
}

// A table of a pool's devices under a plan.
export const planTable = (details, names) => table(names.map((name, rank) => [name, share(rank, details).join(", ")]));
