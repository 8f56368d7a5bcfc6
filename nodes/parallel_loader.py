"""Parallel Loader: a model file, and a MODEL whose transformer runs on all GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import io

from parallel_runtime.errors import CheckpointError
from parallel_runtime.said import said

from .gguf_files import list_gguf_files
from .model_list import find_folder, list_folders
from .model_loading import DEFAULT_DTYPE, file_stamp, load_on_node, model_inputs
from .network_choice import AUTO
from .node_text import failing_shown, show_text
from .search_words import LOADER_WORDS, found_by


def _folder_roots() -> list[str]:
    return [*folder_paths.get_folder_paths("diffusers"), *folder_paths.get_folder_paths("diffusion_models")]


def list_models() -> list[str]:
    """Names for the menu: files of ComfyUI's diffusion_models folders, GGUF files there, then diffusers folders."""
    files = folder_paths.get_filename_list("diffusion_models")
    return [*files, *list_gguf_files(folder_paths.get_folder_paths("diffusion_models")), *list_folders(_folder_roots())]


def find_model(name: str) -> Path:
    """Path of a menu entry.

    Raises:
        CheckpointError: it is no longer there.
    """
    folder = name.endswith("/")
    path = find_folder(name, _folder_roots()) if folder else folder_paths.get_full_path("diffusion_models", name)
    if path is None:
        raise CheckpointError(
            said(
                "The model {name} is not in ComfyUI's {value} folders.",
                name=name,
                value="diffusers" if folder else "diffusion_models",
            ),
            "Refresh the list of models (key R) and choose one of it.",
        )
    return Path(path)


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
            **found_by(*LOADER_WORDS, "load diffusion model", "diffusion model", "unet", "unet loader", "gguf"),
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=list_models(),
                    tooltip="A file of models/diffusion_models, or a diffusers folder (with a slash at its end) of "
                    "models/diffusers or models/diffusion_models.",
                ),
                *model_inputs(),
            ],
            outputs=[io.Model.Output(tooltip="An ordinary MODEL, for KSampler, Parallel Sampler or any other.")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def fingerprint_inputs(cls, model_name: str, **others: Any) -> str:
        """Change when the files behind the name do: a model that was replaced on disk is loaded again."""
        return file_stamp(lambda: find_model(model_name))

    @classmethod
    @failing_shown()
    def execute(
        cls,
        model_name: str,
        weight_dtype: str = DEFAULT_DTYPE,
        network: str = AUTO,
        parallel_config: dict[str, Any] | None = None,
    ) -> io.NodeOutput:
        """Load the model and show the plan.

        Raises:
            ParallelError: see `load_model`.
        """
        path = find_model(model_name)
        model, text = load_on_node(path, weight_dtype, network, parallel_config, cls.hidden)
        return io.NodeOutput(model, ui=show_text(cls.hidden.unique_id, text))
