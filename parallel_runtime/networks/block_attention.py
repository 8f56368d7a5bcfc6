"""ComfyUI's attention call, over the tokens of all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.kernels import AttentionKernel
from ..attention.projections import Projections
from ..attention.rotary import whole_heads
from ..errors import UnsupportedModelError, first_line
from ..exchange.grown_memory import PeerBuffers
from ..exchange.host_exchange import HostBuffers, attend_through_host
from ..exchange.host_gather import gather_through_host
from ..exchange.layer_beside import LayerBeside
from ..exchange.peer_exchange import attend_over_peers
from ..planning.host_route import bytes_of_inputs
from ..switches import is_on
from .attention_operator import Parts, the_kernel, through_operator
from .shares import join_both
from .token_split import TokenSplit, take

log = logging.getLogger(__name__)

_EXACT = {"attention_pytorch", "attention_flash", "attention_xformers"}
"""ComfyUI's functions that compute attention as it is, in the type of what they get: a faster kernel may stand for
them. Others round more, as ComfyUI was asked to (SageAttention, int8), or less."""
_SMALL = 1 << 17  # numbers in a query that no kernel is worth a choice for


class Suited(NamedTuple):
    """Attention that a kernel was tried for; see `resolve_kernel`."""

    dtype: torch.dtype
    head_dim: int
    chosen: bool  # the artist asked for this kernel, so it stands for any function of ComfyUI's


class _Asked:
    """A call of ComfyUI's attention; see comfy.ldm.modules.attention for the arguments."""

    def __init__(
        self, function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None,
        attn_precision: Any = None, skip_reshape: bool = False, skip_output_reshape: bool = False, **more: Any,
    ):  # fmt: skip
        self.function, self.q, self.k, self.v, self.heads, self.mask = function, q, k, v, heads, mask
        self.how = {"attn_precision": attn_precision, "skip_reshape": skip_reshape, **more}
        self.how["skip_output_reshape"] = skip_output_reshape

    @property
    def width(self) -> int:
        """Of a head."""
        return self.q.shape[3] if self.how["skip_reshape"] else self.q.shape[2] // self.heads

    def own(self) -> Tensor:
        """What the function gives."""
        return self.function(self.q, self.k, self.v, self.heads, mask=self.mask, **self.how)

    def by_tokens(self) -> tuple[Tensor, ...]:
        """Queries, keys and values as (B, N, heads, D)."""
        if self.how["skip_reshape"]:
            return tuple(each.transpose(1, 2) for each in (self.q, self.k, self.v))
        return tuple(each.flatten(2).unflatten(2, (-1, self.width)) for each in (self.q, self.k, self.v))

    def as_asked(self, attended: Tensor) -> Tensor:
        """Attended values (B, N, heads, D) in the layout that the call asks for."""
        return attended.transpose(1, 2) if self.how["skip_output_reshape"] else attended.flatten(2)


