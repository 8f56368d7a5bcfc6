"""Loader nodes: a model file, or a checkpoint, and a MODEL whose transformer runs on all GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.sd
import folder_paths
from comfy_api.latest import io

from parallel_runtime.errors import CheckpointError, ParallelError

from .model_files import list_gguf_files
from .model_loading import load_on_node, model_inputs
from .node_text import failing_shown, make_schema, show_text
from .panel.settings import default_config, read_settings

_LOADER_WORDS = (
    "load diffusion", "multi gpu", "all gpus", "distributed", "parallel", "flux", "qwen", "wan", "z-image", "ltx",
    "sdxl",
)  # fmt: skip
"""By which artists look for what loads a model: what it is, how many GPUs it takes, whose model it is."""


def _find_model(name: str, folder: str) -> Path:
    """Path of an entry of the menu of a folder of ComfyUI; CheckpointError where it is no longer there."""
    path = folder_paths.get_full_path(folder, name)
    if path is None:
        what = "The model {name} is not in ComfyUI's {value} folders."
        raise CheckpointError(what, "Refresh the list of models (key R) and choose one of it.", name=name, value=folder)
    return Path(path)


def _file_stamp(name: str, folder: str) -> str:
    """What changes when a file is replaced on disk, or the default configuration; why it is not found, if so."""
    from parallel_runtime.loading.files import identity

    try:
        return f"{identity(_find_model(name, folder))} {default_config(read_settings())}"
    except ParallelError as error:
        return str(error)  # execute says it to the artist


class ParallelLoader(io.ComfyNode):
    """Loads at execution, so that what is wrong with a file or a pool shows at this node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        files = folder_paths.get_filename_list("diffusion_models")
        gguf = list_gguf_files(folder_paths.get_folder_paths("diffusion_models"))
        return make_schema(
            node_id="ParallelLoader",
            display_name="Parallel Loader",
            description="Loads a diffusion transformer on several GPUs at once. Takes the place of Load Diffusion "
            "Model; the rest of the graph stays as it is.",
            search_aliases=[*_LOADER_WORDS, "load diffusion model", "diffusion model", "unet", "unet loader", "gguf"],
            has_intermediate_output=True,  # ComfyUI sends the text again where the node is cached
            inputs=[
                io.Combo.Input("model_name", options=[*files, *gguf], tooltip="A file of models/diffusion_models."),
                *model_inputs(),
            ],
            outputs=[io.Model.Output(tooltip="An ordinary MODEL, for KSampler, Parallel Sampler or any other.")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def fingerprint_inputs(cls, model_name: str, **others: Any) -> str:
        return _file_stamp(model_name, "diffusion_models")

    @classmethod
    @failing_shown()
    def execute(cls, model_name: str, **chosen: Any) -> io.NodeOutput:
        """Load the model and show the plan; see `load_on_node`."""
        model, text = load_on_node(_find_model(model_name, "diffusion_models"), cls.hidden, **chosen)
        return io.NodeOutput(model, ui=show_text(cls.hidden.unique_id, text))


class ParallelCheckpointLoader(io.ComfyNode):
    """Load Checkpoint, with the diffusion model in the pool."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="ParallelCheckpointLoader",
            display_name="Parallel Checkpoint Loader",
            description="Loads a checkpoint's diffusion model on several GPUs at once; its CLIP and VAE are loaded as "
            "Load Checkpoint does. Takes the place of Load Checkpoint and of Load Checkpoint Image Only; the rest of "
            "the graph stays as it is.",
            search_aliases=[*_LOADER_WORDS, "load checkpoint", "image only", "ckpt", "unet"],
            has_intermediate_output=True,  # ComfyUI sends the text again where the node is cached
            inputs=[
                io.Combo.Input(
                    "ckpt_name",
                    options=folder_paths.get_filename_list("checkpoints"),
                    tooltip="A file of models/checkpoints with diffusion model, text encoder and VAE.",
                ),
                *model_inputs(),
            ],
            outputs=[
                io.Model.Output(tooltip="An ordinary MODEL, for KSampler, Parallel Sampler or any other."),
                io.Clip.Output(tooltip="The text encoder of the checkpoint, as Load Checkpoint gives it."),
                io.Vae.Output(tooltip="The VAE of the checkpoint, as Load Checkpoint gives it."),
                io.ClipVision.Output(
                    tooltip="What sees pictures in the checkpoint, as Load Checkpoint Image Only gives it. Most "
                    "checkpoints have none.",
                ),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def fingerprint_inputs(cls, ckpt_name: str, **others: Any) -> str:
        return _file_stamp(ckpt_name, "checkpoints")

    @classmethod
    @failing_shown()
    def execute(cls, ckpt_name: str, **chosen: Any) -> io.NodeOutput:
        """Load the model in the pool, as `load_on_node`, CLIP and VAE here."""
        path = _find_model(ckpt_name, "checkpoints")
        # First, as it is what may be refused.
        model, text = load_on_node(path, cls.hidden, **chosen)
        _, clip, vae, clip_vision = comfy.sd.load_checkpoint_guess_config(
            str(path),
            output_clipvision=True,
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
            output_model=False,
        )
        return io.NodeOutput(model, clip, vae, clip_vision, ui=show_text(cls.hidden.unique_id, text))
