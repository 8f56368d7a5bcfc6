"""ComfyUI's own networks with their blocks compiled, and with the fastest kernel: against the same as they are."""

from __future__ import annotations

import sys
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from parallel_runtime.acceleration.compiled_methods import CompiledMethods
from parallel_runtime.acceleration.rotary_pass import default_epsilon
from parallel_runtime.attention.kernels import AttentionKernel
from parallel_runtime.mesh.mesh import single_rank_mesh
from parallel_runtime.networks.attention_operator import (
    FUNCTIONS,
    attending,
    block_attention,
    in_order,
    through_operator,
)
from parallel_runtime.networks.block_attention import BlockAttention, Suited
from parallel_runtime.networks.token_split import TokenSplit
from parallel_runtime.networks.traced import TRACED
from tests.comfyui_checkout import HOW, find_comfyui
from tests.comfyui_networks.catalogue import TINY
from tests.host.find_host import find_gguf_pack
from tests.ranks import run_ranks

COMFYUI = find_comfyui()
with_comfyui = pytest.mark.skipif(COMFYUI is None, reason=HOW)
NOT_COMPILED = {
    "hidream o1": "writes into a tensor that is given",
    "hunyuan3d 2.1": "counts the tokens of each expert on the host",
    "multitalk": "its patch runs beside the network",
}
"""Networks with blocks that torch.compile cannot take as one graph."""
SEVERAL = {"sd3.5 medium", "boogu", "ltx-2"}
"""Networks whose blocks exchange more than once."""
REWRITTEN = ["flux", "flux2", "chroma", "krea 2", "qwen-image", "z-image"]
"""Networks with the blocks that our passes are written for."""
IN_CI = {"hunyuan3d 2.1", "multitalk", "sd3.5 medium", "ltx-2", "minimax h3", "wan t2v"}
"""Two that cannot be compiled beside that of a test below, two of several exchanges, and two with one that official
templates use."""
PARTS = 6
"""Of the rest of the table, which takes a quarter of an hour."""


def compare(ranks: int, names: list[str], backend: str) -> list[dict[str, Any]]:
    """Assert that compiled blocks compute what the blocks do."""
    arguments = {"comfyui": str(COMFYUI), "names": names, "backend": backend}
    found = run_ranks(ranks, "tests.comfyui_networks.compiled:compare", arguments)
    for each in found:
        differences = {
            (name, call): diff for name, calls in each["differences"].items() for call, diff in calls.items()
        }
        assert set(each["differences"]) == set(names)
        assert differences
        assert not {call: diff for call, diff in differences.items() if not diff < 1e-5}
        assert {name for name, refused in each["refused"].items() if refused} <= set(NOT_COMPILED)
    return found


@with_comfyui
@pytest.mark.slow
def test_compiled_blocks_compute_what_they_do_and_one_that_cannot_be_compiled_runs_as_it_is():
    for found in compare(2, ["pixart", "hidream o1"], "eager"):
        assert found["graphs"]["pixart"] > 0
        assert list(found["refused"]["hidream o1"]) == ["TransformerBlock.forward"]
        said = [line for line in found["warnings"] if "cannot be compiled" in line]
        assert len(said) == 1
        assert said[0].startswith("TransformerBlock.forward runs as it is, as it cannot be compiled: ")


@with_comfyui
@pytest.mark.slow
def test_a_forward_that_repeats_is_recorded_and_follows_its_values():
    for found in run_ranks(2, "tests.comfyui_networks.compiled:record", {"comfyui": str(COMFYUI), "name": "flux"}):
        assert max(found["differences"]) == 0.0
        assert found["replays"] == 3  # to try it, and the fourth and fifth call
        assert found["read"] == 1  # how the uneven shares of the double blocks lie; those of the single ones are even


def compare_classes(names: list[str]) -> None:
    """Assert it of networks that no rewrite is written for, and that each was compiled but for those that cannot be."""
    for found in compare(2, names, "rewritten"):
        assert {name for name, refused in found["refused"].items() if refused} == set(NOT_COMPILED) & set(names)
        assert all(found["graphs"][name] for name in set(names) - set(NOT_COMPILED))
        for name in SEVERAL & set(names):  # not on one rank alone
            assert len(set(found["attended"][name].values())) == 1
            assert min(found["attended"][name].values()) > 0


