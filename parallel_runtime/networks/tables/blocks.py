"""What is said of a network so that ranks can share out its tokens: data alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

LATENT_SHAPES = "latent_shapes"  # argument of a call that says of which latents (video, audio) a packed x consists
OPTIONS = ("transformer_options",)  # argument of most of ComfyUI's blocks: what acts inside, alike for all tokens


def find(module: Any, path: str) -> Any:
    """What a path of the data stands for in a module; None where it has it not."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


@dataclass(frozen=True)
class Blocks:
    """A list of blocks that are alike, and what their forward's arguments are. One that is a tuple is named with the
    index of its item, "x.0"; submodules and attributes by their path in the block. An argument that no field names is
    an error, unless it is None: blocks of another version of ComfyUI are not cut by data not written for them."""

    path: str  # attribute path of the list in the network
    tokens: Mapping[str, int]  # argument -> dim of its tokens; in this order the block's self-attention goes over them
    returns: tuple[str | None, ...]  # which of `tokens` each returned value is; None: it is whole on every rank
    # Argument -> dim, over the tokens of all streams one after the other (rotary tables); in lists and tuples, too.
    joint: Mapping[str, int] = field(default_factory=dict)
    # Argument -> (stream, dim): one row per token of it, or per frame (then they are repeated), or one for all.
    rows: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    # Argument -> stream: a list of (start, stop, ...) over its tokens; None as stop is the end.
    segments: Mapping[str, str] = field(default_factory=dict)
    border: Mapping[str, str] = field(default_factory=dict)  # argument -> stream: the index of a token
    sorts: tuple[str, ...] = ()  # those of `segments` that the block sorts: graphs do not leave their numbers open
    # Arguments that are the same for all tokens. What is named a mask may have rows and columns for them.
    alike: tuple[str, ...] = ()
    # Those that are whole -> a dim that is longer in one call than in another (texts, sound): graphs leave it open.
    longer: Mapping[str, int] = field(default_factory=dict)
    counts: tuple[str, ...] = ()  # attributes of objects among the arguments that number tokens: graphs leave them open
    cross: tuple[str, ...] = ()  # submodules whose attention is not over the tokens: their keys are whole on every rank
    texts: tuple[str, ...] = ()  # the same of diffusers' classes, for plans alone: nobody changes it there
    gathers: tuple[str, ...] = ()  # submodules whose queries are whole on every rank, and whose keys are the tokens
    # Submodules that compute each token by itself, but from the number of all (audio beside each frame).
    apart: tuple[str, ...] = ()
    alone: str = ""  # a stream over which the block attends once more without the others (Boogu, SD3.5 medium)
    again: str = ""  # the submodule that does so, in blocks that have it
    # It attends and feeds forward from one input, in which all streams are joined; compiled, its exchange runs beside
    # matrix products (exchange/layer_beside.py).
    parallel: bool = False
    # Compiled, its attention is given the layers that make queries, keys and values (acceleration/projection_pass.py),
    # in blocks of which this is true: attribute -> what it is. None: in none.
    projects: Mapping[str, Any] | None = None
    # Those of `tokens` and `rows` whose tokens have three dims, frames, rows and columns (Cosmos, Anima).
    grids: tuple[str, ...] = ()
    # Those of `rows` whose number need not divide the tokens': each row is repeated so often that all tokens have one,
    # and what is over is dropped (Wan: references and poses behind the video).
    stretched: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()  # names for the arguments of a forward that has none, only *args (SD3)
    # Attribute -> what it is in blocks that can be cut; every rank computes the others whole (windows, means or
    # convolutions over the tokens). And what it is in none of them, as another version of ComfyUI has them.
    when: Mapping[str, Any] = field(default_factory=dict)
    unless: Mapping[str, Any] = field(default_factory=dict)
    # Arguments with which every rank computes the block whole (caches, lists of other tokens).
    whole_with: tuple[str, ...] = ()
    # Patches inside of the block that can be given all tokens: called with one dict of tensors (B, tokens, ...) and
    # return one (Wan, for MultiTalk). With others, every rank computes the block whole.
    patched: tuple[str, ...] = ()
    # An argument that is (keys, values, how many), which stand before the tokens' on every rank; () where the network
    # will keep some of this call for the next, then None: every rank computes the block whole (HiDream O1).
    kept: str = ""
    # Argument -> submodules: linear layers that get SiLU of it, or of its first rows, and nothing else; alike for all
    # tokens, and the same tensor for all blocks. A block may lack some of them.
    modulations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Blocks of the second half of the network's only list take the output of their mirror image in the first, but for
    # the two in the middle.
    skips: bool = False
    # For a network with stages the stream of the latent's tokens, row by row: alone in the list that runs first, in
    # later ones at the end of a stream that has joined others.
    latent: str = ""

    @property
    def names(self) -> set[str]:
        """All arguments that are named."""
        cut = (self.tokens, self.joint, self.rows, self.segments, self.border)
        return {name.partition(".")[0] for name in (*chain(*cut), *self.alike, *self.whole_with, self.kept) if name}

    def can_cut(self, block: Any) -> bool:
        """Whether ranks share out the tokens of this block of the list; else every rank computes it whole."""
        unlike = any(find(block, name) == value for name, value in self.unless.items())
        return not unlike and all(find(block, name) == value for name, value in self.when.items())


@dataclass(frozen=True)
class Network:
    """A class of ComfyUI's as data."""

    title: str  # how artists call the family
    blocks: tuple[Blocks, ...] = ()  # what is cut; () where ranks share out the batch alone
    whole: str = ""  # why the tokens are not shared out, to stand behind "as"; "" where they are
    # Modules of ComfyUI whose attention function does not ask `transformer_options` what to call.
    attention_in: tuple[str, ...] = ()
    heads: str = "num_heads"  # attribute path of the number of attention heads
    width: str = ""  # of the width of a token; "" where most of a block's products take it in
    head_dim: str = ""  # of the width of a head; "" where all of them together are as wide as a token
    rows_together: bool = False  # it tells CFG branches apart by their place in the batch: every rank computes all rows
    sigmas_with: str = ""  # a submodule with which it asks for the sigmas of the run; None in files that do without
    read_outside: tuple[str, ...] = ()  # its buffers that nodes of ComfyUI read
    run_outside: tuple[str, ...] = ()  # parts of it that ControlNets run
    clears: str = ""  # its method that lets go of what it keeps on itself from call to call; "" where it keeps nothing
    by_object: tuple[str, ...] = ()  # arguments by whose `id` it finds that again
    # It can be cut into stages: its lists stand in the order in which they run, blocks take nothing from blocks before
    # them but their streams, and behind the first stage nothing reads the latent.
    stages: bool = False
    behind: bool = False  # tokens may stand behind the latent's in their stream: of references, or that fill up
    rescales: bool = False  # its `forward` rescales latents around `_forward`, so a loop in the ranks enters there
    side_by_side: bool = False  # it is a U-Net, whose channels lie side by side on a GPU (`UnetFunctions`)
    read: str = ""  # which source of ComfyUI this was read from (a version, a proposed change); "" where it was run
