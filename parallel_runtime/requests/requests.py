"""What can be asked of the engine. Plain typed data: tensors travel beside it, by name."""

from __future__ import annotations

from typing import Any

import msgspec

from .comfyui_code import ComfyuiCode, HostLoop, Scalar
from .facts import MachineFacts

INVOKABLE = ("preprocess_text_embeds",)
"""Methods of ComfyUI's networks that its models call while they prepare a prompt."""


class ConditioningRef(msgspec.Struct, frozen=True):
    """Arguments of the transformer's call that stay the same over a sampling run: context and extras.

    Sent once; later requests name it by `id` alone (`new` is false). Tensors of a new one travel under
    `tensor_name(id, place)`.

    Args:
        id: chosen by the client, unique in the life of a pool.
        new: the tensors come with this request.
        trees: each argument as plain data (trees.py); count: how many tensors are inside of them.
        shared: arguments that are one for all rows of the batch, whatever their shape.
        index: CFG branch, 0 positive and 1 negative (ComfyUI's cond_or_uncond).
    """

    id: int
    new: bool = False
    trees: dict[str, Any] = {}
    count: int = 0
    shared: tuple[str, ...] = ()
    index: int = 0


def tensor_name(conditioning: int, place: int) -> str:
    """Name under which a conditioning tensor travels."""
    return f"c{conditioning}.{place}"


def concat_name(branch: int) -> str:
    """Name under which the fixed channels of a CFG branch travel."""
    return f"concat.{branch}"


PatchNames = tuple[str, str]
"""Sets of weight patches that a request wants: of the MODEL, and of a conditioning's hooks on top; "" for none."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Make a model resident.

    Args:
        model: the client's name for this model with this dtype and configuration.
        path: file or diffusers folder.
        dtype: a torch dtype's name.
        config: `ParallelConfig.to_mapping()`.
        ranks: how many of the pool's ranks, from rank 0, the configuration may use.
        machine: what plans reckon with; None: exchange costs nothing, as between ranks on the CPU.
        comfyui: whose network it is; None for diffusers'.
        size: (width, height) of the picture that the answer explains a plan for.
    """

    model: str
    path: str
    dtype: str
    config: dict[str, Scalar]
    ranks: int
    machine: MachineFacts | None = None
    comfyui: ComfyuiCode | None = None
    size: tuple[int, int] = (1024, 1024)


class Survey(msgspec.Struct, frozen=True, tag=True):
    """Before a load: what its model would take of the devices, and what they have for it. Loads nothing."""

    load: Load


class Forward(msgspec.Struct, frozen=True, tag=True):
    """One call of the transformer, batched as ComfyUI batched it.

    Tensors: `x` (B, C, ...) in the model's dtype, `timestep` (B,) float32, a new conditioning's own, and
    `residual_name(place)` for each of a ControlNet's residuals.

    Args:
        kept: earlier conditionings that stay; all others are forgotten.
        kind: under which the call is kept, prepared, so that a `Step` can repeat it; 0: it is not kept.
        kept_kinds: earlier calls that stay prepared; all others are forgotten.
        patches: that the weights are to have.
        residuals: of a ControlNet, as `trees.flatten` gives them; they are others in each step.
    """

    model: str
    conditioning: ConditioningRef
    kept: tuple[int, ...] = ()
    kind: int = 0
    kept_kinds: tuple[int, ...] = ()
    patches: PatchNames = ("", "")
    residuals: Any = None


def residual_name(place: int | str) -> str:
    """Name under which a ControlNet's residual travels."""
    return f"residual.{place}"


class Step(msgspec.Struct, frozen=True, tag=True):
    """A call of a kind that was prepared by an earlier `Forward`: the same but for the values of its tensors.

    Tensors: `x`, `timestep` and residuals, of the shapes and dtypes of that `Forward`. Nothing about it can fail for a
    reason of the request, so it has no PREPARE. The client names only kinds that all ranks keep.
    """

    kind: int


def share_name(branch: int, argument: str) -> str:
    """Name under which a model's own timestep travels, as a share of the loop's."""
    return f"share.{branch}.{argument}"


