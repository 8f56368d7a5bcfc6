// The plan as a picture: for each rank, the part of the picture's tokens and of the model's blocks that it computes.
import { h } from "./elements.js";
import { word } from "./words.js";

const CELL = { width: 92, gap: 6 };
const HEAD = 66; // above the words of a cell
const LINE = 12;
const SIDE = 44; // of the picture that stands for the tokens
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

// What a rank computes, in words; one line each.
export function share(rank, details) {
  const { degrees } = details;
  const at = place(rank, degrees);
  const lines = [];
  if (degrees.data > 1) lines.push(word("dataPart", { part: at.data + 1, count: degrees.data }));
  if (degrees.cfg > 1) lines.push(word("cfgPart", { part: at.cfg + 1, count: degrees.cfg }));
  if (degrees.pipe > 1) {
    const first = details.stage_blocks.slice(0, at.pipe).reduce((sum, count) => sum + count, 0);
    lines.push(word("blocks", { first: first + 1, last: first + details.stage_blocks[at.pipe] }));
  }
  const sequence = degrees.ring * degrees.ulysses;
  if (sequence > 1) lines.push(word("tokens", { part: at.ring * degrees.ulysses + at.ulysses + 1, count: sequence }));
  if (degrees.ulysses > 1) {
    const each = details.heads / degrees.ulysses;
    const first = Math.round(at.ulysses * each);
    lines.push(word("heads", { first: first + 1, last: Math.round((at.ulysses + 1) * each) }));
  }
  return lines.length ? lines : [word("everything")];
}

function cell(rank, name, details, height, x, y) {
  const { degrees } = details;
  const used = rank < AXES.reduce((product, axis) => product * degrees[axis], 1);
  const at = place(rank, degrees);
  const sequence = degrees.ring * degrees.ulysses;
  const part = at.ring * degrees.ulysses + at.ulysses;
  const frame = { fill: "var(--pdit-rest)", stroke: "var(--pdit-line)" };
  const mine = used ? "var(--pdit-ours)" : "none";
  const lines = used ? share(rank, details) : [word("idleRank")];
  return h(
    "g",
    { transform: `translate(${x} ${y})` },
    h("title", {}, `${name}: ${lines.join(", ")}`),
    h("rect", { width: CELL.width, height, rx: 6, fill: "none", stroke: "var(--pdit-line)" }),
    h("text", { x: 6, y: 13, "font-weight": 600 }, name),
    h("rect", { x: 6, y: 18, width: SIDE, height: SIDE, ...frame }),
    h("rect", { x: 6, y: 18 + (SIDE * part) / sequence, width: SIDE, height: SIDE / sequence, fill: mine }),
    h("rect", { x: 56, y: 18, width: 12, height: SIDE, ...frame }),
    h("rect", { x: 56, y: 18 + (SIDE * at.pipe) / degrees.pipe, width: 12, height: SIDE / degrees.pipe, fill: mine }),
    lines.map((line, index) => h("text", { x: 6, y: HEAD + 9 + LINE * index }, line)),
  );
}

// An SVG of a pool's ranks under a plan.
export function planPicture(details, names, plan, width) {
  const columns = Math.max(1, Math.floor((width + CELL.gap) / (CELL.width + CELL.gap)));
  const rows = Math.ceil(names.length / columns);
  const height = HEAD + LINE * share(0, details).length + 4;
  const [stepX, stepY] = [CELL.width + CELL.gap, height + CELL.gap];
  const size = { width: Math.min(columns, names.length) * stepX, height: rows * stepY };
  return h(
    "svg",
    { ...size, viewBox: `-1 -1 ${size.width} ${size.height}`, role: "img", "aria-label": word("planLabel", { plan }) },
    names.map((name, rank) => cell(rank, name, details, height, (rank % columns) * stepX, Math.floor(rank / columns) * stepY)),
  );
}
