// A text below a node that stands for a subgraph: such a node has no widgets of its own that could hold it.

const FONT = "11px sans-serif";
const LINE = 14;
const NARROWEST = 260;
const MOST_LINES = 8;

function lines(context, text, width) {
  const found = [""];
  for (const word of text.split(/\s+/)) {
    const longer = `${found.at(-1)} ${word}`.trim();
    if (context.measureText(longer).width <= width || !found.at(-1)) found[found.length - 1] = longer;
    else found.push(word);
  }
  return found.slice(0, MOST_LINES);
}

// Writes it there, until another text comes; it is not saved with the workflow.
export function writeBelow(node, text) {
  if (!node) return;
  if (node.parallelDitText === undefined) {
    const draw = node.onDrawForeground;
    node.onDrawForeground = function (context, ...others) {
      draw?.call(this, context, ...others);
      if (this.flags?.collapsed || !this.parallelDitText) return;
      context.save();
      context.font = FONT;
      context.textAlign = "left";
      context.fillStyle = getComputedStyle(document.body).getPropertyValue("--fg-color") || "#999";
      lines(context, this.parallelDitText, Math.max(this.size[0], NARROWEST)).forEach((line, index) =>
        context.fillText(line, 4, this.size[1] + LINE * (index + 1)),
      );
      context.restore();
    };
  }
  node.parallelDitText = text;
  node.setDirtyCanvas?.(true, true);
}