class BlockAttention:
    """What stands in `transformer_options["optimized_attention_override"]`: the kernel attends where tokens are shared
    out, and elsewhere where it is `suited` (None: nowhere) and there is no mask; else ComfyUI's own function does."""

    def __init__(self, kernel: AttentionKernel, split: TokenSplit, suited: Suited | None = None):
        self.split = split
        self._kernel = kernel
        self._suited = suited
        self.calls = 0  # that compiled blocks have made

    def at(self, function: Callable[..., Tensor], where: str, *args: Any, **kwargs: Any) -> Tensor:
        """What a compiled block calls, `where` the field of its data ("cross", "gathers") that names the submodule."""
        self.calls += 1
        with self.split.inside(where):
            return self(function, *args, **kwargs)

    def over_shared(
        self, queries: Parts, keys: Parts, values: Parts, norms: Parts, eps: float, beside: Parts, scale: float | None
    ) -> Tensor | None:
        """Over memory that the ranks share, (batch, own tokens, width), arguments as of `attend_over_peers`; None where
        heads go another way, or nowhere."""
        buffers, kernel = self._shared(queries[0].dtype, *queries[0].shape[2:]), self._kernel.attend
        if buffers is None:
            return None
        self.calls += 1
        if isinstance(buffers, PeerBuffers):
            attended = attend_over_peers(queries, keys, values, norms, eps, beside, kernel, buffers, scale)
            return attended if beside else attended.flatten(2)
        whole, layer = whole_heads(queries, keys, values, norms, eps), LayerBeside(beside) if beside else None
        return _ended(attend_through_host(*whole, kernel=kernel, buffers=buffers, scale=scale, beside=layer), layer)

    def over_host(
        self, layers: Projections, norms: Parts, eps: float, beside: Parts, scale: float | None
    ) -> Tensor | None:
        """The same of what queries, keys and values are made of, where that goes through the host's memory in their
        place; None where it does not, and they are to be made first."""
        tokens, streams = self.split.tokens, self.split.streams
        buffers = self._shared(layers.dtype, layers.heads, layers.head_dim)
        if not isinstance(buffers, HostBuffers):
            return None
        assert streams is not None
        layer = LayerBeside(beside) if beside else None
        could = layers.lengths == list(streams.own)
        x, inner = layers.inputs[0], layers.heads * layers.head_dim
        taken = sum(each.itemsize for each, part in zip(layers.inputs, layers.part_of, strict=True) if not part)
        sizes = inner, x.shape[-1], taken, x.shape[0], buffers.lengths
        more: Any = {"beside": layer.parameters if layer else 0, "rounds": layers.roundings[0] is not None}
        number = bytes_of_inputs(tokens.machine, *sizes, **more) if could else 0
        tokens.noted.append(layers.kind if number else "")
        if not (number and tokens.gathers):
            return None
        layers = replace(layers, rounds=number < x.itemsize)
        self.calls += 1
        how: Any = {"kernel": self._kernel.attend, "buffers": buffers, "scale": scale, "beside": layer}
        return _ended(gather_through_host(layers, norms, eps, streams.sizes, **how), layer)

    def _shared(self, dtype: torch.dtype, heads: int, head_dim: int) -> PeerBuffers | HostBuffers | None:
        """The memory that ranks share for attention of a whole block; None where there is none, or for other heads."""
        split, tokens = self.split, self.split.tokens
        if split.streams is None or split.alone is not None or split.whole_queries or split.gathers_keys or split.kept:
            return None
        fits = tokens.peers is not None and tokens.peers.fits(dtype, heads, head_dim)
        return tokens.buffers if fits and not heads % tokens.degree and is_on("blocks") else None

    def __call__(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Attend as `function`, of comfy.ldm.modules.attention, would to the whole. Tensors are (B, heads, N, D) with
        `skip_reshape`, else (B, N, heads * D) or (B, N, heads, D); the result likewise, by `skip_output_reshape`."""
        if torch.compiler.is_compiling():
            return through_operator(function, *args, **kwargs)
        return self._attend(_Asked(self._by_kernel if function is the_kernel else function, *args, **kwargs))

    def _attend(self, asked: _Asked) -> Tensor:
        split, streams, mask = self.split, self.split.streams, asked.mask
        if streams is None:
            return self._over_own(asked)
        dim, q, k, v = 2 if asked.how["skip_reshape"] else 1, asked.q, asked.k, asked.v
        if split.alone is not None and k.shape[dim] == streams.own[split.alone]:
            with split.running(streams.only(split.alone), k.shape[0], k.device):
                return self._attend(asked)
        own = sum(streams.own)
        pieces = split.whole_queries or split.gathers_keys or split.kept > 0
        if k.shape[dim] != split.kept + own or (q.shape[dim] != own and not pieces):
            counts = f"{q.shape[dim]} queries and {k.shape[dim]} keys"
            raise ValueError(f"attention over {counts}, where this rank has {own} tokens")
        if mask is not None and mask.ndim < 4:  # to (B or 1, heads or 1, queries or 1, keys)
            mask = mask[None, None] if mask.ndim == 2 else mask[:, None]
        asked.mask = mask
        if split.patch is not None:
            if pieces or (mask is not None and (mask.shape[2] > 1 or mask.shape[3] != streams.total)):
                what = "With this input the network masks single tokens, which stages cannot."
                raise UnsupportedModelError(what, "Set stages to 1.")
            asked.k, asked.v = split.patch.whole(k, v, dim, streams, split.gather)
            return self._over_own(asked)
        if pieces or (mask is not None and mask.shape[2] > 1):
            return self._over_gathered_keys(asked, dim)
        if mask is not None and mask.shape[3] == streams.total != own:
            mask = take(mask, 3, streams.intervals())
        query, key, value = asked.by_tokens()
        if key.shape[2] != query.shape[2]:  # heads of keys that serve several heads of queries
            key, value = (each.repeat_interleave(query.shape[2] // each.shape[2], 2) for each in (key, value))
        attended = split.tokens.attend(self._kernel, query, key, value, mask, asked.how.get("scale"))
        return asked.as_asked(attended)

    def _over_own(self, asked: _Asked) -> Tensor:
        """Attention over what is given, which needs no other rank: by the kernel where it suits, else ComfyUI's."""
        suited = self._suited
        if suited is None or asked.mask is not None or (asked.q.dtype, asked.width) != suited[:2]:
            return asked.own()
        if not suited.chosen and (asked.q.numel() < _SMALL or asked.function.__name__ not in _EXACT):
            return asked.own()
        query, key, value = asked.by_tokens()
        if value.shape[3] != asked.width or key.shape[2] != query.shape[2]:
            return asked.own()
        try:
            attended = self._kernel.attend(query, key, value, None, asked.how.get("scale"))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # shapes that it is not made for
            reason = first_line(error)
            log.warning("Attention is ComfyUI's own, as %s cannot: %s", self._kernel.name, reason)
            self._suited = None
            return asked.own()
        return asked.as_asked(attended)

    def _by_kernel(self, *args: Any, **kwargs: Any) -> Tensor:
        """What stands behind `the_kernel`."""
        asked = _Asked(the_kernel, *args, **kwargs)
        query, key, value = asked.by_tokens()
        return asked.as_asked(self._kernel.attend(query, key, value, asked.mask, asked.how.get("scale")))

    def _over_gathered_keys(self, asked: _Asked, dim: int) -> Tensor:
        """With whole keys on every rank, as a mask of queries and keys, whole queries, or pieces of them ask for."""
        split, streams, k, v = self.split, self.split.streams, asked.k, asked.v
        assert streams is not None
        if (mask := asked.mask) is not None:
            if mask.shape[3] == sum(streams.own) != streams.total:
                if mask.shape[2] > 1 and not split.whole_queries:
                    raise ValueError("a mask of this rank's queries and keys alone")
                mask = split.gather_all(mask, 3)
            if mask.shape[2] == streams.total and not (split.whole_queries or split.gathers_keys):
                mask = take(mask, 2, streams.intervals())
        if not (split.gathered and split.gathered[0] is k and split.gathered[1] is v):
            split.gathered = k, v, *join_both(k, v, lambda own: split.gather_all(own, dim))
        if not asked.q.shape[dim] and not asked.how["skip_reshape"] and not asked.how["skip_output_reshape"]:
            return asked.q  # of a piece, this rank has nothing
        asked.k, asked.v, asked.mask = *split.gathered[2:], mask
        return asked.own()


def _ended(attended: Tensor, layer: LayerBeside | None) -> Tensor:
    """What a block makes of attended values (batch, own tokens, heads, head dim) with the layer beside attention."""
    return attended.flatten(2).contiguous() if layer is None else layer.end(attended.flatten(2))
