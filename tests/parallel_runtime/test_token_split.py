"""What the running block has of the tokens comes with it, and goes with it however it ends."""

from __future__ import annotations

import pytest
import torch

from parallel_runtime.mesh.mesh import single_rank_mesh
from parallel_runtime.networks.shares import Streams
from parallel_runtime.networks.token_split import TokenSplit, running_split


@pytest.mark.parametrize("fails", ["before it", "inside", "not"])
def test_nothing_of_a_block_stays_behind(monkeypatch, fails):
    mesh = single_rank_mesh()
    split, streams = TokenSplit(mesh), Streams.share_out([8], mesh)

    def lay_out(*given: object) -> None:
        if fails == "before it":
            raise torch.OutOfMemoryError

    monkeypatch.setattr(split.tokens, "split", lay_out)
    seen = []
    try:
        with split.running(streams, 1, torch.device("cpu"), alone=0, kept=3):
            seen.append((split.streams, split.alone, split.kept, running_split()))
            if fails == "inside":
                raise torch.OutOfMemoryError
    except torch.OutOfMemoryError:
        assert fails != "not"
    assert seen == ([] if fails == "before it" else [(streams, 0, 3, split)])
    assert (split.streams, split.alone, split.kept, running_split()) == (None, None, 0, None)
