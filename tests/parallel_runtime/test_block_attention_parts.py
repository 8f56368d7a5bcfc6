"""ComfyUI's attention call with norms before it and a layer beside it: one operator, whichever way its heads go."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from parallel_runtime.acceleration.passes import linear_gelu, linear_of_parts, linear_silu_gate
from parallel_runtime.attention.kernels import KERNELS
from parallel_runtime.attention.rotary import norm_rotate
from parallel_runtime.exchange.grown_memory import PeerBuffers
from parallel_runtime.exchange.host_exchange import HostBuffers
from parallel_runtime.exchange.layer_beside import LayerBeside
from parallel_runtime.mesh.agreement import NONE
from parallel_runtime.mesh.mesh import single_rank_mesh
from parallel_runtime.networks import block_attention
from parallel_runtime.networks.attention_operator import (
    attending,
    block_attention_of_layers,
    block_attention_of_parts,
)
from parallel_runtime.networks.block_attention import BlockAttention
from parallel_runtime.networks.gathered_inputs import GatheredInputs
from parallel_runtime.networks.token_split import Streams, TokenSplit

HEADS, HEAD_DIM, PARTS, WIDTH = 4, 8, (3, 5), 24


def attention_pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **given: Any) -> torch.Tensor:
    """As ComfyUI's, of that name, for heads before tokens."""
    assert given["skip_reshape"]
    return F.scaled_dot_product_attention(q, k, v, scale=given.get("scale")).transpose(1, 2).flatten(2)


def attend(queries, keys, values, norms, eps, beside, scale):
    """What the operator gives, in plain PyTorch."""
    *weights, cos, sin = norms
    query, key = norm_rotate(queries, keys, weights[: len(queries)], weights[len(queries) :], eps, cos, sin)
    own = [each.transpose(1, 2) for each in (query, key, torch.cat(values, 1))]
    attended = F.scaled_dot_product_attention(*own, scale=scale).transpose(1, 2)
    if not beside:
        return attended
    if len(beside) == 3:
        x, hidden_weight, weight = beside
        return linear_of_parts([attended.flatten(2), linear_silu_gate(x, hidden_weight)], weight, None)
    x, hidden_weight, hidden_bias, weight, bias = beside
    return linear_of_parts([attended.flatten(2), linear_gelu(x, hidden_weight, hidden_bias)], weight, bias)


