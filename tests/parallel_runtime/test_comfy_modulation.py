"""When the modulation of a ComfyUI network's blocks is ready before them, and when they compute it themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallel_runtime.mesh.mesh import single_rank_mesh
from parallel_runtime.networks import modulation
from parallel_runtime.networks.cut_blocks import cut_blocks
from parallel_runtime.networks.modulation import ReadyLayer
from parallel_runtime.networks.quantised_layers import joined
from parallel_runtime.networks.tables.blocks import Blocks
from parallel_runtime.networks.token_split import TokenSplit

WIDTH, TOKENS, DEPTH = 4, 5, 3
BLOCKS = Blocks("blocks", {"x": 1}, ("x",), alike=("c",), modulations={"c": ("mod.1", "no_such.1")})


class Clamps(nn.Linear):
    """Writes into what it is given, as ComfyUI's plain float8 layers do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.clamp(input, max=0.1, out=input))


Clamps.__qualname__ = "fp8_ops.Linear"


class Block(nn.Module):
    def __init__(self, layer: type[nn.Linear]) -> None:
        super().__init__()
        self.mod = nn.Sequential(nn.SiLU(), layer(WIDTH, 2 * WIDTH))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        scale, shift = self.mod(c)[:, None].chunk(2, dim=-1)
        return x * scale + shift


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for kind in (nn.Linear, Clamps, nn.Linear))

    def forward(self, x: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
        for block, c in zip(self.blocks, given, strict=True):
            x = block(x, c=c)
        return x


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[ReadyLayer]:
    """Layers that were computed before the blocks."""
    layers: list[ReadyLayer] = []
    own = modulation._own

    def noting(layer: ReadyLayer, given: torch.Tensor) -> torch.Tensor:
        layers.append(layer)
        return own(layer, given)

    monkeypatch.setattr(modulation, "_own", noting)
    return layers


def cut() -> tuple[Tower, TokenSplit, Any]:
    torch.manual_seed(0)
    tower = Tower().requires_grad_(False)
    split = TokenSplit(single_rank_mesh())
    x, one, other = torch.randn(2, TOKENS, WIDTH), torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    expected = {key: tower(x, list(given)) for key, given in {1: [one] * 3, 2: [one, other, one]}.items()}
    cut_blocks(tower, (BLOCKS,), split)
    return tower, split, (x, one, other, expected)


def ready(tower: Tower) -> list[bool]:
    return [block.mod[1].ready is not None for block in tower.blocks]


def test_all_blocks_have_it_from_the_first_on_and_nothing_stays_behind(computed):
    tower, split, (x, one, _, expected) = cut()
    names = list(tower.state_dict())
    split.modulation.begin(split.mesh)
    assert tower(x, [one] * DEPTH).equal(expected[1])
    assert ready(tower) == [True] * DEPTH
    assert computed == [block.mod[1] for block in tower.blocks]
    split.modulation.end()
    assert ready(tower) == [False] * DEPTH
    assert list(tower.state_dict()) == names
    assert tower(x, [one] * DEPTH).equal(expected[1])  # no forward began
    assert len(computed) == DEPTH


def test_a_block_that_is_given_another_tensor_computes_its_own(computed):
    tower, split, (x, one, other, expected) = cut()
    split.modulation.begin(split.mesh)
    assert tower(x, [one, other, one]).equal(expected[2])
    assert ready(tower) == [True, False, True]
    split.modulation.begin(None)
    assert tower(x, [one, other, one]).equal(expected[2])
    assert ready(tower) == [False] * DEPTH
    assert len(computed) == DEPTH


def test_a_layer_with_something_beside_it_computes_where_it_stands(computed):
    tower, split, (x, one, _, _) = cut()
    layer: Any = tower.blocks[1].mod[1]
    own = layer.forward
    layer.forward = lambda given: 2 * own(given)  # as ComfyUI's bypass of a LoRA puts it there
    expected = tower(x, [one] * DEPTH)
    split.modulation.begin(split.mesh)
    assert tower(x, [one] * DEPTH).equal(expected)
    assert ready(tower) == [True, False, True]
    assert layer not in computed


class Casts(nn.Linear):
    """Has its weight in another type than what it computes in, as a file of plain float8 has."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight.to(input.dtype), self.bias.to(input.dtype))


@pytest.mark.parametrize("how_many", [1, DEPTH])
def test_a_layer_whose_weight_needs_a_cast_computes_where_it_stands(computed, how_many):
    tower, split, (x, one, _, _) = cut()
    layers: list[Any] = [block.mod[1] for block in tower.blocks]
    for layer in layers[:how_many]:
        layer.__class__ = joined(ReadyLayer, Casts)
        layer.half()
    expected = tower(x, [one] * DEPTH)
    split.modulation.begin(split.mesh)
    assert tower(x, [one] * DEPTH).equal(expected)
    assert computed == layers[how_many:]
    assert ready(tower) == [False] * how_many + [True] * (DEPTH - how_many)
