"""A ComfyUI whose code ranks run: its networks, and its loops of denoising."""

from __future__ import annotations

import msgspec

Scalar = bool | int | float | str | None


class ComfyuiCode(msgspec.Struct, frozen=True):
    """A ComfyUI whose own network is to run.

    Args:
        folder: where it is, on every host alike.
        options: of its command line, by the parser's names: it decides by them how to compute.
        weights: a torch dtype's name that plain weights are to have; "" for a quantised file, which says it itself.
        fast_float8: multiply in float8, as Load Diffusion Model's fp8_e4m3fn_fast does.
        gguf: folder of the pack that reads GGUF files, for such a file; "" for any other.
    """

    folder: str
    options: dict[str, Scalar] = {}
    weights: str = ""
    fast_float8: bool = False
    gguf: str = ""


class Guidance(msgspec.Struct, frozen=True):
    """A function of a core node around guidance: the entry of ComfyUI's `model_options` that holds it, its code,
    "module:qualified name", one of those that ranks know (networks/comfyui/node_rules.py), and what it was made with:
    of a function for the inside of the network, the name of its code."""

    place: str
    code: str
    values: dict[str, Scalar | list[int]]


class Guider(msgspec.Struct, frozen=True):
    """Whose code makes an evaluation of the CFG branches, "module:Class", one of those that ranks know
    (networks/comfyui/node_rules.py), and its attributes."""

    code: str
    values: dict[str, Scalar]


class HostLoop(msgspec.Struct, frozen=True):
    """That a loop runs by ComfyUI's own code for its sampler, and what that code reads.

    Tensors: `sampling_name(name)` for each of `tensors`.

    Args:
        comfyui: whose code.
        options: arguments of the sampler's function.
        seed: of noise that it adds.
        noise_device: type of the device on which that is drawn.
        bases: classes of ComfyUI's `model_sampling` that the model's own is made of.
        values, tensors: what that object holds, by name.
        guider: that evaluates; the index of a branch is the place of its conditioning there.
        guidance: functions of nodes, in the order in which they are called.
        all_branches: a CFG of 1 leaves none out: those that do not count have not come.
    """

    comfyui: ComfyuiCode
    options: dict[str, Scalar]
    seed: int
    noise_device: str
    bases: tuple[str, ...]
    values: dict[str, Scalar]
    tensors: tuple[str, ...]
    guider: Guider
    guidance: tuple[Guidance, ...] = ()
    all_branches: bool = True


def sampling_name(name: str) -> str:
    """Name under which a tensor of a model sampling travels."""
    return f"sampling.{name}"
