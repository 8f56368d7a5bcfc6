"""Loads a file into the pool and makes the MODEL of it: what the two loader nodes have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ParallelError
from parallel_runtime.said import Said, said, together

from .model_files import open_model_file
from .node_text import notices_on_running_node, show_on_running_node
from .panel.settings import default_config, read_settings
from .parallel_config import ConfigSocket
from .pool_patchers import drop_others, keep
from .prompt_graph import USUAL, find_size
from .wait_notices import OPENING

if TYPE_CHECKING:
    from .remote_patcher import RemoteModelPatcher

DEFAULT_DTYPE = "default"
FAST_FLOAT8 = "fp8_e4m3fn_fast"
WEIGHT_DTYPES = [DEFAULT_DTYPE, "bf16", "fp16", "fp32", "fp8_e4m3fn", FAST_FLOAT8, "fp8_e5m2"]


def model_inputs() -> list[io.Input]:
    return [
        io.Combo.Input(
            "weight_dtype",
            options=WEIGHT_DTYPES,
            default=DEFAULT_DTYPE,
            optional=True,
            tooltip="Number type of the weights. Default takes what Load Diffusion Model would take for "
            "this file and this GPU; fp8 types are those of Load Diffusion Model.",
        ),
        ConfigSocket.Input(
            "parallel_config",
            optional=True,
            tooltip="Which GPUs, and how the work is split. Without one, all GPUs take part and the split is "
            "chosen for the model.",
        ),
    ]


def wished_config(parallel_config: Mapping[str, Any] | None) -> ParallelConfig:
    """Of the socket, else that of ComfyUI's settings; ConfigurationError for one that cannot hold."""
    if parallel_config is None:
        return default_config(read_settings())
    return ParallelConfig.from_mapping(parallel_config)


def load_on_node(
    path: Path, hidden: Any, weight_dtype: str = DEFAULT_DTYPE, parallel_config: Mapping[str, Any] | None = None
) -> tuple[RemoteModelPatcher, Said]:
    """Load a file and make the MODEL, for a node with its number and the prompt; stops with the prompt. Returns also
    what the node says of it now. Raises ParallelError: file, model, configuration or pool; typed, with cause and fix.
    """
    from .interrupt import stopping_with_prompt

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
    from workers.client.client import ModelRequest
    from workers.client.pool_registry import get_pool, known_pools

    from .comfyui_code import comfyui_code
    from .pool_loop import add_loop
    from .remote_model import build_model, choose_types
    from .remote_transformer import RemoteTransformer

    if path.exists() and not any(pool.pool is not None for pool in known_pools()):
        # Its processes come up while ComfyUI looks at the file. What is wrong with them is told after that.
        with contextlib.suppress(ParallelError):
            get_pool(config).begin()
    file, why = open_model_file(path, weight_dtype)
    weights, cast = choose_types(file, weight_dtype)
    gguf = file.pack.folder if file.pack is not None else ""
    code = comfyui_code(None if file.stored is None else weights, weight_dtype == FAST_FLOAT8, gguf)
    dtype = str(cast or weights).removeprefix("torch.")
    request = ModelRequest(str(path), dtype, config, file.identity, code, size)
    remote = RemoteTransformer(request, notices_on_running_node(path.name))
    model = build_model(file, weights, cast, remote)
    add_loop(model)
    return model, why
