// A text on a node that has no room for it: as much as fits stands above the node, the whole of it is its tooltip.
import { app } from "../../../scripts/app.js";

const BESIDE = 110; // the badge with its pack's name
const NARROWEST = 120;
const ABOVE = 60; // title and badges
const pen = document.createElement("canvas").getContext("2d");
const badges = new WeakMap(); // node -> its badge

// Puts it there in the place of the one before; "" takes it away. It is not saved with the workflow.
export function writeBadge(node, text, colours = { fgColor: "#ddd", bgColor: "#2d4a6e" }) {
  const index = node.badges.indexOf(badges.get(node));
  if (index >= 0) node.badges.splice(index, 1);
  node.parallelDitText = text;
  if (text) {
    badges.set(node, new LGraphBadge({ text: short(text, node), ...colours }));
    node.badges.push(badges.get(node));
  }
  app.canvas.setDirty(true, true);
}

function short(text, node) {
  pen.font = "12px Inter, sans-serif";
  const room = Math.max(node.size[0] - BESIDE, NARROWEST);
  let length = text.length;
  while (length > 1 && pen.measureText(text.slice(0, length)).width > room) length--;
  return length < text.length ? `${text.slice(0, length).trimEnd()}…` : text;
}

function nodeAbove([x, y]) {
  return app.canvas.graph?.nodes.find(
    ({ parallelDitText, pos, size }) =>
      parallelDitText && x >= pos[0] && x <= pos[0] + size[0] && y <= pos[1] && y >= pos[1] - ABOVE,
  );
}

// Nodes 2.0 are elements of the page that show no badge but their pack's: it is drawn on the canvas behind them.
function drawBesideElements(context, node) {
  const badge = node.parallelDitText && badges.get(node);
  if (!badge) return;
  const [right, top] = [node.pos[0] + node.size[0], node.pos[1] - LiteGraph.NODE_TITLE_HEIGHT];
  badge.draw(context, right - badge.getWidth(context), top - badge.height - 2);
}

app.registerExtension({
  name: "ParallelDiT.TextBadge",
  setup() {
    const { onDrawForeground } = app.canvas;
    app.canvas.onDrawForeground = function (context, ...others) {
      onDrawForeground?.call(this, context, ...others);
      if (LiteGraph.vueNodesMode) for (const node of this.graph?.nodes ?? []) drawBesideElements(context, node);
    };
    const { canvas } = app.canvas;
    canvas.addEventListener("mousemove", () => (canvas.title = nodeAbove(app.canvas.graph_mouse)?.parallelDitText ?? ""));
    document.addEventListener("mouseover", ({ target }) => {
      const element = target.closest?.("[data-node-id]"); // Nodes 2.0 are elements of the page
      if (element) element.title = app.canvas.graph?.getNodeById(element.dataset.nodeId)?.parallelDitText ?? "";
    });
  },
});
