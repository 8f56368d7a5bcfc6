// The canvas side of Parallel DiT: a setting, which nodes/start_setting.py reads when ComfyUI starts, and node sizes.
import { app } from "../../../scripts/app.js";

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
  // Graphs from before hold true or false for `compile`, and another word of `weights`.
  loadedGraphNode(node) {
    if (node.comfyClass !== "ParallelConfig") return;
    const compile = node.widgets?.find((widget) => widget.name === "compile");
    if (typeof compile?.value === "boolean") compile.value = compile.value ? "on" : "off";
    const weights = node.widgets?.find((widget) => widget.name === "weights");
    if (weights?.value === "dealt") weights.value = "spread";
  },
  settings: [
    {
      id: "ParallelDiT.StartDevices",
      category: ["Parallel DiT", "Pool", "StartDevices"],
      sortOrder: 3,
      name: "Start the pool together with ComfyUI, on these devices",
      tooltip:
        "auto for all GPUs, numbers such as 0,1, or cpu:2. Empty: those of the last session, if it used them. " +
        "none: the first prompt starts it. Takes effect at ComfyUI's next start.",
      type: "text",
      defaultValue: "",
    },
  ],
});