@with_comfyui
@pytest.mark.slow
def test_classes_compute_compiled_what_they_do():
    compare_classes(sorted(IN_CI))


@with_comfyui
@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_every_class_computes_compiled_what_it_does(part):
    compare_classes(sorted(set(TINY) - {*IN_CI, *REWRITTEN})[part::PARTS])


@with_comfyui
@pytest.mark.long
def test_blocks_that_are_rewritten_compute_what_they_do():
    for found in compare(2, REWRITTEN, "rewritten"):
        names = ("linear_gelu", "norm_rotate", "block_attention_of_layers")
        assert {f"parallel_dit.{name}.default" for name in names} <= set(found["operators"])
        assert not [line for line in found["warnings"] if "passes" in line]


@with_comfyui
@pytest.mark.slow
@pytest.mark.parametrize("name", ["z-image", pytest.param("flux", marks=pytest.mark.long)])
def test_what_the_compiler_makes_of_blocks_computes_what_they_do(name):
    compare(2, [name], "inductor")


def test_exchanges_that_need_nothing_of_each_other_keep_their_order_in_a_graph(monkeypatch):
    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, other = (through_operator(named, each, each, each, 2) for each in (x, 2 * x))
            return other + one

    def named() -> None:
        """Stands for one of ComfyUI's attention functions."""

    # Of that module from the beginning: torch 2.15's compiler does not see that a function was said to be of another.
    named = FunctionType(named.__code__, {"__name__": FUNCTIONS})
    module: Any = SimpleNamespace(named=named)
    seen: list[list[Any]] = []

    def look(graph: Any, inputs: Any) -> Any:
        calls = [node for node in graph.graph.nodes if node.target is torch.ops.parallel_dit.block_attention.default]
        seen.append([calls.index(node.args[-1]) if node.args[-1] in calls else None for node in calls])
        return graph.forward

    x = torch.ones(1, 4, 6)
    monkeypatch.setitem(sys.modules, FUNCTIONS, module)  # and not patch.dict: what is imported meanwhile has to stay
    with attending(lambda function, where, q, *args, **kwargs: q + 1):
        for forward in (in_order(Two.forward), Two.forward):
            torch._dynamo.reset()
            made = torch.compile(forward, backend=look, fullgraph=True)(Two(), x)
            assert made.equal(3 * x + 2)
    assert seen == [[None, 0], [None, None]]
    assert (TRACED.in_order, TRACED.last) == (False, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_norm_without_an_epsilon_has_that_of_this_torch(dtype):
    x = torch.full((1, 4), 0.03, dtype=dtype)
    norm = F.rms_norm(x, (4,), None, None).float()
    assert (norm - F.rms_norm(x.float(), (4,), None, default_epsilon(dtype))).abs().max() < 0.01


class Twice(torch.nn.Module):
    """Breaks where it is told to."""

    def forward(self, x: torch.Tensor, breaks: bool = False) -> torch.Tensor:
        if breaks:
            torch._dynamo.graph_break()
        return 2 * x


def test_a_forward_that_cannot_be_compiled_runs_as_it_is_with_one_line(caplog):
    module, methods = Twice(), CompiledMethods(plain=True, backend="eager")
    x = torch.ones(1, 3, 2)

    def call(breaks: bool, may_repeat: bool = True) -> torch.Tensor:
        with methods.compiling():
            return methods.call(
                module.forward, (x, breaks), {}, lambda args, kwargs: [(args[0], 1)], lambda: may_repeat
            )

    assert call(False).equal(2 * x)
    assert not methods.refused
    with pytest.raises(torch._dynamo.exc.Unsupported):  # others have had what it sent
        call(True, may_repeat=False)
    assert call(True).equal(2 * x)
    assert call(False).equal(2 * x)
    own = [record for record in caplog.records if record.name.startswith("parallel_runtime")]
    assert [record.getMessage().partition(":")[0] for record in own] == [
        "Twice.forward runs as it is, as it cannot be compiled"
    ]


def test_a_compiler_that_fails_costs_no_picture(caplog):
    def fail(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    methods = CompiledMethods(plain=False, backend=fail)  # type: ignore[arg-type]
    x = torch.ones(1, 3, 2)
    for _ in range(2):
        with methods.compiling():
            assert methods.call(Twice().forward, (x,), {}, lambda args, kwargs: [], lambda: True).equal(2 * x)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("parallel_runtime")]
    assert "no compiler here" in line


def test_a_second_number_of_tokens_needs_no_new_graph_and_a_quantised_network_has_one_for_each():
    made: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        made.append(1)
        return graph.forward

    for plain, graphs in ((True, 1), (False, 3)):
        torch._dynamo.reset()
        made.clear()
        methods = CompiledMethods(plain, backend=count)  # type: ignore[arg-type]
        for tokens in (5, 6, 7):
            x = torch.ones(1, tokens, 2)
            with methods.compiling():
                methods.call(Twice().forward, (x,), {}, lambda args, kwargs: [(args, 1)], lambda: True)
        assert len(made) == graphs


def attention_pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **given: Any) -> torch.Tensor:
    """As ComfyUI's, of that name."""
    own = [each if given["skip_reshape"] else each.unflatten(2, (heads, -1)).transpose(1, 2) for each in (q, k, v)]
    made = F.scaled_dot_product_attention(*own, attn_mask=given["mask"], scale=given.get("scale"), enable_gqa=True)
    return made if given["skip_output_reshape"] else made.transpose(1, 2).flatten(2)


