// Settings of the pack: nodes/panel/settings.py reads them, where a file of settings may hold anything.
import { app } from "../../../../scripts/app.js";

const CATEGORY = "Parallel DiT";

// sortOrder: the highest stands first in its group.

app.registerExtension({
  name: "ParallelDiT.Settings",
  settings: [
    {
      id: "ParallelDiT.DefaultDevices",
      category: [CATEGORY, "Default", "DefaultDevices"],
      sortOrder: 3,
      name: "Devices of loaders without a Parallel Config",
      tooltip: "auto for all GPUs, numbers such as 0,1, or cpu:2. Empty: auto.",
      type: "text",
      defaultValue: "",
    },
    {
      id: "ParallelDiT.DefaultStages",
      category: [CATEGORY, "Default", "DefaultStages"],
      sortOrder: 2,
      name: "Stages of loaders without a Parallel Config",
      tooltip: "auto never changes the picture; the other lets PipeFusion be taken where it gains.",
      type: "combo",
      options: ["auto", "faster, slightly different"],
      defaultValue: "auto",
    },
    {
      id: "ParallelDiT.DefaultCompile",
      category: [CATEGORY, "Default", "DefaultCompile"],
      sortOrder: 1,
      name: "Compile, of loaders without a Parallel Config",
      tooltip: "auto: on GPUs, before the first step, once per machine.",
      type: "combo",
      options: ["auto", "off"],
      defaultValue: "auto",
    },
    {
      id: "ParallelDiT.ParkMinutes",
      category: [CATEGORY, "Pool", "ParkMinutes"],
      sortOrder: 2,
      name: "Take models from the GPUs after so many minutes without a prompt",
      tooltip: "0: never. They stay in the host's memory where that has room, and come back with the next prompt.",
      type: "number",
      attrs: { min: 0, max: 1440, step: 1, maxFractionDigits: 0 },
      defaultValue: 0,
    },
    {
      id: "ParallelDiT.LogLevel",
      category: [CATEGORY, "Pool", "LogLevel"],
      sortOrder: 1,
      name: "How much Parallel DiT writes into ComfyUI's log",
      tooltip: "Takes effect within seconds.",
      type: "combo",
      options: ["debug", "info", "warning", "error"],
      defaultValue: "info",
    },
  ],
});
