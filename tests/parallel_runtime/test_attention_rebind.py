"""Rebinding: our attention inside of diffusers' own processors, in one model, with a way back."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0, JointAttnProcessor2_0
from diffusers.models.transformers import transformer_flux

from parallel_runtime.attention import rebind
from parallel_runtime.attention.kernels import KERNELS
from parallel_runtime.errors import UnsupportedModelError
from tests.parallel_runtime.flux_forward import build_transformer, run

GIVEN = ((4, 3), 5, 2)


class Recorder:
    """Attention that notes the shapes it is called with."""

    def __init__(self):
        self.shapes = []

    def __call__(self, query, key, value, mask, scale):
        self.shapes.append(tuple(query.shape))
        return KERNELS["sdpa"].attend(query, key, value, mask, scale)


def attention_modules(transformer):
    return {name: module for name, module in transformer.named_modules() if hasattr(module, "processor")}


def test_every_attention_of_the_model_runs_through_ours_and_computes_the_same():
    transformer, recorder = build_transformer(layers=2), Recorder()
    expected = run(transformer, *GIVEN)
    rebind.apply(attention_modules(transformer), recorder)
    assert torch.equal(run(transformer, *GIVEN), expected)
    assert recorder.shapes == [(2, 17, 4, 32)] * 4


def test_what_ours_returns_is_what_the_model_uses():
    transformer = build_transformer()
    expected = run(transformer, *GIVEN)
    rebind.apply(attention_modules(transformer), lambda query, key, value, mask, scale: torch.zeros_like(query))
    assert (run(transformer, *GIVEN) - expected).abs().max() > 0.01


def test_another_model_of_the_process_is_not_touched():
    original = transformer_flux.dispatch_attention_fn
    rebound, other, recorder = build_transformer(), build_transformer(), Recorder()
    call = type(other.transformer_blocks[0].attn.processor).__call__
    rebind.apply(attention_modules(rebound), recorder)
    run(other, *GIVEN)
    assert recorder.shapes == []
    assert transformer_flux.dispatch_attention_fn is original
    assert type(other.transformer_blocks[0].attn.processor).__call__ is call


def test_blocks_of_a_kind_share_one_processor_class_and_so_one_compiled_graph():
    transformer = build_transformer(layers=3)
    rebind.apply(attention_modules(transformer), Recorder())
    classes = {type(module.processor) for module in attention_modules(transformer).values()}
    assert len(classes) == 1
    assert classes != {transformer_flux.FluxAttnProcessor}
    assert issubclass(classes.pop(), transformer_flux.FluxAttnProcessor)


@pytest.mark.slow
def test_a_rebound_block_compiles_without_a_graph_break():
    transformer = build_transformer()
    expected = run(transformer, *GIVEN)
    rebind.apply(attention_modules(transformer), lambda *given: KERNELS["sdpa"].attend(*given))
    torch.compiler.reset()
    for block in (transformer.transformer_blocks[0], transformer.single_transformer_blocks[0]):
        block.compile(fullgraph=True, backend="aot_eager")
    assert (run(transformer, *GIVEN) - expected).abs().max() < 1e-5


class Scaling:
    """Attention that reads a tensor of its own inside of the block's graph."""

    def __init__(self):
        self.scale = torch.ones(1)

    def __call__(self, query, key, value, mask, scale):
        return KERNELS["sdpa"].attend(query, key, value, mask, scale) * self.scale


def names_of_inputs(module, *given):
    """Of the graph that torch.compile traces, which are part of its key on disk."""
    names = []

    def note(graph, inputs):
        names.extend(node.name for node in graph.graph.nodes if node.op == "placeholder")
        return graph

    torch.compiler.reset()
    torch.compile(module, fullgraph=True, backend=note)(*given)
    return names


@pytest.mark.parametrize("kind", ["dispatched", "older"])
def test_what_a_graph_reads_has_the_same_name_in_every_model_and_process(kind):
    def build():
        if kind == "older":
            return Attention(query_dim=24, heads=3, dim_head=8, processor=AttnProcessor2_0()).requires_grad_(False)
        return build_transformer().single_transformer_blocks[0].attn

    modules = [build() for _ in range(2)]  # both at once, so that their namespaces have two addresses
    for module in modules:
        rebind.apply({"attn": module}, Scaling())
    width = 24 if kind == "older" else 128
    first, second = (names_of_inputs(module, torch.randn(1, 5, width)) for module in modules)
    assert first == second
    assert len(first) > 1


@pytest.mark.parametrize("compiled", [False, True])
def test_older_processors_that_call_pytorchs_attention_are_rebound_alike(compiled):
    torch.manual_seed(0)
    module = Attention(query_dim=24, heads=3, dim_head=8, processor=AttnProcessor2_0()).requires_grad_(False)
    hidden, recorder = torch.randn(2, 7, 24), Recorder()
    expected = module(hidden)
    rebind.apply({"attn": module}, recorder)
    if compiled:
        torch.compiler.reset()
        output = torch.compile(module, fullgraph=True, backend="aot_eager")(hidden)
    else:
        output = module(hidden)
    assert (output - expected).abs().max() < 1e-6
    assert recorder.shapes == [(2, 7, 3, 8)]


def test_the_joint_processor_attends_over_image_and_text_together():
    torch.manual_seed(0)
    joint = {"added_kv_proj_dim": 24, "context_pre_only": False, "processor": JointAttnProcessor2_0()}
    module = Attention(query_dim=24, heads=3, dim_head=8, **joint).requires_grad_(False)
    image, text, recorder = torch.randn(2, 7, 24), torch.randn(2, 4, 24), Recorder()
    expected = module(image, encoder_hidden_states=text)
    rebind.apply({"attn": module}, recorder)
    for ours, wanted in zip(module(image, encoder_hidden_states=text), expected, strict=True):
        assert (ours - wanted).abs().max() < 1e-6
    assert recorder.shapes == [(2, 11, 3, 8)]


class HandwrittenProcessor:
    """Computes attention without a name that could be rebound."""

    def __call__(self, attn, hidden_states, *args, **kwargs):
        return hidden_states


def test_a_processor_whose_attention_cannot_be_exchanged_is_refused_by_name_and_nothing_changes():
    transformer = build_transformer()
    transformer.single_transformer_blocks[0].attn.processor = HandwrittenProcessor()
    before = {name: module.processor for name, module in attention_modules(transformer).items()}
    with pytest.raises(UnsupportedModelError, match=r"single_transformer_blocks\.0\.attn uses HandwrittenProcessor"):
        rebind.apply(attention_modules(transformer), Recorder())
    assert all(module.processor is before[name] for name, module in attention_modules(transformer).items())


def test_causal_attention_and_dropout_are_refused():
    dispatch = rebind._dispatch(Recorder())
    query = torch.zeros(1, 2, 1, 8)
    for options in ({"is_causal": True}, {"dropout_p": 0.1}, {"attention_kwargs": {"window": 3}}):
        with pytest.raises(UnsupportedModelError):
            dispatch(query, query, query, **options)


def test_grouped_keys_are_spread_over_the_query_heads():
    query, key = torch.randn(1, 5, 6, 8), torch.randn(1, 5, 2, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in (query, key, key)), enable_gqa=True
    ).transpose(1, 2)
    assert torch.allclose(rebind._dispatch(Recorder())(query, key, key, enable_gqa=True), expected, atol=1e-6)
