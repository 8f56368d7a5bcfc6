"""What can be asked of the engine, and what it answers. Plain typed data: tensors travel beside it, by name."""

from __future__ import annotations

from typing import Any

import msgspec

from ..said import Said
from .comfyui_code import ComfyuiCode, HostLoop, Scalar
from .facts import MachineFacts

# Names under which tensors travel.
tensor_name = "c{}.{}".format  # of a conditioning, by its number and the tensor's place in it
concat_name = "concat.{}".format  # the fixed channels of a CFG branch
residual_name = "residual.{}".format  # of a ControlNet, by its place
share_name = "share.{}.{}".format  # by branch and argument, a model's own timestep as a share of the loop's
attached_name = "attached.{}".format  # of an attached network, by its place
sampling_name = "sampling.{}".format  # of a model sampling

INVOKABLE = ("preprocess_text_embeds",)
"""Methods of ComfyUI's networks that its models call while they prepare a prompt."""


class ConditioningRef(msgspec.Struct, frozen=True):
    """Arguments of the transformer's call that stay the same over a sampling run: context and extras. Sent once; later
    requests name it by `id` alone (`new` is false). Tensors of a new one travel under `tensor_name(id, place)`."""

    id: int  # chosen by the client, unique in the life of a pool
    new: bool = False  # the tensors come with this request
    trees: dict[str, Any] = {}  # each argument as plain data (trees.py)
    count: int = 0  # how many tensors are inside of them
    shared: tuple[str, ...] = ()  # arguments that are one for all rows of the batch, whatever their shape
    index: int = 0  # CFG branch, 0 positive and 1 negative (ComfyUI's cond_or_uncond)


PatchNames = tuple[str, str]
"""Sets of weight patches that a request wants: of the MODEL, and of a conditioning's hooks on top; "" for none."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Make a model resident."""

    model: str  # the client's name for this model with this dtype and configuration
    path: str  # file or diffusers folder
    dtype: str  # a torch dtype's name
    config: dict[str, Scalar]  # `ParallelConfig.to_mapping()`
    ranks: int  # how many of the pool's ranks, from rank 0, the configuration may use
    machine: MachineFacts | None = None  # what plans reckon with; None: exchange costs nothing, as on a CPU
    comfyui: ComfyuiCode | None = None  # whose network it is; None for diffusers'
    size: tuple[int, int] = (1024, 1024)  # (width, height) of the picture that the answer explains a plan for


class Survey(msgspec.Struct, frozen=True, tag=True):
    """Before a load: what its model would take of the devices, and what they have for it. Loads nothing."""

    load: Load


class Forward(msgspec.Struct, frozen=True, tag=True):
    """One call of the transformer, batched as ComfyUI does. Tensors: `x` (B, C, ...) in the model's dtype, `timestep`
    (B,) float32, a new conditioning's own, and `residual_name(place)` for each of a ControlNet's residuals."""

    model: str
    conditioning: ConditioningRef
    kept: tuple[int, ...] = ()  # earlier conditionings that stay; all others are forgotten
    kind: int = 0  # under which the call is kept, prepared, so that a `Step` can repeat it; 0: it is not kept
    kept_kinds: tuple[int, ...] = ()  # earlier calls that stay prepared; all others are forgotten
    patches: PatchNames = ("", "")  # that the weights are to have
    residuals: Any = None  # of a ControlNet, as `trees.flatten` gives them; they are others in each step


class Step(msgspec.Struct, frozen=True, tag=True):
    """A call of a kind that was prepared by an earlier `Forward`: the same but for the values of its tensors, which are
    `x`, `timestep` and residuals, of the shapes and dtypes of that `Forward`. Nothing about it can fail for a reason of
    the request, so it has no PREPARE. The client names only kinds that all ranks keep."""

    kind: int


class Sample(msgspec.Struct, frozen=True, tag=True):
    """A whole denoising loop. Tensors: `x` (B, C, ...) float32, the noised start latent; `sigmas` (steps + 1,) float32,
    and as long `timesteps`, what the transformer is told at each; and the new conditionings' own."""

    model: str
    sampler: str
    branches: tuple[ConditioningRef, ...]
    cfg: float
    inpaint: bool = False  # `mask`, `latent_image` and `noise` come, too, shaped like `x`
    inpaint_clean: bool = False  # the model sees what a mask keeps without noise
    # Where the model makes timesteps of the loop's, (branch, name, what it is counted from), "" for the first; with
    # each comes a `share_name(branch, name)`.
    own_timesteps: tuple[tuple[int, str, float], ...] = ()
    preview: bool = False
    kept: tuple[int, ...] = ()
    prediction: str = "flow"  # what the transformer's output means (sampling/denoiser.py)
    concat: bool = False  # a `concat_name(index)` comes for each branch: channels appended to its x at every step
    patches: PatchNames = ("", "")  # that the weights are to have
    joined: bool = True  # branches that are alike are one forward
    host: HostLoop | None = None  # with it the latent that comes back is scaled as ComfyUI's sampler returns it


