// The doctor's report in full on its node: the canvas' own block for texts shows a few lines of it, and goes with its
// prompt.
import { app } from "../../../../scripts/app.js";
import { h } from "../elements.js";

export const REPORT = "$$report"; // name of the widget that texts are written into
const WIDTH = 640;
const LARGEST = 820;
const LINE = 15;
const AROUND = 110; // title, socket and margins

app.registerExtension({
  name: "ParallelDiT.Report",
  nodeCreated(node) {
    if (node.comfyClass !== "ParallelDoctor") return;
    const box = h("pre", { class: "parallel-dit-report", tabindex: 0, "aria-label": "Parallel Doctor" });
    const show = (text) => {
      box.textContent = text;
      const lines = text.split("\n").reduce((sum, line) => sum + Math.max(1, Math.ceil(line.length / 95)), 0);
      const height = Math.min(lines * LINE + AROUND, LARGEST);
      if (text && node.size[1] < height) node.setSize([Math.max(node.size[0], WIDTH), height]);
    };
    const widget = node.addDOMWidget(REPORT, "report", box, {
      serialize: false,
      hideOnZoom: false,
      getMinHeight: () => 60,
      getValue: () => box.textContent,
      setValue: (text) => show(String(text ?? "")),
    });
    widget.serialize = false;
    node.setSize([WIDTH, 220]);
  },
});
