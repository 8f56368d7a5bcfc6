"""Nodes that put a model file, a checkpoint or a VAE into the pool, and make a MODEL or a VAE that runs there."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import comfy.sd
import folder_paths
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import CheckpointError, ParallelError
from parallel_runtime.said import Said, said, together

from .interrupt import stopping_with_prompt
from .model_files import list_gguf_files, open_model_file
from .node_text import failing_shown, make_schema, notices_on_running_node, show_on_running_node, show_text
from .panel.settings import wished_config
from .parallel_config import ConfigSocket
from .pool_patchers import drop_others, keep
from .prompt_graph import USUAL, find_size
from .run_notices import OPENING

if TYPE_CHECKING:
    from .remote_patcher import RemoteModelPatcher

_LOADER_WORDS = (
    "load diffusion", "multi gpu", "all gpus", "distributed", "parallel", "flux", "qwen", "wan", "z-image", "ltx",
    "sdxl",
)  # fmt: skip
"""By which artists look for what loads a model: what it is, how many GPUs it takes, whose model it is."""
DEFAULT_DTYPE = "default"
FAST_FLOAT8 = "fp8_e4m3fn_fast"
WEIGHT_DTYPES = [DEFAULT_DTYPE, "bf16", "fp16", "fp32", "fp8_e4m3fn", FAST_FLOAT8, "fp8_e5m2"]


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
        return f"{identity(_find_model(name, folder))} {wished_config(None)}"
    except ParallelError as error:
        return str(error)  # execute says it to the artist


def model_inputs() -> list[io.Input]:
    return [
        io.Combo.Input("weight_dtype", options=WEIGHT_DTYPES, default=DEFAULT_DTYPE, optional=True),
        ConfigSocket.Input("parallel_config", optional=True),
    ]


def load_on_node(
    path: Path, hidden: Any, weight_dtype: str = DEFAULT_DTYPE, parallel_config: Mapping[str, Any] | None = None
) -> tuple[RemoteModelPatcher, Said]:
    """Load a file and make the MODEL; also what the node says of it. Raises ParallelError; stops with the prompt."""
    show_on_running_node(OPENING)
    config = wished_config(parallel_config)
    with stopping_with_prompt() as interrupted:
        size = find_size(hidden.prompt, hidden.unique_id) if config.patches is None else USUAL
        model, why = _make_model(path, weight_dtype, config, size)
        loaded = model.remote.load(interrupted, model.make_room if model.devices else None)
        keep(model)
        drop_others(model)
    # Which batch will run is not known yet, nor always which size; after the run, the sampler says what ran.
    picture = said("One picture of {width} × {height}: {plan}", width=size[0], height=size[1], plan=loaded.explanation)
    return model, together((picture, why))


def _make_model(
    path: Path, weight_dtype: str, config: ParallelConfig, size: tuple[int, int]
) -> tuple[RemoteModelPatcher, Said]:
    """The MODEL, by the file's header, while the pool's processes come up; and what is to be said of the file."""
    # Imported here and not at the top: ComfyUI's start shall not pay for it.
    from workers.client.node_requests import ModelRequest
    from workers.client.pool_registry import get_pool, known_pools

    from .comfyui_code import comfyui_code
    from .pool_loop import run_sampler
    from .remote_model import build_model, choose_types
    from .remote_transformer import RemoteTransformer

    if path.exists() and not any(pool.pool is not None for pool in known_pools()):
        # Its processes come up while ComfyUI looks at the file. What is wrong with them is told after that.
        with contextlib.suppress(ParallelError):
            get_pool(config).keeper.begin()
    file, why = open_model_file(path, weight_dtype)
    weights, cast = choose_types(file, weight_dtype)
    gguf = file.pack.folder if file.pack is not None else ""
    code = comfyui_code(None if file.stored is None else weights, weight_dtype == FAST_FLOAT8, gguf)
    dtype = str(cast or weights).removeprefix("torch.")
    request = ModelRequest(str(path), dtype, config, file.identity, code, size)
    remote = RemoteTransformer(request, notices_on_running_node(path.name))
    model = build_model(file, weights, cast, remote)
    model.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, "parallel_dit", run_sampler)
    return model, why


class ParallelLoader(io.ComfyNode):
    """Loads at execution, so that what is wrong with a file or a pool shows at this node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        files = folder_paths.get_filename_list("diffusion_models")
        gguf = list_gguf_files(folder_paths.get_folder_paths("diffusion_models"))
        return make_schema(
            "ParallelLoader",
            search_aliases=[*_LOADER_WORDS, "load diffusion model", "diffusion model", "unet", "unet loader", "gguf"],
            has_intermediate_output=True,  # ComfyUI sends the text again where the node is cached
            inputs=[io.Combo.Input("model_name", options=[*files, *gguf]), *model_inputs()],
            outputs=[io.Model.Output()],
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
        return io.NodeOutput(model, ui=show_text(text))


class ParallelCheckpointLoader(io.ComfyNode):
    """Load Checkpoint, with the diffusion model in the pool."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        files = folder_paths.get_filename_list("checkpoints")
        return make_schema(
            "ParallelCheckpointLoader",
            search_aliases=[*_LOADER_WORDS, "load checkpoint", "image only", "ckpt", "unet"],
            has_intermediate_output=True,  # ComfyUI sends the text again where the node is cached
            inputs=[io.Combo.Input("ckpt_name", options=files), *model_inputs()],
            outputs=[io.Model.Output(), io.Clip.Output(), io.Vae.Output(), io.ClipVision.Output()],
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
        folders = folder_paths.get_folder_paths("embeddings")
        _, clip, vae, clip_vision = comfy.sd.load_checkpoint_guess_config(
            str(path), output_clipvision=True, embedding_directory=folders, output_model=False
        )
        return io.NodeOutput(model, clip, vae, clip_vision, ui=show_text(text))


class ParallelVaeNode(io.ComfyNode):
    """The workers load the file when a node encodes or decodes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            "ParallelVAE",
            search_aliases=["vae", "vae decode", "vae encode", "multi gpu", "parallel"],
            inputs=[io.Vae.Input("vae"), ConfigSocket.Input("parallel_config", optional=True)],
            outputs=[io.Vae.Output()],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @failing_shown()
    def execute(cls, vae: Any, parallel_config: Mapping[str, Any] | None = None) -> io.NodeOutput:
        """Make the VAE object. Raises RequestError for one that is of no file, ConfigurationError for its devices."""
        # Imported here and not at the top: ComfyUI's start shall not pay for it.
        from workers.client.pool_registry import get_pool
        from workers.launch import resolve_devices

        from .remote_vae import ParallelVae, RemoteVae, describe

        config = wished_config(parallel_config)
        ranks = resolve_devices(config, torch.cuda.device_count).world_size
        remote = RemoteVae(vae, config, get_pool, ranks, notices_on_running_node("VAE"))
        return io.NodeOutput(ParallelVae(remote), ui=show_text(describe(remote)))