@pytest.fixture
def given(monkeypatch):
    """Queries, keys, values, norms, eps, and a layer beside them."""
    monkeypatch.setitem(
        sys.modules, "comfy.ldm.modules.attention", SimpleNamespace(attention_pytorch=attention_pytorch)
    )
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    parts = [[draw(2, tokens, HEADS, HEAD_DIM) for tokens in PARTS] for _ in range(3)]
    angles = draw(sum(PARTS), HEAD_DIM // 2).repeat_interleave(2, 1)
    norms = [*(draw(HEAD_DIM) for _ in range(4)), angles.cos(), angles.sin()]
    inner = HEADS * HEAD_DIM
    beside = [draw(2, sum(PARTS), WIDTH), draw(20, WIDTH), draw(20), draw(WIDTH, inner + 20), draw(WIDTH)]
    return *parts, norms, 1e-6, beside


def call(given: Any, attention: BlockAttention, beside: str, scale: float | None = None) -> torch.Tensor:
    *front, layers = given
    gated = [layers[0], layers[1], layers[3][:, : HEADS * HEAD_DIM + 10]]
    chosen = {"": [], "gelu": layers, "gate": gated}[beside]
    with attending(attention.at, attention.over_shared):
        found = block_attention_of_parts(*front, chosen, HEADS, "attention_pytorch", None, scale, True)
    expected = attend(*front, chosen, scale)
    expected = expected if beside else expected.flatten(2)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-5
    return found


@pytest.mark.parametrize("beside", ["", "gelu", "gate"])
def test_where_heads_stay_the_operator_does_one_after_the_other(given, beside):
    call(given, BlockAttention(KERNELS["sdpa"], TokenSplit(single_rank_mesh())), beside, scale=0.3)


@pytest.mark.parametrize("beside", ["", "gelu", "gate"])
def test_over_peer_memory_all_of_it_goes_into_the_exchange_and_elsewhere_none(given, beside, monkeypatch):
    sent: list[tuple[Any, ...]] = []

    def over_peers(queries, keys, values, norms, eps, beside, kernel, buffers, scale):
        sent.append((len(queries), len(norms), len(beside), kernel, buffers))
        return attend(queries, keys, values, norms, eps, beside, scale)

    monkeypatch.setattr(block_attention, "attend_over_peers", over_peers)
    split = TokenSplit(single_rank_mesh())
    attention = BlockAttention(KERNELS["sdpa"], split)
    tokens: Any = split.tokens
    tokens.degree, tokens.buffers = 2, PeerBuffers(torch.empty(0), 0, (), torch.empty(0), "group")
    fits = SimpleNamespace(fits=lambda dtype, *of_head: of_head == (HEADS, HEAD_DIM))
    tokens.peers = fits
    call(given, attention, beside)  # no block runs that is cut
    assert sent == []
    attention.calls = 0
    split.streams = Streams(PARTS, ((PARTS[0],), (PARTS[1],)), 0, (0, 0), (True, True))
    call(given, attention, beside)
    assert sent == [(2, 6, {"": 0, "gelu": 5, "gate": 3}[beside], KERNELS["sdpa"].attend, tokens.buffers)]
    assert attention.calls == 1
    front = given[:-1]
    others = {"degree": 3, "buffers": None, "peers": SimpleNamespace(fits=lambda *asked: False)}
    for name, value in others.items():
        kept = getattr(tokens, name)
        setattr(tokens, name, value)
        assert attention.over_shared(*front, [], None) is None
        setattr(tokens, name, kept)
    for name, value in {"alone": 0, "whole_queries": True, "gathers_keys": True, "kept": 2}.items():
        kept = getattr(split, name)
        setattr(split, name, value)
        assert attention.over_shared(*front, [], None) is None
        setattr(split, name, kept)
    monkeypatch.setenv("PARALLEL_DIT_OFF", "blocks")
    assert attention.over_shared(*front, [], None) is None
    assert len(sent) == 1


def test_a_layer_beside_attention_tells_what_a_token_is_multiplied_with_before_attention_is_there(given):
    *_, (x, of_x, bias, weight, last) = given
    assert LayerBeside([x, of_x, bias, weight, last]).parameters == of_x.numel() + WIDTH * 20
    gated = LayerBeside([x, of_x, weight[:, : HEADS * HEAD_DIM + 10]])  # half of the hidden values is the gate
    assert gated.parameters == of_x.numel() + WIDTH * 10
    assert gated.hidden().shape[-1] == 10


@pytest.mark.parametrize("beside", ["", "gelu"])
def test_layers_of_queries_keys_and_values_run_first_or_their_inputs_are_exchanged(given, beside, monkeypatch):
    *_, norms, eps, layers = given
    inner = HEADS * HEAD_DIM
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, tokens, WIDTH, generator=generator) for tokens in PARTS]
    weights = [torch.randn(3 * inner, WIDTH, generator=generator) for _ in PARTS]
    biases = [torch.randn(3 * inner, generator=generator), None]
    tensors = [weights[0], biases[0], weights[1]]
    places = [number for kind in range(3) for part in range(2) for number in (part, kind * inner)]
    made = [F.linear(*each).unflatten(2, (3, HEADS, HEAD_DIM)) for each in zip(inputs, weights, biases, strict=True)]
    front = [[part[:, :, kind] for part in made] for kind in range(3)]
    chosen = layers if beside else []
    expected = attend(*front, norms, eps, chosen, None)
    through: list[Any] = []

    def went(beside, sizes, attended):
        through.append((beside, sizes))
        if beside is not None:
            beside.begin()
            beside.go_on()
        return attended

    def of_heads(query, key, value, *, kernel, buffers, scale, beside):
        return went(beside, None, kernel(query, key, value, None, scale))

    def of_inputs(projections, norms, eps, sizes, *, kernel, buffers, scale, beside):
        return went(beside, sizes, attend(*projections.whole(), norms, eps, [], scale))

    monkeypatch.setattr(block_attention, "attend_through_host", of_heads)
    monkeypatch.setattr(block_attention, "gather_through_host", of_inputs)
    asked: list[Any] = []
    monkeypatch.setattr(block_attention, "bytes_of_inputs", lambda *sizes, beside, rounds: asked.append(beside) or 4)
    split = TokenSplit(single_rank_mesh())
    attention = BlockAttention(KERNELS["sdpa"], split)
    tokens: Any = split.tokens
    tokens.degree, tokens.peers = 2, SimpleNamespace(fits=lambda dtype, *of_head: of_head == (HEADS, HEAD_DIM))

    def found() -> torch.Tensor:
        rest = (HEADS, HEAD_DIM, torch.float32, norms, eps, chosen, "attention_pytorch", None, None, True)
        with attending(attention.at, attention.over_shared, attention.over_host):
            return block_attention_of_layers(inputs, [0, 1], tensors, [2, 1], ["", ""], places, *rest)

    assert (found() - (expected if beside else expected.flatten(2))).abs().max() < 1e-4
    assert through == []  # no block runs that is cut
    split.streams = Streams(PARTS, ((PARTS[0],), (PARTS[1],)), 0, (0, 0), (True, True))
    tokens.buffers = HostBuffers(None, 0, (), (1, 1))  # type: ignore[arg-type]
    assert (found().flatten(2) - expected.flatten(2)).abs().max() < 1e-4
    way = GatheredInputs(tokens, tuple)
    assert way.seen() != NONE
    with way.taken():
        assert (found().flatten(2) - expected.flatten(2)).abs().max() < 1e-4
    assert [each is not None for each, _ in through] == [bool(beside)] * 2
    assert set(asked) == {40 * WIDTH if beside else 0}  # numbers that a token is multiplied with, before attention
    assert [sizes for _, sizes in through] == [None, split.streams.sizes]