class Invoke(msgspec.Struct, frozen=True, tag=True):
    """Call a method of ComfyUI's own network that needs its weights, one of INVOKABLE, outside of a forward, with
    arguments by name, as a conditioning; the answer is a tensor. `kept`, `patches`: as in `Forward`."""

    model: str
    method: str
    arguments: ConditioningRef
    kept: tuple[int, ...] = ()
    patches: PatchNames = ("", "")


class VaeFile(msgspec.Struct, frozen=True):
    """A VAE as ComfyUI loads it."""

    path: str  # a file of a VAE, or a checkpoint with one
    checkpoint: bool  # which of both
    dtype: str  # a torch dtype's name, that it computes in
    size: int  # bytes of its weights in that type
    comfyui: ComfyuiCode
    metadata: dict[str, Scalar] | None = None  # that Load VAE adds to the file's own; None for none


class RunVae(msgspec.Struct, frozen=True, tag=True):
    """Encode or decode; the VAE is loaded where it is not there. Tensors: `x`, a latent (B, C, ...) or what its VAE
    makes one of, in the VAE's dtype."""

    vae: str
    file: VaeFile
    half: str  # "encoder" or "decoder"
    ranks: int  # how many of the pool's ranks, from rank 0, may share it
    memory: int = 0  # bytes that it may take beside the weights on a single rank, estimated
    seed: int = 0  # of noise that a decoder adds
    options: dict[str, Scalar] = {}  # further arguments of ComfyUI's method


class KeepPatches(msgspec.Struct, frozen=True, tag=True):
    """Keep weight patches for requests to come, by the names of their contents (patching/patch_data.py). Tensors: each
    factor and each set, (bytes,) uint8, by its name."""

    comfyui: ComfyuiCode  # whose code is to compute with them
    factors: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    kept: tuple[str, ...] | None = None  # earlier sets that stay; all others are forgotten first. None: all stay


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Bring a network beside the model, which patches in conditionings name by its number, or let go of others.
    Tensors: `attached_name(place)` each; those of one network may come in several requests, one after the other."""

    number: int = 0
    form: Any = None  # what it is made of (networks/comfyui/module_tree.py), with the last tensors; None before
    kept: tuple[int, ...] | None = None  # earlier networks that stay, the rest goes with its calls. None: all stay


class Release(msgspec.Struct, frozen=True, tag=True):
    """Free a resident model's memory; the processes stay. An unknown model is no error. Parked weights stay on the
    host, where it has memory for them, for when they are used again."""

    model: str
    park: bool = False


Request = Load | Survey | Forward | Step | Sample | Invoke | RunVae | KeepPatches | Attach | Release


class PlanDetails(msgspec.Struct, frozen=True):
    """A plan for one request of one model, and what it was predicted to take: 0 where nothing can be predicted (on a
    CPU, for a U-Net)."""

    model: str
    degrees: dict[str, int]  # by `ParallelConfig`'s axes, outermost first; their product is the ranks that compute
    patches: int  # parts that stages cut the picture into; 1 where they work in turn, or there is one
    stage_blocks: tuple[int, ...]  # blocks of every stage
    heads: int  # of the model
    blocks: int  # of the model
    tokens: int  # of the request
    batch: int  # of the request: CFG branches times pictures
    step_seconds: float = 0.0  # of this plan
    one_gpu_seconds: float = 0.0  # of a step on one GPU
    memory_bytes: int = 0  # for the GPU that needs the most


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Load`."""

    family: str  # as artists call it
    bytes_per_rank: int  # parameter bytes that one rank holds
    reused: bool  # it was resident already
    explanation: Said  # the plan for a single picture, in words
    machine: MachineFacts | None = None  # what plans now reckon with, measured where the request did not know
    stages: int = 1  # that the weights are split into; a `Forward` runs through them one after the other
    held: dict[str, int] | None = None  # see `Finished`
    details: PlanDetails | None = None  # of that plan


class Surveyed(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Survey`."""

    free_each: tuple[int, ...]  # see `MachineFacts`
    # Of weights on the rank that has the most, as they would be planned were all of a GPU free; 0 where they are there.
    needs_bytes: int
    held: dict[str, int] | None = None  # see `Finished`


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Answer to the other requests."""

    plan: Said = Said("")  # the plan that ran it, one sentence
    bytes_freed: int = 0  # over one rank, for `Release`
    # Bytes of weights on this rank's device by model, which may have them in common; None for as before.
    held: dict[str, int] | None = None
    details: PlanDetails | None = None  # of the plan; None for as before, in answers to a `Step`


Answer = Loaded | Surveyed | Finished