def attention_sage(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Another one, which the artist has chosen."""
    return attention_pytorch(*args, **kwargs)


class Counted:
    """A kernel that counts its calls."""

    def __init__(self, fails: bool = False):
        self.calls = 0
        self.kernel = AttentionKernel("counted", self.attend)
        self._fails = fails

    def attend(self, query: torch.Tensor, key: Any, value: Any, mask: Any, scale: float | None) -> torch.Tensor:
        self.calls += 1
        if self._fails:
            raise RuntimeError("No available kernel.\nmore")
        own = [each.transpose(1, 2) for each in (query, key, value)]
        return F.scaled_dot_product_attention(*own, attn_mask=mask, scale=scale).transpose(1, 2)


def call_attention(attention: BlockAttention, function: Any = attention_pytorch, **changes: Any) -> torch.Tensor:
    given = {"heads": 4, "skip_reshape": False, "skip_output_reshape": False, "mask": None, "width": 64} | changes
    heads, width = given["heads"], given.pop("width")
    generator = torch.Generator().manual_seed(0)
    keys = given.pop("keys", heads)

    def draw(heads: int) -> torch.Tensor:
        shape = (1, heads, 600, width) if given["skip_reshape"] else (1, 600, heads * width)
        return torch.randn(shape, generator=generator)

    q, k, v = draw(heads), draw(keys), draw(keys)
    expected = function(q, k, v, **given)
    found = attention(function, q, k, v, **given)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-5
    return found


def test_the_kernel_attends_on_one_rank_where_it_can_and_elsewhere_comfyuis_own_does(caplog):
    split = TokenSplit(single_rank_mesh())
    layouts = [{"skip_reshape": a, "skip_output_reshape": b} for a in (False, True) for b in (False, True)]
    kernel = Counted()
    attention = BlockAttention(kernel.kernel, split, Suited(torch.float32, 64, chosen=False))
    for layout in layouts:
        call_attention(attention, **layout)
    call_attention(attention, scale=0.3)
    assert kernel.calls == 5
    call_attention(attention, mask=torch.zeros(1, 1, 600, 600))
    call_attention(attention, width=32)
    call_attention(attention, attention_sage)
    call_attention(attention, skip_reshape=True, keys=2)  # heads of keys that serve several of queries
    assert kernel.calls == 5
    call_attention(BlockAttention(kernel.kernel, split, Suited(torch.float32, 64, chosen=True)), attention_sage)
    assert kernel.calls == 6
    failing = Counted(fails=True)
    attention = BlockAttention(failing.kernel, split, Suited(torch.float32, 64, chosen=False))
    call_attention(attention)
    call_attention(attention)
    assert failing.calls == 1
    assert caplog.messages == ["Attention is ComfyUI's own, as counted cannot: No available kernel."]


@with_comfyui
@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
def test_the_operator_has_the_layout_that_graphs_are_told(skip_reshape, skip_output_reshape, monkeypatch):
    import sys

    monkeypatch.setitem(
        sys.modules, "comfy.ldm.modules.attention", SimpleNamespace(attention_pytorch=attention_pytorch)
    )
    attention = BlockAttention(Counted().kernel, TokenSplit(single_rank_mesh()))

    def run(device: str) -> torch.Tensor:
        shape = (2, 3, 5, 8) if skip_reshape else (2, 5, 24)
        q, k, v = (torch.ones(shape, device=device) for _ in range(3))
        with attending(attention.at):
            return block_attention(
                q, k, v, 3, None, "attention_pytorch", "", None, skip_reshape, skip_output_reshape, None, False, True
            )

    made, told = run("cpu"), run("meta")
    assert made.shape == told.shape
    assert made.stride() == told.stride()
    assert TRACED.where == ""
    with pytest.raises(ValueError, match="not known"):
        through_operator(attention_sage, made, made, made, 3, dropout=0.5)


@with_comfyui
@pytest.mark.slow
def test_blocks_run_compiled_by_the_same_graphs_where_functions_of_nodes_act_between_them():
    for found in run_ranks(2, "tests.comfyui_networks.compiled:functions", {"comfyui": str(COMFYUI)}):
        assert all(each["difference"] < 1e-5 for each in found.values())
        assert found["between blocks"]["changed"] > 0.1
        compiled = {where: (each["compiled"], each["graphs"]) for where, each in found.items()}
        # Of four blocks, each called twice, one is left out.
        assert compiled == {"nowhere": (8, 2), "between blocks": (6, 0), "inside of blocks": (0, 0)}


@with_comfyui
@pytest.mark.slow
def test_gguf_layers_are_traced_into_a_graph_with_a_lora_beside_them_too():
    pytest.importorskip("gguf")
    assert COMFYUI is not None
    if (pack := find_gguf_pack(COMFYUI)) is None:
        pytest.skip("ComfyUI-GGUF is not there: set COMFYUI_GGUF_PATH to it")
    arguments = {"comfyui": str(COMFYUI), "pack": str(pack), "kinds": ["Q8_0", "Q4_0", "Q4_K", "Q6_K"]}
    (found,) = run_ranks(1, "tests.comfyui_networks.gguf_graphs:compare", arguments)
    assert {(*each["alike"], *each["graphs"], *each["refused"]) for each in found.values()} == {
        (True, True, True, 1, 2)
    }


@with_comfyui
@pytest.mark.slow
def test_quantised_layers_are_operators_of_a_graph_and_compute_what_comfyui_does():
    (found,) = run_ranks(1, "tests.comfyui_networks.quantised:compare", {"comfyui": str(COMFYUI)})
    rounded = {"float8_e4m3fn", "float8_e4m3fn, scaled input"}
    for name, each in found.items():
        assert each["quantised"] == 4
        assert max(each["differences"]) == 0.0, name
        if "to come" in name:  # an argument that no operator knows
            assert (len(each["refused"]), each["operators"]) == (1, [])
            continue
        assert each["refused"] == []
        assert each["graphs"] == 1  # for two blocks, and two numbers of tokens
        assert each["graphs of patches"] == 0
        operator = "float8_layer" if name in rounded else "int8_layer" if "host" in name else "quantised_layer"
        second = "activated_layer" if "activated" in name else operator
        operator = second if "added" in name else operator
        assert each["operators"] == [f"parallel_dit.{kind}.default" for kind in (operator, second)]
