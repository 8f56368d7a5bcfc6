"""Attention over peer memory takes in the norms and the feed-forward layer of its block: same numbers, one operator.

The operator itself needs GPUs; here plain PyTorch stands for it, for one rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from parallel_runtime.acceleration import rewrites
from parallel_runtime.acceleration.peer_exchange import peer_attention
from parallel_runtime.acceleration.peer_memory import PeerBuffers
from parallel_runtime.acceleration.rewrites import Rewrites, linear_gelu, linear_of_parts
from parallel_runtime.attention.rotary import norm_rotate
from parallel_runtime.mesh.mesh import single_rank_mesh
from parallel_runtime.networks import borders
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.parallel_transformer import parallelize
from parallel_runtime.networks.sequence_attention import SequenceAttention
from tests.parallel_runtime.flux_forward import build_transformer, relative_error, run


@torch.library.impl("parallel_dit::peer_attention", "cpu")
def _(queries, keys, values, norms, eps, beside, memory, shape, table, group, kernel, scale):
    query, key, value = (torch.cat(parts, 1) for parts in (queries, keys, values))
    if norms:
        *weights, cos, sin = norms
        count = len(queries)
        query, key = norm_rotate(queries, keys, weights[:count], weights[count:], eps, cos, sin)
    attended = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (query, key, value)), scale=scale)
    attended = attended.transpose(1, 2).contiguous()
    if not beside:
        return attended
    x, hidden_weight, hidden_bias, weight, bias = beside
    return linear_of_parts([attended.flatten(2), linear_gelu(x, hidden_weight, hidden_bias)], weight, bias)


class OverPeers(SequenceAttention):
    """Attention over the peer memory of one rank."""

    def __call__(self, query: Any, key: Any, value: Any, mask: Any, scale: Any) -> torch.Tensor:
        nothing = torch.zeros(1, dtype=torch.int64)
        buffers = PeerBuffers(nothing, nothing, nothing, "")
        return peer_attention(query, key, value, kernel="sdpa", degree=1, buffers=buffers, scale=scale)


@pytest.fixture
def attentions(monkeypatch):
    """Parts of the tokens, whether normed while sending, and what stands beside, of each attention in each graph."""
    found: list[list[tuple[int, bool, int]]] = []

    class Spy(Rewrites):
        def __init__(self, together: bool):
            super().__init__(True)

        def __call__(self, graph: fx.Graph) -> None:
            super().__call__(graph)
            nodes = [node for node in graph.nodes if "peer_attention" in str(node.target)]
            found.append([(len(node.args[0]), bool(node.args[3]), len(node.args[5])) for node in nodes])
            found[-1] += [node.target for node in graph.nodes if "norm_rotate" in str(node.target)]

    monkeypatch.setattr(rewrites, "Rewrites", Spy)
    monkeypatch.setattr(borders, "SequenceAttention", OverPeers)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


@pytest.mark.slow
def test_flux_blocks_norm_while_sending_and_feed_forward_beside_the_exchange(attentions):
    transformer = build_transformer()
    expected = run(transformer, (4, 6), 12, 2)
    compiled = parallelize(transformer, FLUX, single_rank_mesh(), compile=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        assert relative_error(run(compiled, (4, 6), 12, 2), expected) < 1e-5
    assert attentions[:2] == [[(2, True, 0)], [(1, True, 5)]]  # a double block with text and image, a single one


def test_eager_blocks_run_over_peers_as_they_are(attentions):
    transformer = build_transformer()
    expected = run(transformer, (4, 6), 12, 2)
    assert relative_error(run(parallelize(transformer, FLUX, single_rank_mesh()), (4, 6), 12, 2), expected) < 1e-5
    assert attentions == []
