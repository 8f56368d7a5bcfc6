"""Layers that make queries, keys and values join attention's operator: same numbers, some heads by themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from parallel_runtime.acceleration.passes import Passes
from parallel_runtime.attention.projections import LinearLayer, Projections
from parallel_runtime.attention.rotary import rotate
from parallel_runtime.networks.attention_operator import FUNCTIONS, attending, the_kernel, through_operator

HEADS, HEAD_DIM, WIDTH, TOKENS = 4, 8, 24, 6
SIZE = HEADS * HEAD_DIM

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


WHOLE, THREE = drawn(3 * SIZE, WIDTH), [drawn(SIZE, WIDTH) + kind for kind in range(3)]
BIAS = drawn(3 * SIZE)
COS, SIN = drawn(TOKENS, HEAD_DIM).cos(), drawn(TOKENS, HEAD_DIM).sin()


def divided(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, HEAD_DIM))


def of_one(x: torch.Tensor) -> Parts:
    """As FLUX makes them."""
    query, key, value = F.linear(x, WHOLE, BIAS).view(*x.shape[:2], 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def of_a_split(x: torch.Tensor) -> Parts:
    """As Z-Image does."""
    query, key, value = torch.split(F.linear(x, WHOLE), [SIZE, SIZE, SIZE], dim=-1)
    return query.view(*x.shape[:2], HEADS, HEAD_DIM), divided(key), divided(value)


def of_three(x: torch.Tensor) -> Parts:
    """As Qwen-Image does."""
    query, key, value = (divided(F.linear(x, weight)) for weight in THREE)
    return query, key, value


def head_by_head(x: torch.Tensor) -> Parts:
    """Rows of a head's queries, keys and values side by side."""
    query, key, value = F.linear(x, WHOLE).unflatten(-1, (HEADS, 3, HEAD_DIM)).unbind(3)
    return query, key, value


def read_twice(x: torch.Tensor) -> Parts:
    query, key, value = of_three(x)
    return query, key, value + query.mean()


def with_a_lora(x: torch.Tensor) -> Parts:
    query, _, value = of_three(x)
    return query, divided(F.linear(x, THREE[1]) + F.linear(x, THREE[2]) / 7), value


def written_behind(x: torch.Tensor) -> Parts:
    y = x + 1
    made = of_three(y)
    y.mul_(2)
    return made


def silu_behind(x: torch.Tensor) -> Parts:
    y = x + 1
    query, key, value = of_three(y)
    F.silu(y, True)
    return query, key, value


def of_some_tokens(x: torch.Tensor) -> Parts:
    query, key, value = of_three(torch.cat([x, x], 1))
    return query[:, :TOKENS], key[:, :TOKENS], value[:, TOKENS:]


def block(x: torch.Tensor, make: Callable[[torch.Tensor], Parts], norm: torch.Tensor) -> torch.Tensor:
    query, key, value = make(x)
    query, key = (rotate(F.rms_norm(each, (HEAD_DIM,), norm, 1e-6), COS, SIN) for each in (query, key))
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    return through_operator(the_kernel, q, k, v, HEADS, skip_reshape=True)


def attend(function: Any, where: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **how: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("make", "layers"),
    [(of_one, 1), (of_a_split, 1), (of_three, 3)]
    + [(each, 0) for each in (head_by_head, read_twice, with_a_lora, written_behind, silu_behind, of_some_tokens)],
)
def test_layers_join_where_nothing_else_reads_or_changes_what_they_make(make, layers, monkeypatch):
    monkeypatch.setitem(sys.modules, FUNCTIONS, SimpleNamespace())  # type: ignore[arg-type]
    taken: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        Passes()(module.graph)
        named = {str(node.target).split(".")[1]: node for node in module.graph.nodes if "attention" in str(node.target)}
        taken.append(len(named["block_attention_of_layers"].args[1]) if "block_attention_of_layers" in named else 0)
        module.recompile()
        return module.forward

    torch._dynamo.reset()
    x, norm = drawn(2, TOKENS, WIDTH), drawn(HEAD_DIM)
    with attending(attend):
        found = torch.compile(block, backend=backend, fullgraph=True)(x.clone(), make, norm)
        taken_before, expected = list(taken), torch.compile(block, backend="eager", fullgraph=True)(x, make, norm)
    torch._dynamo.reset()
    assert taken_before == [layers]
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("kinds", [(0, 1, 2), (1, 2), (0,)])
def test_each_kind_is_made_of_its_rows_of_the_layers(kinds):
    text, image = drawn(2, 3, WIDTH), drawn(2, 5, WIDTH)
    weights, biases = [drawn(4 * SIZE, WIDTH)[SIZE:], *THREE], [BIAS, None, drawn(SIZE), None]
    made_by = [LinearLayer(*layer) for layer in zip(weights, biases, strict=True)]
    places = [0, 0, 1, 0, 0, SIZE, 2, 0, 0, 2 * SIZE, 3, 0]
    layers = Projections([text, image], [0, 1, 1, 1], made_by, places, HEADS, HEAD_DIM, torch.float32)
    joint = F.linear(text, weights[0], BIAS).chunk(3, -1)
    alone = [F.linear(image, weights[1 + kind], biases[1 + kind]) for kind in range(3)]
    found = layers.of_all_heads(kinds)([text, image])
    for kind, parts in zip(kinds, found, strict=True):
        for part, expected in zip(parts, (joint[kind], alone[kind]), strict=True):
            assert (part.flatten(2) - expected).abs().max() < 1e-5


@dataclass(frozen=True)
class Halves:
    """A rounding to halves, or a finer one, and a layer that rounds so."""

    parts: int = 2

    def sent(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.parts).round().to(torch.int16)

    def taken(self, sent: torch.Tensor) -> torch.Tensor:
        return sent / self.parts


@dataclass(frozen=True)
class RoundingLayer:
    weight: torch.Tensor
    rounding: Halves = Halves()

    def rows(self, first: int, size: int, rounded: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            return F.linear(x if rounded else self.rounding.taken(self.rounding.sent(x)), self.weight[first:][:size])

        return run


def test_inputs_are_sent_as_all_layers_that_take_them_round_them():
    text, image = drawn(2, 3, WIDTH), drawn(2, 5, WIDTH)
    places = [0, 0, 1, 0, 0, SIZE, 2, 0, 0, 2 * SIZE, 3, 0]
    rounding = [RoundingLayer(WHOLE), *map(RoundingLayer, THREE)]

    def made(layers: list[Any], rounds: bool = True) -> Projections:
        given = places, HEADS, HEAD_DIM, torch.float32
        return Projections([text, image], [0, 1, 1, 1], layers, *given, rounds=rounds)

    both = made(rounding)
    assert [each.dtype for each in both.sent()] == [torch.int16, torch.int16]
    own, others = (made.of_all_heads((1, 2), sent)(given) for made, sent, given in (
        (both, False, both.inputs), (both, True, both.sent())
    ))  # fmt: skip
    for expected, found in zip(chain(*own), chain(*others), strict=True):
        assert torch.equal(expected, found)
    kinds = {both.kind}
    for unlike in (LinearLayer(THREE[2]), RoundingLayer(THREE[2], Halves(4))):
        mixed = made([*rounding[:3], unlike])
        assert [each.dtype for each in mixed.sent()] == [torch.int16, torch.float32]
        kinds.add(mixed.kind)
    assert len(kinds) == 2  # ranks with another rounding would not know what comes
    assert made(rounding, rounds=False).sent()[1] is image
