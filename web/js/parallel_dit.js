// The canvas side of Parallel DiT: one setting, which nodes/start_setting.py reads when ComfyUI starts.
import { app } from "../../../scripts/app.js";

app.registerExtension({
  name: "ParallelDiT",
  settings: [
    {
      id: "ParallelDiT.StartDevices",
      category: ["Parallel DiT", "Pool", "StartDevices"],
      name: "Start the pool together with ComfyUI, on these devices",
      tooltip:
        "auto for all GPUs, numbers such as 0,1, or cpu:2. Empty: the first prompt starts the pool. " +
        "Takes effect at ComfyUI's next start.",
      type: "text",
      defaultValue: "",
    },
  ],
});
