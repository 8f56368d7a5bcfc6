"""A compiled block's attention takes in the norms and the feed-forward layer beside it: same numbers, one operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from parallel_runtime.acceleration import passes
from parallel_runtime.acceleration.attention_pass import rewrite_attention
from parallel_runtime.acceleration.passes import Passes
from parallel_runtime.mesh.mesh import single_rank_mesh
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.diffusers.parallel_transformer import parallelize
from tests.parallel_runtime.flux_forward import build_transformer, relative_error, run


@pytest.fixture
def attentions(monkeypatch):
    """Layers of queries, keys and values, norms, and what stands beside, of each attention in each graph."""
    found: list[list[Any]] = []

    class Spy(Passes):
        def __call__(self, graph: fx.Graph) -> None:
            super().__call__(graph)
            nodes = [node for node in graph.nodes if "block_attention_of_layers" in str(node.target)]
            found.append([(len(node.args[1]), len(node.args[9]) - 2, len(node.args[11])) for node in nodes])
            names = [str(node.target).split(".")[1] for node in graph.nodes if "parallel_dit." in str(node.target)]
            found[-1] += sorted(name for name in names if name != "block_attention_of_layers")

    monkeypatch.setattr(passes, "Passes", Spy)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


@pytest.mark.slow
def test_flux_blocks_get_every_rewrite_and_keep_their_numbers(attentions):
    """Projections, norms and rotation are parts of attention's operator, and a single block's feed-forward layer is."""
    transformer = build_transformer()
    expected = run(transformer, (4, 6), 12, 2)
    compiled = parallelize(transformer, FLUX, single_rank_mesh(), compile=True)
    # A graph from the compile cache on disk, of an earlier run of the tests, would not pass through the passes.
    with torch._inductor.config.patch(force_disable_caches=True):
        assert relative_error(run(compiled, (4, 6), 12, 2), expected) < 1e-5
    # A double block with text and image, a single one.
    assert attentions[:2] == [[(6, 4, 0), "linear_gelu", "linear_gelu"], [(3, 2, 5)]]


def test_eager_blocks_run_as_they_are(attentions):
    transformer = build_transformer()
    expected = run(transformer, (4, 6), 12, 2)
    assert relative_error(run(parallelize(transformer, FLUX, single_rank_mesh()), (4, 6), 12, 2), expected) < 1e-5
    assert attentions == []


@pytest.mark.parametrize(
    ("hidden", "biases", "beside"),
    [("linear_gelu", True, 5), ("linear_silu_gate", False, 3), ("linear_silu_gate", True, 0), ("linear", False, 0)],
)
def test_a_layer_beside_attention_is_part_of_it_where_it_is_one_that_the_exchange_computes(hidden, biases, beside):
    ours, graph = torch.ops.parallel_dit, fx.Graph()
    heads, x, of_x, weight, bias = (graph.placeholder(name) for name in ("heads", "x", "of_x", "weight", "bias"))
    given = ([heads], [heads], [heads], [], 1e-6, [], 2, "attention_pytorch", None, None, True)
    attended = graph.call_function(ours.block_attention_of_parts.default, given)
    layer = getattr(ours, hidden).default if hidden != "linear" else torch._C._nn.linear
    made = graph.call_function(layer, (x, of_x, bias) if hidden == "linear_gelu" else (x, of_x))
    parts = ([attended, made], weight, bias if biases else None)
    graph.output(graph.call_function(ours.linear_of_parts.default, parts))
    rewrite_attention(graph)
    (returned,) = next(node for node in graph.nodes if node.op == "output").args
    if beside:
        assert returned.target == ours.block_attention_of_parts.default
        assert len(returned.args[5]) == beside
        assert list(returned.args[5][:2]) == [x, of_x]
    else:
        assert returned.target == ours.linear_of_parts.default
