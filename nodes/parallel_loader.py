"""Parallel Loader: a model file, and a MODEL whose transformer runs on all GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import comfy.model_management
import folder_paths
from comfy_api.latest import io

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import CheckpointError, ParallelError

from .model_list import find_folder, list_folders
from .node_text import errors_shown, show_on_running_node, show_text
from .parallel_config import ConfigSocket
from .run_notices import explain_stages

if TYPE_CHECKING:
    from parallel_runtime.requests.requests import Loaded

    from .remote_patcher import RemoteModelPatcher

DEFAULT_DTYPE = "default"


def _folder_roots() -> list[str]:
    return [*folder_paths.get_folder_paths("diffusers"), *folder_paths.get_folder_paths("diffusion_models")]


def list_models() -> list[str]:
    """Names for the menu: files of ComfyUI's diffusion_models folders, then diffusers folders."""
    return [*folder_paths.get_filename_list("diffusion_models"), *list_folders(_folder_roots())]


def find_model(name: str) -> Path:
    """Path of a menu entry.

    Raises:
        CheckpointError: it is no longer there.
    """
    folder = name.endswith("/")
    path = find_folder(name, _folder_roots()) if folder else folder_paths.get_full_path("diffusion_models", name)
    if path is None:
        raise CheckpointError(
            f"The model {name} is not in ComfyUI's {'diffusers' if folder else 'diffusion_models'} folders.",
            "Refresh the list of models (key R) and choose one of it.",
        )
    return Path(path)


def load_model(
    path: Path, weight_dtype: str, config: ParallelConfig, interrupted, show_plan: Callable[[str], None]
) -> tuple[RemoteModelPatcher, Loaded]:
    """Read the header, load the weights in the pool, make the MODEL.

    Args:
        show_plan: puts a text on the loader; called after each run, too.

    Raises:
        ParallelError: file, model, configuration or pool; typed, with cause and fix.
    """
    # Imported here and not at the top: ComfyUI's start shall not pay for it.
    from parallel_runtime.loading.checkpoint import open_checkpoint
    from workers.client.client import ModelRequest

    from .remote_model import build_model, choose_dtype, draw_blueprint
    from .remote_transformer import RemoteTransformer

    checkpoint = open_checkpoint(path)
    blueprint = draw_blueprint(checkpoint)
    dtype = choose_dtype(blueprint, weight_dtype)
    request = ModelRequest(str(path), str(dtype).removeprefix("torch."), config, checkpoint.identity)
    remote = RemoteTransformer(request, show=show_on_running_node, show_on_loader=show_plan)
    model = build_model(blueprint, dtype, remote)
    if model.shares_device:
        # ComfyUI's own models (text encoders, VAE) may fill the GPU that the pool is about to load on.
        wanted = blueprint.parameters * dtype.itemsize + comfy.model_management.minimum_inference_memory()
        comfy.model_management.free_memory(wanted, model.load_device)
    return model, remote.load(interrupted)


class ParallelLoader(io.ComfyNode):
    """Loads at execution, so that what is wrong with a file or a pool shows at this node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs, outputs and texts of the node."""
        return io.Schema(
            node_id="ParallelLoader",
            display_name="Parallel Loader",
            category="parallel",
            description="Loads a diffusion transformer on several GPUs at once. Takes the place of Load Diffusion "
            "Model; the rest of the graph stays as it is.",
            search_aliases=["multi gpu", "unet loader", "diffusion model", "parallel"],
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=list_models(),
                    tooltip="A file of models/diffusion_models, or a diffusers folder (with a slash at its end) of "
                    "models/diffusers or models/diffusion_models.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=[DEFAULT_DTYPE, "bf16", "fp16", "fp32"],
                    default=DEFAULT_DTYPE,
                    tooltip="Number type of the weights. Default takes what Load Diffusion Model would take for "
                    "this file and this GPU.",
                ),
                ConfigSocket.Input(
                    "parallel_config",
                    optional=True,
                    tooltip="Which GPUs, and how the work is split. Without one, all GPUs take part and the split is "
                    "chosen for the model.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="An ordinary MODEL, for KSampler, Parallel Sampler or any other.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, model_name: str, **others: Any) -> str:
        """Change when the files behind the name do: a model that was replaced on disk is loaded again."""
        from parallel_runtime.loading.files import identity

        try:
            return str(identity(find_model(model_name)))
        except ParallelError as error:
            return str(error)  # execute says it to the artist

    @classmethod
    @errors_shown()
    def execute(
        cls, model_name: str, weight_dtype: str = DEFAULT_DTYPE, parallel_config: dict[str, Any] | None = None
    ) -> io.NodeOutput:
        """Load the model and show the plan.

        Raises:
            ParallelError: see `load_model`.
        """
        from .interrupt import stopping_with_prompt

        config = ParallelConfig() if parallel_config is None else ParallelConfig.from_mapping(parallel_config)
        with stopping_with_prompt() as interrupted:
            node_id = cls.hidden.unique_id
            show_plan = partial(show_text, node_id)
            model, loaded = load_model(find_model(model_name), weight_dtype, config, interrupted, show_plan)
        # Which batch and size will run is not known yet; after the run, the plan that ran is.
        stages = explain_stages(loaded.stages, config.keeps_pixels)
        text = f"One picture of 1024 × 1024: {loaded.explanation} {stages}".strip()
        return io.NodeOutput(model, ui=show_text(node_id, text))
