// Which of our loaders takes the place of which of ComfyUI's: data, in the order in which files hold a node's widgets.

// outputs: slot of ComfyUI's loader -> slot of ours. file: its widget with the file's name, and what ours is called.
export const LOADERS = {
  UNETLoader: { ours: "ParallelLoader", widgets: ["unet_name", "weight_dtype"], file: "unet_name", outputs: [0] },
  UnetLoaderGGUF: { ours: "ParallelLoader", widgets: ["unet_name"], file: "unet_name", outputs: [0] },
  CheckpointLoaderSimple: {
    ours: "ParallelCheckpointLoader", widgets: ["ckpt_name"], file: "ckpt_name", outputs: [0, 1, 2],
  },
  ImageOnlyCheckpointLoader: {
    ours: "ParallelCheckpointLoader", widgets: ["ckpt_name"], file: "ckpt_name", outputs: [0, 3, 2],
  },
};

export const OURS = {
  ParallelLoader: {
    widgets: ["model_name", "weight_dtype"], file: "model_name", outputs: ["MODEL"],
  },
  ParallelCheckpointLoader: {
    widgets: ["ckpt_name", "weight_dtype"], file: "ckpt_name", outputs: ["MODEL", "CLIP", "VAE", "CLIP_VISION"],
  },
};

const THEIR_OUTPUTS = {
  UNETLoader: ["MODEL"],
  UnetLoaderGGUF: ["MODEL"],
  CheckpointLoaderSimple: ["MODEL", "CLIP", "VAE"],
  ImageOnlyCheckpointLoader: ["MODEL", "CLIP_VISION", "VAE"],
};

export const outputsOf = (type) => OURS[type]?.outputs ?? THEIR_OUTPUTS[type];

// Values of what ours has and theirs has not; weight_dtype has more choices on ours.
export const DEFAULTS = { weight_dtype: "default" };
export const THEIR_DTYPES = ["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"];

// The type that takes the place of one of ours again; null where none gives what is connected.
export function theirsOf(node, file) {
  if (node.type === "ParallelLoader") {
    if (file.endsWith("/")) return null; // a diffusers folder
    return file.toLowerCase().endsWith(".gguf") ? "UnetLoaderGGUF" : "UNETLoader";
  }
  const connected = (slot) => Boolean(node.outputs?.[slot]?.links?.length);
  if (!connected(3)) return "CheckpointLoaderSimple";
  return connected(1) ? null : "ImageOnlyCheckpointLoader";
}
