"""A compiled block's attention takes in the norms and the feed-forward layer beside it: same numbers, one operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from parallel_runtime.acceleration import passes
from parallel_runtime.acceleration.passes import Passes
from parallel_runtime.mesh.mesh import single_rank_mesh
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.diffusers.parallel_transformer import parallelize
from tests.parallel_runtime.flux_forward import build_transformer, relative_error, run


@pytest.fixture
def attentions(monkeypatch):
    """Parts of the tokens, whether normed inside, and what stands beside, of each attention in each graph."""
    found: list[list[Any]] = []

    class Spy(Passes):
        def __call__(self, graph: fx.Graph) -> None:
            super().__call__(graph)
            nodes = [node for node in graph.nodes if "block_attention_of_parts" in str(node.target)]
            found.append([(len(node.args[0]), bool(node.args[3]), len(node.args[5])) for node in nodes])
            names = [str(node.target).split(".")[1] for node in graph.nodes if "parallel_dit." in str(node.target)]
            found[-1] += sorted(name for name in names if name != "block_attention_of_parts")

    monkeypatch.setattr(passes, "Passes", Spy)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


@pytest.mark.slow
def test_flux_blocks_get_every_rewrite_and_keep_their_numbers(attentions):
    """Norms and rotation are parts of attention's operator, and so is a single block's feed-forward layer beside it."""
    transformer = build_transformer()
    expected = run(transformer, (4, 6), 12, 2)
    compiled = parallelize(transformer, FLUX, single_rank_mesh(), compile=True)
    # A graph from the compile cache on disk, of an earlier run of the tests, would not pass through the passes.
    with torch._inductor.config.patch(force_disable_caches=True):
        assert relative_error(run(compiled, (4, 6), 12, 2), expected) < 1e-5
    # A double block with text and image, a single one.
    assert attentions[:2] == [[(2, True, 0), "linear_gelu", "linear_gelu"], [(1, True, 5)]]


def test_eager_blocks_run_as_they_are(attentions):
    transformer = build_transformer()
    expected = run(transformer, (4, 6), 12, 2)
    assert relative_error(run(parallelize(transformer, FLUX, single_rank_mesh()), (4, 6), 12, 2), expected) < 1e-5
    assert attentions == []
