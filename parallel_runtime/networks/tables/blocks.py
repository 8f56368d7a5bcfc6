"""What is said of a network so that ranks can share out its tokens: data alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

LATENT_SHAPES = "latent_shapes"
"""Argument of a call that says of which latents (video, audio) a packed x consists."""
OPTIONS = ("transformer_options",)
"""Argument of most blocks of ComfyUI's: what acts inside of them, alike for all tokens."""


def find(module: Any, path: str) -> Any:
    """What a path of the data stands for in a module; None where it has it not."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


@dataclass(frozen=True)
class Blocks:
    """A list of blocks that are alike, and what their forward's arguments are.

    An argument that is a tuple is named with the index of its item, "x.0". Arguments of the forward that no field names
    are an error, unless they are None: a block of another version of ComfyUI is not cut by data that was not written
    for it. Submodules and attributes are named by their path in the block.

    Args:
        path: attribute path of the list in the network.
        tokens: argument -> dim of its tokens. Together they are what the block's self-attention goes over, in this
            order.
        returns: which of `tokens` each returned value is; None for a value that is whole on every rank.
        joint: argument -> dim, over the tokens of all streams one after the other, such as rotary tables; also inside
            of lists and tuples.
        rows: argument -> (stream, dim): one row per token of a stream, or per frame of it (then they are repeated), or
            one for all.
        segments: argument -> stream: a list of (start, stop, ...) over its tokens; None as stop is the end.
        border: argument -> stream: the index of a token.
        sorts: those of `segments` that the block sorts: graphs do not leave their numbers open.
        alike: arguments that are the same for all tokens. What is named a mask may have rows and columns for them.
        longer: those that are whole -> a dim that is longer in one call than in another (texts, sound): graphs leave it
            open.
        counts: attributes of objects among the arguments that number tokens: graphs leave them open.
        cross: submodules whose attention is not over the tokens: their keys are whole on every rank.
        texts: the same of diffusers' classes, whose attention over texts nobody changes: for plans alone.
        gathers: submodules whose queries are whole on every rank, and whose keys are the tokens.
        apart: submodules that compute each token by itself, but from the number of all (audio beside each frame).
        alone: a stream over which the block attends once more without the others (Boogu, SD3.5 medium).
        again: the submodule that does so, in blocks that have it.
        parallel: it attends and feeds forward from one input, in which all streams are joined; compiled, its exchange
            over peer memory runs beside matrix products (exchange/peer_exchange.py).
        grids: those of `tokens` and `rows` whose tokens have three dims, frames, rows and columns (Cosmos, Anima).
        stretched: those of `rows` whose number need not divide the tokens': each row is repeated so often that all
            tokens have one, and what is over is dropped (Wan: references and poses behind the video).
        positional: names for the arguments of a forward that has none, only *args (SD3).
        when: attribute -> what it is in blocks that can be cut; every rank computes the others whole (blocks with
            windows, means or convolutions over the tokens).
        unless: attribute -> what it is in blocks that cannot be cut, as another version of ComfyUI has them.
        whole_with: arguments with which every rank computes the block whole (caches, lists of other tokens).
        patched: patches inside of the block that can be given all tokens: called with one dict of tensors
            (B, tokens, ...) and return one (Wan, for MultiTalk). With others, every rank computes the block whole.
        kept: an argument that is (keys, values, how many), which stand before the tokens' on every rank; () where the
            network will keep some of this call for the next, then None: every rank computes the block whole (HiDream
            O1).
        modulations: argument -> submodules: linear layers that get SiLU of it, or of its first rows, and nothing else;
            alike for all tokens, and the same tensor for all blocks. A block may lack some of them.
        skips: blocks of the second half of the network's only list take the output of their mirror image in the first,
            but for the two in the middle.
        latent: for a network with stages the stream of the latent's tokens, row by row: alone in the list that runs
            first, in later ones at the end of a stream that has joined others.
    """

    path: str
    tokens: Mapping[str, int]
    returns: tuple[str | None, ...]
    joint: Mapping[str, int] = field(default_factory=dict)
    rows: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    segments: Mapping[str, str] = field(default_factory=dict)
    border: Mapping[str, str] = field(default_factory=dict)
    sorts: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    longer: Mapping[str, int] = field(default_factory=dict)
    counts: tuple[str, ...] = ()
    cross: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    gathers: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    alone: str = ""
    again: str = ""
    parallel: bool = False
    grids: tuple[str, ...] = ()
    stretched: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()
    when: Mapping[str, Any] = field(default_factory=dict)
    unless: Mapping[str, Any] = field(default_factory=dict)
    whole_with: tuple[str, ...] = ()
    patched: tuple[str, ...] = ()
    kept: str = ""
    modulations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    skips: bool = False
    latent: str = ""

    @property
    def names(self) -> set[str]:
        """All arguments that are named."""
        cut = (self.tokens, self.joint, self.rows, self.segments, self.border)
        return {name.partition(".")[0] for name in (*chain(*cut), *self.alike, *self.whole_with, self.kept) if name}


@dataclass(frozen=True)
class Network:
    """A class of ComfyUI's as data.

    Args:
        title: how artists call the family.
        blocks: what is cut; () where ranks share out the batch alone.
        whole: why the tokens are not shared out, to stand behind "as"; "" where they are.
        attention_in: modules of ComfyUI whose attention function does not ask `transformer_options` what to call.
        heads: attribute path of the number of attention heads.
        width: of the width of a token; "" where most of a block's products take it in.
        head_dim: of the width of a head; "" where all of them together are as wide as a token.
        rows_together: it tells the CFG branches apart by their place in the batch, so every rank computes all rows.
        sigmas_with: a submodule with which it asks for the sigmas of the run; None in files that do without.
        read_outside: its buffers that nodes of ComfyUI read.
        run_outside: parts of it that ControlNets run.
        clears: its method that lets go of what it keeps on itself from call to call; "" where it keeps nothing.
        by_object: arguments by whose `id` it finds that again.
        stages: it can be cut into stages: its lists stand in the order in which they run, blocks take nothing from
            blocks before them but their streams, and behind the first stage nothing reads the latent.
        behind: tokens may stand behind the latent's in their stream: of references, or that fill up.
        rescales: its `forward` rescales latents around `_forward`, so a loop in the ranks enters there.
        side_by_side: it is a U-Net, whose channels lie side by side on a GPU (networks/comfyui/unet.py).
        read: which source of ComfyUI this was read from (a version, a proposed change); "" where it was run.
    """

    title: str
    blocks: tuple[Blocks, ...] = ()
    whole: str = ""
    attention_in: tuple[str, ...] = ()
    heads: str = "num_heads"
    width: str = ""
    head_dim: str = ""
    rows_together: bool = False
    sigmas_with: str = ""
    read_outside: tuple[str, ...] = ()
    run_outside: tuple[str, ...] = ()
    clears: str = ""
    by_object: tuple[str, ...] = ()
    stages: bool = False
    behind: bool = False
    rescales: bool = False
    side_by_side: bool = False
    read: str = ""