class Sample(msgspec.Struct, frozen=True, tag=True):
    """A whole denoising loop.

    Tensors: `x` (B, C, ...) float32, the noised start latent; `sigmas` (steps + 1,) float32, and as long `timesteps`,
    what the transformer is told at each; with `inpaint` also `mask`, `latent_image`, `noise`, shaped like `x`; with
    `concat` also one `concat_name(index)` per branch, channels that are appended to its x at every step; and the new
    conditionings' own. `prediction` names what the transformer's output means (sampling.denoiser), `patches` what the
    weights are to have; branches that are alike are one forward if `joined`. Where the model makes timesteps of the
    loop's, `own_timesteps` has (branch, name, what it is counted from), "" for the first, and with each comes a
    `share_name(branch, name)`.
    With `inpaint_clean` the model sees what a mask keeps without noise. With `host`, the latent that comes back is
    scaled as ComfyUI's sampler returns it.
    """

    model: str
    sampler: str
    branches: tuple[ConditioningRef, ...]
    cfg: float
    inpaint: bool = False
    inpaint_clean: bool = False
    own_timesteps: tuple[tuple[int, str, float], ...] = ()
    preview: bool = False
    kept: tuple[int, ...] = ()
    prediction: str = "flow"
    concat: bool = False
    patches: PatchNames = ("", "")
    joined: bool = True
    host: HostLoop | None = None


class Invoke(msgspec.Struct, frozen=True, tag=True):
    """Call a method of ComfyUI's own network that needs its weights, one of INVOKABLE, outside of a forward, with
    arguments by name, as a conditioning; the answer is a tensor. `kept`, `patches`: as in `Forward`."""

    model: str
    method: str
    arguments: ConditioningRef
    kept: tuple[int, ...] = ()
    patches: PatchNames = ("", "")


class VaeFile(msgspec.Struct, frozen=True):
    """A VAE as ComfyUI loads it.

    Args:
        path: a file of a VAE, or a checkpoint with one.
        checkpoint: which of both.
        dtype: a torch dtype's name, that it computes in.
        size: bytes of its weights in that type.
        metadata: that Load VAE adds to the file's own; None for none.
    """

    path: str
    checkpoint: bool
    dtype: str
    size: int
    comfyui: ComfyuiCode
    metadata: dict[str, Scalar] | None = None


class RunVae(msgspec.Struct, frozen=True, tag=True):
    """Encode or decode; the VAE is loaded where it is not there.

    Tensors: `x`, a latent (B, C, ...) or what its VAE makes one of, in the VAE's dtype.

    Args:
        half: "encoder" or "decoder".
        ranks: how many of the pool's ranks, from rank 0, may share it.
        memory: bytes that it may take beside the weights on a single rank, estimated.
        seed: of noise that a decoder adds.
        options: further arguments of ComfyUI's method.
    """

    vae: str
    file: VaeFile
    half: str
    ranks: int
    memory: int = 0
    seed: int = 0
    options: dict[str, Scalar] = {}


class KeepPatches(msgspec.Struct, frozen=True, tag=True):
    """Keep weight patches for requests to come, by the names of their contents (patching/patch_data.py).

    Tensors: each factor and each set, (bytes,) uint8, by its name.

    Args:
        comfyui: whose code is to compute with them.
        kept: earlier sets that stay, with their factors; all others are forgotten first. None: all stay.
    """

    comfyui: ComfyuiCode
    factors: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    kept: tuple[str, ...] | None = None


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Bring a network beside the model, which patches in conditionings name by its number, or let go of others.

    Tensors: `attached_name(place)` each; those of one network may come in several requests, one after the other.

    Args:
        form: what it is made of (networks/comfyui/module_tree.py), with the last tensors; None before.
        kept: earlier networks that stay; all others are forgotten, with the calls that name them. None: all stay.
    """

    number: int = 0
    form: Any = None
    kept: tuple[int, ...] | None = None


def attached_name(place: int) -> str:
    """Name under which a tensor of an attached network travels."""
    return f"attached.{place}"


class Release(msgspec.Struct, frozen=True, tag=True):
    """Free a resident model's memory; the processes stay. An unknown model is no error. Parked weights stay on the
    host, where it has memory for them, for when they are used again."""

    model: str
    park: bool = False


Request = Load | Survey | Forward | Step | Sample | Invoke | RunVae | KeepPatches | Attach | Release
