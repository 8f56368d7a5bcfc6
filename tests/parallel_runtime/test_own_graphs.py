"""How many graphs blocks get: one for all sizes of a row, one for more rows; each model for itself; at the limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.utils
from torch import nn

from parallel_runtime.acceleration import compiler
from parallel_runtime.acceleration.compiled_methods import CompiledMethods
from parallel_runtime.acceleration.compiler import LIMIT, room, with_own_code
from parallel_runtime.attention.kernels import KERNELS
from parallel_runtime.exchange.grown_memory import PeerBuffers
from parallel_runtime.exchange.host_exchange import HostBuffers
from parallel_runtime.mesh.mesh import single_rank_mesh
from parallel_runtime.networks.block_attention import BlockAttention
from parallel_runtime.networks.compiled_blocks import CompiledBlocks
from parallel_runtime.networks.token_split import TokenSplit
from parallel_runtime.networks.traced import TRACED


class Block(nn.Module):
    """As blocks are: tokens, a modulation for each row, a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, shift: torch.Tensor, kind: int = 0) -> torch.Tensor:
        return self.layer(x + shift[:, None]) * (kind + 1)


@pytest.fixture
def graphs():
    """Counts graphs that were made."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def as_method(block: Block) -> Any:
    methods = CompiledMethods(plain=True, backend="eager")

    def call(*args: Any) -> torch.Tensor:
        with methods.compiling(), torch.no_grad():
            return methods.call(block.forward, args, {}, lambda given, _: [(given[0], 1)], lambda: True)

    return methods, call


def as_cut(block: Block) -> Any:
    compiled = CompiledBlocks(block, BlockAttention(KERNELS["sdpa"], TokenSplit(single_rank_mesh())), backend="eager")

    def call(*args: Any) -> torch.Tensor:
        with compiled.around_forward(), torch.no_grad():
            return compiled.run(block.forward, args, {}, lambda given, _: [(given[0], 1)])

    return compiled, call


def sizes(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, tokens, 8), torch.randn(rows, 8)


def test_64_sizes_and_every_batch_take_two_graphs(graphs):
    block = Block()
    compiled, call = as_method(block)
    for tokens in range(3, 67):
        given = sizes(1, tokens)
        assert torch.allclose(call(*given), Block.forward(block, *given), atol=1e-6)
    assert graphs() == 1
    joint, shift = torch.randn(1, 12, 8), torch.randn(1, 8)
    assert torch.allclose(call(joint[:, 5:], shift), Block.forward(block, joint[:, 5:], shift), atol=1e-6)
    assert graphs() == 1  # half of a joint tensor is as any other
    for rows in (2, 3, 4, 7):
        given = sizes(rows, 9 * rows)
        assert torch.allclose(call(*given), Block.forward(block, *given), atol=1e-6)
    assert graphs() == 2
    assert compiled.room == LIMIT - compiler._OF_A_CALL - 2


@pytest.mark.long
def test_graphs_of_other_models_do_not_count(graphs):
    models = [as_method(Block()) for _ in range(8)]
    for _, call in models:
        for kind in range(10):  # 80 in all, more than one function may have
            call(*sizes(1, 4), kind)
    assert graphs() == 80
    assert {methods.room for methods, _ in models} == {LIMIT - compiler._OF_A_CALL - 10}
    assert not any(methods.refused for methods, _ in models)


@pytest.mark.slow
def test_at_the_limit_a_request_runs_plain_blocks_on_all_ranks_and_the_log_says_so_once(graphs, caplog):
    block = Block()
    full, call = as_cut(block)
    for kind in range(LIMIT - compiler._OF_A_CALL):
        call(*sizes(1, 4), kind)
    other = as_cut(Block())[0]
    ranks = [full, other]
    offers = [each.offers() for each in ranks]
    agreed = {name: min(offer[name] for offer in offers) for name in offers[0]}
    assert list(agreed.values()) == [0]
    for _ in range(2):
        for each in ranks:
            each.go_on(agreed)
    assert [each.in_use for each in ranks] == [False, False]
    assert caplog.text.count("run as they are from now on") == 2  # one of each rank
    made = graphs()
    given = sizes(1, 5)
    assert torch.equal(call(*given, 99), Block.forward(block, *given, 99))
    assert graphs() == made
    ranks[0].go_on({})  # a call that repeats goes on as it began
    assert not ranks[0].in_use


def test_a_copy_of_a_function_does_the_same_and_has_graphs_of_its_own(graphs):
    def function(x: torch.Tensor, *, by: float = 2.0) -> torch.Tensor:
        return x * by

    one, other = with_own_code(function), with_own_code(function)
    x = torch.ones(3)
    assert torch.equal(one(x), 2 * x)
    assert torch.equal(other(x, by=3.0), 3 * x)
    torch.compile(one, backend="eager")(x)
    assert (room([one]), room([other])) == (
        LIMIT - compiler._OF_A_CALL - 1,
        LIMIT - compiler._OF_A_CALL,
    )


@pytest.mark.parametrize(("buffers", "through"), [(HostBuffers, True), (PeerBuffers, False), (None, False)])
def test_graphs_may_know_that_ranks_exchange_through_the_hosts_memory(buffers, through, monkeypatch):
    block = Block()
    compiled, call = as_cut(block)
    seen: list[bool] = []
    monkeypatch.setattr(compiled.methods, "call", lambda *given: seen.append(TRACED.through_host))
    compiled._attention.split.tokens.buffers = None if buffers is None else object.__new__(buffers)
    call(*sizes(1, 3))
    assert [*seen, TRACED.through_host] == [through, False]
