// The canvas side of Parallel DiT: its settings, its style, and node sizes.
import { app } from "../../../scripts/app.js";

const settings = await (await fetch(new URL("../settings.json", import.meta.url))).json();

const style = document.createElement("link");
style.rel = "stylesheet";
style.href = new URL("../css/parallel_dit.css", import.meta.url).href;
document.head.append(style);

// The plan is a paragraph, and the canvas gives a text two lines: a new node has the room. Saved graphs keep theirs.
const ROOM_FOR_TEXT = { ParallelConfig: 170, ParallelLoader: 170, ParallelCheckpointLoader: 170, ParallelSampler: 110 };
const WIDTH = 340;

app.registerExtension({
  name: "ParallelDiT",
  nodeCreated(node) {
    const room = ROOM_FOR_TEXT[node.comfyClass];
    if (room) node.setSize([Math.max(node.size[0], WIDTH), node.computeSize()[1] + room]);
  },
  // Graphs from before hold true or false for `compile`, another word of `weights`, and an input `network` of loaders.
  loadedGraphNode(node) {
    if (node.comfyClass === "ParallelLoader" || node.comfyClass === "ParallelCheckpointLoader") {
      const gone = node.inputs?.findIndex((input) => input.name === "network") ?? -1;
      if (gone >= 0) node.removeInput(gone);
    }
    if (node.comfyClass !== "ParallelConfig") return;
    const compile = node.widgets?.find((widget) => widget.name === "compile");
    if (typeof compile?.value === "boolean") compile.value = compile.value ? "on" : "off";
    const weights = node.widgets?.find((widget) => widget.name === "weights");
    if (weights?.value === "dealt") weights.value = "spread";
  },
  settings, // nodes/panel/settings.py reads them, where a file of settings may hold anything
});
