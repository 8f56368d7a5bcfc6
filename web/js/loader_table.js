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

// Ours has more.
export const THEIR_DTYPES = ["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"];
