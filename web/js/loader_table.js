// Which of our loaders takes the place of which of ComfyUI's: data, in the order in which files hold a node's widgets.

// widgets: that with the file's name first.
export const LOADERS = {
  UNETLoader: { ours: "ParallelLoader", widgets: ["unet_name", "weight_dtype"], outputs: ["MODEL"] },
  UnetLoaderGGUF: { ours: "ParallelLoader", widgets: ["unet_name"], outputs: ["MODEL"] },
  CheckpointLoaderSimple: {
    ours: "ParallelCheckpointLoader", widgets: ["ckpt_name"], outputs: ["MODEL", "CLIP", "VAE"],
  },
  ImageOnlyCheckpointLoader: {
    ours: "ParallelCheckpointLoader", widgets: ["ckpt_name"], outputs: ["MODEL", "CLIP_VISION", "VAE"],
  },
};

export const OURS = {
  ParallelLoader: { widgets: ["model_name", "weight_dtype"], outputs: ["MODEL"] },
  ParallelCheckpointLoader: { widgets: ["ckpt_name", "weight_dtype"], outputs: ["MODEL", "CLIP", "VAE", "CLIP_VISION"] },
};

export const rowOf = (type) => LOADERS[type] ?? OURS[type];

// Values of what ours has and theirs has not; weight_dtype has more choices on ours.
export const DEFAULTS = { weight_dtype: "default" };
export const THEIR_DTYPES = ["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"];

// The type that takes the place of one of ours again; null where none gives what is connected.
export function theirsOf(node, file) {
  if (file.endsWith("/")) return null; // a folder of diffusers', which earlier versions took
  if (node.type === "ParallelLoader") return file.toLowerCase().endsWith(".gguf") ? "UnetLoaderGGUF" : "UNETLoader";
  const connected = (slot) => Boolean(node.outputs?.[slot]?.links?.length);
  if (!connected(3)) return "CheckpointLoaderSimple";
  return connected(1) ? null : "ImageOnlyCheckpointLoader";
}
