// Room for a text on a node: the canvas gives it two lines, breaks it inside of words, and cuts off the rest.
import { h } from "./elements.js";
import { brokenLines } from "./text_below.js";

const NAME = "$$node-text-preview"; // the canvas' widget for it
const FONT = "12px Inter, sans-serif";
const LINE = 16;
const ABOVE_AND_BELOW = 24;
const BESIDE = 64;
const MOST_LINES = 11; // more are scrolled

const pen = document.createElement("canvas").getContext("2d");

function height(node, text) {
  pen.font = FONT;
  const lines = text.split("\n").reduce((sum, line) => sum + brokenLines(pen, line, node.size[0] - BESIDE).length, 0);
  return ABOVE_AND_BELOW + LINE * Math.min(lines, MOST_LINES);
}

// Has the node grow where its text needs more; it never shrinks.
export function makeRoom(node) {
  const widget = node?.widgets?.find(({ name }) => name === NAME);
  if (!widget?.component) return; // our report has a box of its own
  widget.options.getMinHeight = () => height(node, String(widget.value ?? ""));
  const least = node.computeSize()[1];
  if (node.size[1] < least) node.setSize([node.size[0], least]);
}

document.head.append(
  h(
    "style",
    { id: "pdit-text-style" },
    ".dom-widget .break-all:has(> span) { word-break: normal; overflow-wrap: anywhere; align-items: flex-start; }",
  ),
);
