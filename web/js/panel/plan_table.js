// The plan by device: the part of the picture's tokens and of the model's blocks that each computes.
import { h } from "./elements.js";
import { say as word } from "../words.js";

const AXES = ["data", "cfg", "pipe", "ring", "ulysses"]; // outermost first, as ranks are numbered

// Where a rank is on each axis.
export function place(rank, degrees) {
  const found = {};
  let rest = rank;
  for (const axis of [...AXES].reverse()) {
    found[axis] = rest % degrees[axis];
    rest = Math.floor(rest / degrees[axis]);
  }
  return found;
}

// What a rank computes, in words; one entry each.
export function share(rank, { degrees, stage_blocks, heads }) {
  if (rank >= AXES.reduce((product, axis) => product * degrees[axis], 1)) return [word("idleRank")];
  const at = place(rank, degrees);
  const found = [];
  if (degrees.data > 1) found.push(word("dataPart", { part: at.data + 1, count: degrees.data }));
  if (degrees.cfg > 1) found.push(word("cfgPart", { part: at.cfg + 1, count: degrees.cfg }));
  if (degrees.pipe > 1) {
    const first = stage_blocks.slice(0, at.pipe).reduce((sum, count) => sum + count, 0);
    found.push(word("blocks", { first: first + 1, last: first + stage_blocks[at.pipe] }));
  }
  const sequence = degrees.ring * degrees.ulysses;
  if (sequence > 1) found.push(word("tokens", { part: at.ring * degrees.ulysses + at.ulysses + 1, count: sequence }));
  if (degrees.ulysses > 1) {
    const each = heads / degrees.ulysses;
    const [first, last] = [Math.round(at.ulysses * each) + 1, Math.round((at.ulysses + 1) * each)];
    found.push(word("heads", { first, last }));
  }
  return found.length ? found : [word("everything")];
}

// A table of a pool's devices under a plan.
export function planTable(details, names) {
  const row = (name, rank) => h("tr", {}, h("td", {}, name), h("td", {}, share(rank, details).join(", ")));
  return h("table", { class: "pdit-plan" }, h("tbody", {}, names.map(row)));
}
