"""What the passes make of a traced block: the operators they put in, and the same numbers."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel_runtime import switches
from parallel_runtime.acceleration import compiler, passes
from parallel_runtime.acceleration.passes import Passes, linear_gelu, linear_of_parts, linear_silu_gate
from parallel_runtime.attention.rotary import norm_rotate, rotate
from parallel_runtime.mesh.mesh import single_rank_mesh
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.diffusers.parallel_transformer import parallelize
from tests.parallel_runtime.flux_forward import build_transformer, relative_error, run


def operators(graph: fx.Graph) -> Counter[str]:
    """Our operators in a graph, by name."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return Counter(name.split(".")[1] for name in names if name.startswith("parallel_dit."))


def test_equal_rewrites_are_equal_so_that_blocks_share_a_graph():
    assert Passes() == Passes()
    assert hash(Passes()) == hash(Passes())


def test_the_key_of_the_compile_cache_changes_with_any_source_that_makes_graphs(tmp_path, monkeypatch):
    package = Path(passes.__file__).parent.parent
    for folder in ("acceleration", "attention", "exchange", "networks"):
        shutil.copytree(package / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(passes, "__file__", str(tmp_path / "acceleration" / "passes.py"))
    own = passes.source_hash.__wrapped__()
    assert own == passes.source_hash()
    for changed in (
        "acceleration/rotary_pass.py",
        "acceleration/compiler.py",
        "attention/rotary.py",
        "exchange/peer_exchange.py",
        "networks/diffusers/hunyuan_dit.py",
    ):
        source = tmp_path / changed
        text = source.read_bytes()
        source.write_bytes(text + b"\n")
        assert passes.source_hash.__wrapped__() != own
        source.write_bytes(text)
    assert passes.source_hash.__wrapped__() == own


def _traced_feed_forward() -> fx.GraphModule:
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(torch._C._nn.linear(x, self.linear.weight, self.linear.bias), approximate="tanh")

    return fx.symbolic_trace(Block())


def test_a_rewrite_that_fails_half_way_leaves_the_graph_as_it_was_and_says_so_in_one_line(monkeypatch, caplog):
    def fail(graph: fx.Graph) -> None:
        raise KeyError("example_value")

    module, x = _traced_feed_forward(), torch.randn(3, 8)
    before, expected = str(module.graph), module(x)
    monkeypatch.setattr(passes, "rewrite_rotations", fail)  # after the linear layers were rewritten
    Passes()(module.graph)
    assert str(module.graph) == before
    module.recompile()
    assert torch.equal(module(x), expected)
    assert [record.message for record in caplog.records] == [
        "Blocks are compiled without our passes: KeyError: 'example_value'"
    ]
    monkeypatch.undo()
    Passes()(module.graph)
    assert operators(module.graph) == {"linear_gelu": 1}


def compiled_as(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], float]:
    """What is compiled of a block of FLUX: the options it is given, and how far it is from the plain one."""
    given = []
    compile_function = torch.compile

    def spy(function: Any, **options: Any) -> Any:
        given.append(options.get("options"))
        return compile_function(function, fullgraph=True, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", spy)
    torch._dynamo.reset()
    transformer = build_transformer()
    expected = run(transformer, (4, 6), 12)
    output = run(parallelize(transformer, FLUX, single_rank_mesh(), compile=True), (4, 6), 12)
    torch._dynamo.reset()
    return given, relative_error(output, expected)


@pytest.mark.long
def test_switched_off_rewrites_are_no_option_of_what_is_compiled(monkeypatch):
    monkeypatch.setenv(switches.VARIABLE, "passes")
    given, error = compiled_as(monkeypatch)
    assert len(given) == 2
    assert not any("pre_grad_custom_pass" in options for options in given)
    assert error < 1e-5


@pytest.mark.parametrize(
    ("gone", "costs"),
    [
        ("torch._inductor.custom_graph_pass", "our passes"),
        ("torch.fx.experimental._config", "open sizes"),
    ],
)
def test_a_private_module_that_torch_renamed_costs_what_it_was_for_and_a_line(gone, costs, monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "parallel_runtime.acceleration.passes", raising=False)
    monkeypatch.delattr("parallel_runtime.acceleration.passes", raising=False)
    monkeypatch.setitem(sys.modules, gone, None)
    if costs == "our passes":
        assert compiler.our_passes() == {}
    else:
        assert len(compiler.settings({})) == 2  # of three
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(f"Blocks are compiled without {costs}: ")
    assert gone in line


def rewritten(function, *given: torch.Tensor, products: bool = False) -> Counter[str]:
    """Trace with torch.compile, rewrite, check the numbers, and return our operators, and `products` as they were."""
    found = []

    def backend(module: fx.GraphModule, example: list[torch.Tensor]):
        Passes()(module.graph)
        module.recompile()
        found.append(operators(module.graph))
        if products:
            found[0]["linear"] = sum(node.target is torch._C._nn.linear for node in module.graph.nodes)
        return module.forward

    torch._dynamo.reset()
    output = torch.compile(function, backend=backend, fullgraph=True)(*given)
    torch.testing.assert_close(output, function(*given))
    torch._dynamo.reset()
    return found[0]


def test_what_only_looks_alike_is_left_alone():
    x, weight, bias = torch.randn(2, 3, 8), torch.randn(6, 8), torch.randn(6)
    assert not rewritten(lambda: F.gelu(F.linear(x, weight, bias)))  # the exact GELU
    assert not rewritten(lambda: F.gelu(F.linear(x, weight), approximate="tanh"))  # no bias

    def twice():
        y = F.linear(x, weight, bias)
        return F.gelu(y, approximate="tanh") + y

    assert not rewritten(twice)
    assert not rewritten(lambda: F.linear(torch.cat([x, x], dim=1), weight, bias))  # joined along the tokens


def test_a_linear_layer_over_joined_inputs_is_the_sum_of_its_parts():
    x, y, weight, bias = torch.randn(2, 3, 8), torch.randn(2, 3, 4), torch.randn(6, 12), torch.randn(6)
    assert rewritten(lambda x, y: F.linear(torch.cat([x, y], dim=-1), weight, bias), x, y) == {"linear_of_parts": 1}


class Gated(nn.Module):
    """As a single block of FLUX.2 without its attention: one product for what is attended, and for a gate by SiLU."""

    def __init__(self, bias: bool = False):
        super().__init__()
        self.front, self.back, self.act = nn.Linear(8, 24, bias=bias), nn.Linear(16, 8, bias=bias), nn.SiLU()

    def forward(self, x: torch.Tensor, again: bool = False) -> torch.Tensor:
        attended, hidden = torch.split(self.front(x), [8, 16], dim=-1)
        one, other = hidden.chunk(2, dim=-1)
        made: torch.Tensor = self.back(torch.cat((attended, self.act(one) * other), 2))
        return made + hidden.mean() if again else made


def test_a_product_and_the_gate_behind_it_are_one_operator_where_nothing_else_reads_it():
    x = torch.randn(2, 5, 8)
    assert rewritten(Gated(), x) == {"linear_silu_gate": 1, "linear_of_parts": 1}
    assert rewritten(Gated(bias=True), x, products=True) == {"linear_of_parts": 1, "linear": 1}  # as it was
    again = Gated()
    assert not rewritten(lambda x: again(x, True), x)


@pytest.mark.parametrize("operator", ["linear_gelu", "linear_silu_gate", "linear_of_parts", "norm_rotate", "rotate"])
def test_operators_tell_torch_compile_the_shapes_that_they_return(operator):
    x, weight, bias = torch.randn(2, 3, 8), torch.randn(6, 8), torch.randn(6)
    heads, cos, sin = torch.randn(2, 3, 4, 8), torch.randn(3, 8), torch.randn(3, 8)
    function, given = {
        "linear_gelu": (linear_gelu, (x, weight, bias)),
        "linear_silu_gate": (linear_silu_gate, (x, weight)),
        "linear_of_parts": (linear_of_parts, ([x[..., :2], x[..., 2:]], weight, bias)),
        "norm_rotate": (norm_rotate, ([heads], [heads], [torch.ones(8)], [torch.ones(8)], 1e-6, cos, sin)),
        "rotate": (rotate, (heads, cos, sin)),
    }[operator]
    torch.library.opcheck(function, given, test_utils=("test_schema", "test_faketensor"))


def test_rotation_is_that_of_diffusers():
    from diffusers.models.embeddings import apply_rotary_emb

    x, cos, sin = torch.randn(2, 5, 3, 8), torch.randn(5, 8), torch.randn(5, 8)
    assert torch.equal(rotate(x, cos, sin), apply_rotary_emb(x, (cos, sin), sequence_dim=1))


def _few_keys(device: str) -> tuple[list[torch.Tensor], ...]:
    queries, keys = [torch.randn(2, 5, 6, 8, device=device)], [torch.randn(2, 5, 2, 8, device=device)]
    weights = torch.rand(2, 8, device=device)
    cos, sin = (torch.rand(5, 4, device=device).repeat_interleave(2, 1) for _ in range(2))
    return queries, keys, [weights[0]], [weights[1]], [cos], [sin]


def test_keys_of_fewer_heads_than_queries_are_made_in_the_shape_that_is_promised():
    queries, keys, query_weights, key_weights, (cos,), (sin,) = _few_keys("cpu")
    found = norm_rotate(queries, keys, query_weights, key_weights, 1e-6, cos, sin)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = [[mode.from_tensor(each) for each in parts] for parts in (queries, keys)]
        promised = torch.ops.parallel_dit.norm_rotate.default(*given, query_weights, key_weights, 1e-6, cos, sin)
    assert [each.shape for each in promised] == [each.shape for each in found]
    assert found[1].shape == (2, 5, 2, 8)


@pytest.mark.gpu
def test_the_kernel_rotates_keys_of_fewer_heads_than_queries():
    *parts, (cos,), (sin,) = _few_keys("cuda")
    found = norm_rotate(*parts, 1e-6, cos, sin)
    *parts, cos, sin = ([x.cpu() for x in each] for each in (*parts, [cos], [sin]))
    wanted = norm_rotate(*parts, 1e-6, cos[0], sin[0])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_gates_as_silu_does_and_rounds_once(dtype):
    x, weight = torch.randn(2, 77, 64, device="cuda").to(dtype), torch.randn(2 * 1100, 64, device="cuda").to(dtype)
    one, other = F.linear(x, weight).float().chunk(2, -1)
    found = linear_silu_gate(x, weight)
    assert found.is_contiguous()
    torch.testing.assert_close(found, (F.silu(one) * other).to(dtype))
    assert linear_silu_gate(x[:, :0], weight).shape == (2, 0, 1100)
