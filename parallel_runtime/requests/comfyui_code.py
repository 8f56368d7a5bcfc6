"""A ComfyUI whose code ranks run: its networks, and its loops of denoising."""

from __future__ import annotations

import msgspec

Scalar = bool | int | float | str | None


class ComfyuiCode(msgspec.Struct, frozen=True):
    """A ComfyUI whose own network is to run."""

    folder: str  # where it is, on every host alike
    options: dict[str, Scalar] = {}  # of its command line, by the parser's names: it decides by them how to compute
    weights: str = ""  # a torch dtype's name, for plain weights; "" for a quantised file, which says it itself
    fast_float8: bool = False  # multiply in float8, as Load Diffusion Model's fp8_e4m3fn_fast does
    gguf: str = ""  # folder of the pack that reads GGUF files, for such a file; "" for any other


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
    """That a loop runs by ComfyUI's own code for its sampler, and what that code reads. Tensors: `sampling_name(name)`
    for each of `tensors`."""

    comfyui: ComfyuiCode  # whose code
    options: dict[str, Scalar]  # arguments of the sampler's function
    seed: int  # of noise that it adds
    noise_device: str  # type of the device on which that is drawn
    bases: tuple[str, ...]  # classes of ComfyUI's `model_sampling` that the model's own is made of
    values: dict[str, Scalar]  # that the object holds, by name
    tensors: tuple[str, ...]  # that it holds, by name
    guider: Guider  # that evaluates; the index of a branch is the place of its conditioning there
    guidance: tuple[Guidance, ...] = ()  # functions of nodes, in the order in which they are called
    all_branches: bool = True  # a CFG of 1 leaves none out: those that do not count have not come
