"""Files as a rank loads them beside ComfyUI's own loader: each tensor of the network, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from parallel_runtime.networks.comfyui.comfy_code import use_comfyui

PREFIX = "model.diffusion_model."


def compare(
    rank: int, world_size: int, comfyui: str, folder: str, cases: list[tuple[str, str, str]]
) -> dict[str, list[str]]:
    """What differs, by case.

    Args:
        cases: (file of files.py, format: a type of all tensors, or one of formats.py; type that weights are to have,
            "" for a quantised file). With a "+" before the format, the file is a checkpoint's with other tensors in it.
    """
    use_comfyui(comfyui, {"cpu": True})
    torch.set_grad_enabled(False)
    return {" ".join(case): _compare(Path(folder), *case) for case in cases}


def mapped_afterwards(rank: int, world_size: int, comfyui: str, folder: str) -> dict[str, list[str]]:
    """Where a file is mapped whose network is here, by "maps"."""
    use_comfyui(comfyui, {"cpu": True})
    from parallel_runtime.loading.comfyui_network import NetworkReader, NetworkWeights
    from parallel_runtime.loading.host_file import open_host_file
    from tests.comfyui_networks.files import FILES
    from tests.comfyui_networks.write_files import tensors_of

    path = Path(folder) / "file.safetensors"
    save_file(tensors_of(FILES["flux"]), path)
    held = NetworkWeights(NetworkReader(open_host_file(path), None, torch.float32), torch.device("cpu"))
    held.fill(lambda done, total: None)
    return {"maps": [line for line in Path("/proc/self/maps").read_text().splitlines() if path.name in line]}


def _compare(folder: Path, name: str, form: str, wanted: str) -> list[str]:
    import comfy.sd

    from parallel_runtime.loading.comfyui_network import NetworkReader, NetworkWeights
    from parallel_runtime.loading.host_file import open_host_file
    from tests.comfyui_networks.files import FILES
    from tests.comfyui_networks.formats import FORMATS, write
    from tests.comfyui_networks.write_files import header_of, tensors_of

    path, file = folder / "file.safetensors", FILES[name]
    tensors, plain = tensors_of(file), form.removeprefix("+")
    if plain in FORMATS:
        tensors = write(tensors, plain)
    else:
        tensors = {key: tensor.to(getattr(torch, plain)) for key, tensor in tensors.items()}
    if form != plain:
        tensors = {PREFIX + key: tensor for key, tensor in tensors.items()}
        tensors["first_stage_model.decoder.conv_in.weight"] = torch.zeros(4, 4)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, header_of(file))
    dtype = getattr(torch, wanted) if wanted else None
    options: dict[str, Any] = {"offload_device": torch.device("cpu")} | ({"dtype": dtype} if dtype else {})
    expected = comfy.sd.load_diffusion_model(str(path), model_options=options).model.diffusion_model
    opened = open_host_file(path)
    held = NetworkWeights(NetworkReader(opened, None, dtype), torch.device("cpu"))
    told: list[tuple[int, int]] = []
    held.fill(lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > 0
    return list(_differences(held.network, expected))


def _differences(ours: Any, theirs: Any) -> Any:
    found, known = dict(ours.named_modules()), dict(theirs.named_modules())
    # By name, as ComfyUI makes classes of layers for each quantised file.
    kinds, wanted = ([(path, type(module).__qualname__) for path, module in each.items()] for each in (found, known))
    assert kinds == wanted
    for path, module in known.items():
        held = {**vars(module), **module._parameters, **module._buffers}
        for name, tensor in held.items():
            if isinstance(tensor, torch.Tensor):
                own = getattr(found[path], name)
                if _layout(own) != _layout(tensor) or not all(map(_equal, _parts(own), _parts(tensor))):
                    yield f"{path}.{name}"


def _layout(tensor: Any) -> Any:
    parts = [(part.shape, part.dtype, part.device) for part in _parts(tensor)]
    return type(tensor), tensor.shape, tensor.dtype, parts


def _parts(tensor: Any) -> list[torch.Tensor]:
    """It, or of a quantised one its numbers and scales."""
    if not hasattr(tensor, "_qdata"):
        return [tensor]
    scales = vars(tensor._params)
    return [tensor._qdata, *(scales[name] for name in sorted(scales) if isinstance(scales[name], torch.Tensor))]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.contiguous().view(-1).view(torch.uint8) == other.contiguous().view(-1).view(torch.uint8)
    return bool(same.all())
