// A text below a node that stands for a subgraph: such a node has no widgets of its own that could hold it. Drawn on the
// canvas after its nodes, as Nodes 2.0 are elements of the page that draw nothing on it.
import { app } from "../../../../scripts/app.js";

const FONT = "11px sans-serif";
const LINE = 14;
const NARROWEST = 260;
const MOST_LINES = 8;

// Between words, and behind each character of Chinese and Japanese, which have no spaces.
const PIECES = /[\u3001-\u30ff\u4e00-\u9fff\uff00-\uffef]|[^\s\u3001-\u30ff\u4e00-\u9fff\uff00-\uffef]+|\s+/g;

// The text's lines at this width, in the context's font.
export function brokenLines(context, text, width) {
  const found = [""];
  for (const piece of text.match(PIECES) ?? []) {
    const longer = found.at(-1) + piece;
    if (context.measureText(longer.trimEnd()).width <= width || !found.at(-1)) found[found.length - 1] = longer;
    else found.push(piece.trimStart());
  }
  return found;
}

function draw(context, node) {
  const below = node.pos[1] + node.size[1];
  context.save();
  context.font = FONT;
  context.textAlign = "left";
  context.fillStyle = getComputedStyle(document.body).getPropertyValue("--fg-color") || "#999";
  const lines = brokenLines(context, node.parallelDitText, Math.max(node.size[0], NARROWEST)).slice(0, MOST_LINES);
  lines.forEach((line, index) => context.fillText(line, node.pos[0] + 4, below + LINE * (index + 1)));
  context.restore();
}

// Writes it there, until another text comes; it is not saved with the workflow.
export function writeBelow(node, text) {
  if (!node) return;
  node.parallelDitText = text;
  node.setDirtyCanvas?.(true, true);
}

app.registerExtension({
  name: "ParallelDiT.TextBelow",
  setup() {
    const { onDrawForeground } = app.canvas;
    app.canvas.onDrawForeground = function (context, ...others) {
      onDrawForeground?.call(this, context, ...others);
      for (const node of this.graph?.nodes ?? []) if (node.parallelDitText && !node.flags?.collapsed) draw(context, node);
    };
  },
});
