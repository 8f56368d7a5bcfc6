"""Templates are judged as the server would run them, by tables that agree with what the pool refuses."""

from __future__ import annotations

import pytest

from benchmarks.template_coverage import file_names
from benchmarks.template_coverage.file_names import find_runner
from benchmarks.template_coverage.installed import installed_version, read_templates
from benchmarks.template_coverage.judgement import judge
from benchmarks.template_coverage.loops import step_reasons
from benchmarks.template_coverage.models_page import (
    EXECUTED_PAGE,
    PAGE,
    families_of,
    version_of,
    write_executed,
    write_families,
    write_page,
)
from benchmarks.template_coverage.newer import NEWEST_RUN, NODES
from benchmarks.template_coverage.node_types import NODE_TYPES, SAMPLERS, Effect, NodeType
from benchmarks.template_coverage.prompt_graph import read_prompt
from benchmarks.template_coverage.totals import judge_all, known_here, reason_totals, total
from nodes.transportable import option_obstacles, weight_obstacles
from parallel_runtime.networks.tables.comfyui import NETWORKS
from tests.host.find_host import find_checkout
from tests.host.older_host import name_version
from tests.template_graphs import (
    BYPASS,
    GRAPH_INPUT,
    NEVER,
    SKIPPED,
    SKIPS,
    Graph,
    add_lora,
    add_skip,
    load,
    sample,
    save,
)


@pytest.fixture(autouse=True)
def a_node_that_does_not_convert(monkeypatch):
    """Unless its scale is zero."""
    kind = NodeType(Effect.WEIGHTS, idle=lambda widgets: widgets.get("scale") == 0)
    monkeypatch.setitem(NODE_TYPES, SKIPS, kind)


def found(graph: Graph, **subgraphs: Graph):
    return judge(read_prompt(graph.workflow(**subgraphs)))


def reasons(graph: Graph, **subgraphs: Graph) -> list[str]:
    judgement = found(graph, **subgraphs)
    assert judgement is not None
    return [str(reason) for reason in judgement.reasons]


def test_a_loader_and_a_sampler_convert():
    graph = Graph()
    save(graph, sample(graph, load(graph)))
    judgement = found(graph)
    assert judgement.converts
    assert judgement.files == ("z_image_bf16.safetensors",)


def test_what_no_output_asks_for_does_not_count():
    graph = Graph()
    sample(graph, load(graph))
    assert found(graph) is None


def test_a_lora_converts():
    graph = Graph()
    save(graph, sample(graph, add_lora(graph, load(graph))))
    assert found(graph).converts


def test_muted_nodes_take_their_links_with_them():
    graph = Graph()
    save(graph, sample(graph, load(graph)))
    # A second stage whose loader is muted, and a third that is muted itself.
    save(graph, sample(graph, add_skip(graph, load(graph, "other.safetensors", mode=NEVER), mode=BYPASS)))
    save(graph, sample(graph, add_skip(graph, load(graph, "third.safetensors")), mode=NEVER))
    judgement = found(graph)
    assert judgement.converts
    assert judgement.files == ("z_image_bf16.safetensors",)


def test_a_bypassed_node_hands_through_by_slot_and_then_by_type():
    graph = Graph()
    model, other = load(graph), load(graph, "other.safetensors")
    patch = graph.add("CLIPLoader", "CLIP")
    inputs = {"clip": ("CLIP", patch), "model": ("MODEL", model), "second": ("MODEL", other)}
    by_type = graph.add("LoraLoader", "MODEL", BYPASS, **inputs)
    merged, _ = graph.add("ModelMergeSimple", "MODEL MODEL", BYPASS, one=("MODEL", model), two=("MODEL", other))
    save(graph, sample(graph, by_type))
    assert found(graph).files == ("z_image_bf16.safetensors",)
    save(graph, sample(graph, (merged, 1)))
    assert found(graph).files == ("z_image_bf16.safetensors", "other.safetensors")


def test_reroutes_are_the_frontends_alone():
    graph = Graph()
    through = graph.add("Reroute", "MODEL", **{"": ("*", add_skip(graph, load(graph)))})
    save(graph, sample(graph, through))
    assert reasons(graph) == [SKIPPED]


def _picture(strength: float = 1.0) -> Graph:
    """A subgraph with everything: (scale of a guidance, latent) -> latent."""
    inner = Graph([("latent", "LATENT"), ("strength", "FLOAT")], ["LATENT"])
    skip = inner.add(
        SKIPS, "MODEL", 0, ["9", "", strength], ["scale"],
        model=("MODEL", load(inner)), scale=("FLOAT", (GRAPH_INPUT, 1)),
    )  # fmt: skip
    inner.give(0, sample(inner, skip, latent=(GRAPH_INPUT, 0)))
    return inner


@pytest.mark.parametrize(("outside", "converts"), [([0], True), ([0.5], False), ([], False)])
def test_a_promoted_widget_has_its_outer_value(outside, converts):
    graph = Graph()
    save(graph, graph.add("picture", "LATENT", widgets=outside, strength=("FLOAT", None)))
    assert found(graph, picture=_picture()).converts is converts


def test_each_use_of_a_subgraph_has_its_own_values():
    graph = Graph()
    first = graph.add("picture", "LATENT", widgets=[0])
    save(graph, graph.add("picture", "LATENT", widgets=[1], latent=("LATENT", first)))
    prompt = read_prompt(graph.workflow(picture=_picture()))
    scales = {path: node.widgets["scale"] for path, node in prompt.items() if node.kind == SKIPS}
    assert scales == {(1, 2): 0, (2, 2): 1}
    # The second one starts from the first one's latent, three levels of ids apart.
    assert prompt[(2, 3)].links["latent_image"].node == (1, 3)


def test_subgraphs_inside_of_subgraphs_are_opened():
    outer = Graph([("strength", "FLOAT")], ["LATENT"])
    inside = outer.add(
        "picture", "LATENT", wired=["strength"], latent=("LATENT", None), strength=("FLOAT", (GRAPH_INPUT, 0))
    )
    outer.give(0, inside)
    graph = Graph()
    save(graph, graph.add("outer", "LATENT", widgets=[0]))
    assert found(graph, outer=outer, picture=_picture()).converts
    graph = Graph()
    save(graph, graph.add("outer", "LATENT", widgets=[1]))
    assert reasons(graph, outer=outer, picture=_picture()) == [SKIPPED]


def test_a_subgraph_can_be_muted_or_bypassed():
    graph = Graph()
    save(graph, sample(graph, load(graph)))
    save(graph, graph.add("picture", "LATENT", NEVER))
    plain = sample(graph, load(graph))
    save(graph, graph.add("picture", "LATENT", BYPASS, latent=("LATENT", plain)))
    assert found(graph, picture=_picture()).converts


@pytest.mark.parametrize("mode", [0, NEVER, BYPASS])
def test_nothing_runs_in_a_subgraph_that_is_muted_or_bypassed(mode):
    inner = Graph()
    save(inner, sample(inner, load(inner)))
    graph = Graph()
    graph.add("saved", mode=mode)
    assert (found(graph, saved=inner) is None) is (mode != 0)


@pytest.mark.parametrize("mode", [0, NEVER])
def test_a_muted_subgraph_inside_of_another_gives_nothing(mode):
    outer = Graph((), ["LATENT"])
    outer.give(0, outer.add("picture", "LATENT", mode))
    graph = Graph()
    save(graph, graph.add("outer", "LATENT"))
    assert (found(graph, outer=outer, picture=_picture()) is None) is (mode == NEVER)


def test_a_subgraph_in_itself_is_an_error():
    inner = Graph((), ["LATENT"])
    inner.give(0, inner.add("picture", "LATENT"))
    graph = Graph()
    save(graph, graph.add("picture", "LATENT"))
    with pytest.raises(ValueError, match="contains itself"):
        found(graph, picture=inner)


@pytest.mark.parametrize(("value", "expected"), [(False, []), (True, [SKIPPED])])
def test_a_switch_asks_for_what_it_has_chosen(value, expected):
    graph = Graph()
    model = load(graph)
    chosen = graph.add("PrimitiveBoolean", "BOOLEAN", widgets=[value])
    switch = graph.add(
        "ComfySwitchNode", "MODEL", widgets=[not value],
        on_false=("MODEL", model), on_true=("MODEL", add_skip(graph, model)), switch=("BOOLEAN", chosen),
    )  # fmt: skip
    save(graph, sample(graph, switch))
    assert reasons(graph) == expected


def test_a_switch_that_is_computed_may_choose_either():
    graph = Graph()
    model = load(graph)
    computed = graph.add("ComfyMathExpression", "BOOLEAN")
    switch = graph.add(
        "ComfySwitchNode", "MODEL", widgets=[False],
        on_false=("MODEL", model), on_true=("MODEL", add_skip(graph, model)), switch=("BOOLEAN", computed),
    )  # fmt: skip
    save(graph, sample(graph, switch))
    assert reasons(graph) == [SKIPPED]


def test_two_loaders_are_judged_both():
    graph = Graph()
    high = sample(graph, add_skip(graph, load(graph, "high.safetensors")))
    patched = graph.add("AnotherNode", "MODEL", model=("MODEL", add_skip(graph, load(graph, "low.safetensors"))))
    save(graph, sample(graph, patched, latent=high))
    judgement = found(graph)
    assert judgement.files == ("high.safetensors", "low.safetensors")
    assert [reason.node for reason in judgement.reasons] == [SKIPS, "AnotherNode"]
    assert judgement.first.node == SKIPS


def test_a_model_that_is_not_sampled_keeps_its_loader():
    graph = Graph()
    sam = graph.add("ImageOnlyCheckpointLoader", "MODEL", widgets=["sam3.safetensors"])
    mask = graph.add("SAM3_Detect", "MASK", model=("MODEL", sam))
    graph.add("SaveImage", images=("IMAGE", mask))
    assert found(graph) is None
    save(graph, sample(graph, load(graph)))
    judgement = found(graph)
    assert judgement.converts
    assert judgement.files == ("z_image_bf16.safetensors",)


@pytest.mark.parametrize("gives", ["MODEL", ""])
def test_a_node_that_is_not_known_is_a_reason(gives):
    graph = Graph()
    model = load(graph)
    unknown = graph.add("NodeOfTomorrow", f"{gives} IMAGE".strip(), model=("MODEL", model))
    if gives:
        save(graph, sample(graph, unknown))
    else:
        graph.add("SaveImage", images=("IMAGE", unknown))
    assert reasons(graph) == ["NodeOfTomorrow: not known"]


def test_loaders_that_ours_do_not_replace_are_named():
    graph = Graph()
    save(graph, sample(graph, graph.add("UnetLoaderGGUF", "MODEL", widgets=["a.gguf"])))  # ours does
    save(graph, sample(graph, graph.add("LoaderOfTomorrow", "MODEL")))
    save(graph, sample(graph, load(graph, "a_bf16.safetensors", "fp8_e4m3fn")))
    save(graph, sample(graph, load(graph, "a_fp8_e4m3fn.safetensors", "fp8_e4m3fn")))
    assert reasons(graph) == ["LoaderOfTomorrow: not known"]


def test_what_goes_into_a_guider_is_judged_too():
    graph = Graph()
    prompt = graph.add("ConditioningOfTomorrow", "CONDITIONING")
    guider = graph.add("CFGGuider", "GUIDER", model=("MODEL", load(graph)), positive=("CONDITIONING", prompt))
    loop = graph.add("SamplerARVideo", "SAMPLER")
    save(
        graph,
        graph.add("SamplerCustomAdvanced", "LATENT", guider=("GUIDER", guider), sampler=("SAMPLER", loop)),
    )
    assert {text.partition(":")[0] for text in reasons(graph)} == {"ConditioningOfTomorrow", "SamplerARVideo"}


def steps_of(graph: Graph) -> tuple[str, ...]:
    return step_reasons(read_prompt(graph.workflow()))


def test_loops_run_in_the_pool_unless_the_graph_acts_between_steps():
    graph = Graph()
    save(graph, sample(graph, add_lora(graph, load(graph))))
    assert steps_of(graph) == ()
    graph = Graph()
    save(graph, sample(graph, graph.add("EasyCache", "MODEL", model=("MODEL", load(graph)))))
    assert steps_of(graph) == ("a wrapper of a node (easycache)",)


def test_guiders_samplers_and_families_say_why_their_loops_go_step_by_step():
    graph = Graph()
    guider = graph.add("DualModelGuider", "GUIDER", model=("MODEL", load(graph)))
    loop = graph.add("VOIDSampler", "SAMPLER")
    inputs = {"guider": ("GUIDER", guider), "sampler": ("SAMPLER", loop)}
    save(graph, graph.add("SamplerCustomAdvanced", "LATENT", **inputs))
    two = "a guider of two models, where a loop in the workers has one"
    assert set(steps_of(graph)) == {two, "the sampler VOIDSampler"}
    graph = Graph()
    masked = graph.add("SetLatentNoiseMask", "LATENT")
    save(graph, sample(graph, load(graph, "cosmos.safetensors"), latent=masked))
    assert steps_of(graph) == ("the noise mask of Cosmos",)


def _weights(**changes):
    nothing = {"weight_wrappers": {}, "object_patches": (), "injections": {}, "wrappers": {}}
    return weight_obstacles(**(nothing | changes))


def test_effects_are_refused_as_the_pool_refuses_them():
    def function():
        pass

    refused = {
        Effect.OPTION: [option_obstacles({"ar_state": {"start_frame": 0}})],
        Effect.ATTENTION: [option_obstacles({"optimized_attention_override": function})],
    }
    for effect, answers in refused.items():
        assert all(answers), f"the pool takes {effect.name} now: its nodes convert"
    wrappers = {"diffusion_model": {"key": [function]}}
    assert not option_obstacles({"wrappers": wrappers, "rope_options": {"scale_x": 2.0}})
    assert not _weights(object_patches=["model_sampling"])
    known = (*NODE_TYPES.values(), *SAMPLERS.values())
    assert {each.effect for each in known} == {Effect.OUTSIDE, Effect.WEIGHTS, *refused}


def test_names_of_files_tell_classes_that_the_tables_have():
    for _, path in file_names._CLASSES:
        assert f"comfy.ldm.{path}" in NETWORKS
    runner = find_runner("wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors")
    assert (runner.title, runner.tokens_split, runner.weights) == ("Wan", True, "scaled fp8")
    assert find_runner("sub/wan2.1_t2v_1.3B_fp16.safetensors").weights == "plain"
    assert find_runner("wan_animate_2_int8_convrot.safetensors").weights == "int8_convrot"
    assert not find_runner("sd_xl_base_1.0.safetensors").tokens_split
    assert find_runner("tomorrow.safetensors").title == "?"


def test_the_page_of_models_has_the_families():
    assert families_of(PAGE.read_text(encoding="utf-8")) == write_families(), (
        "run: python -m benchmarks.template_coverage --write-docs"
    )


@pytest.mark.host
@pytest.mark.skipif(installed_version() is None, reason="comfyui-workflow-templates is not installed")
def test_installed_templates_are_all_known():
    judged = judge_all(read_templates())
    assert len(judged) > 150
    assert not [reason for reason, _ in reason_totals(judged) if "not known" in reason]
    here = known_here(judged)
    assert not [(each.name, each.judgement.files) for each in here if any(r.title == "?" for r in each.runners)]
    converts, in_pool = (
        total(here, lambda each: each.judgement.converts),
        total(here, lambda each: each.loops_in_pool),
    )
    assert converts.usage >= 0.99 * total(here).usage
    assert in_pool.usage >= 0.95 * total(here).usage
    page, version = PAGE.read_text(encoding="utf-8"), installed_version()
    if version_of(page) == version:
        assert page == write_page(judged, version), "run: python -m benchmarks.template_coverage --write-docs"
        executed = EXECUTED_PAGE.read_text(encoding="utf-8")
        assert executed == write_executed(judged), "run: python -m benchmarks.template_coverage --write-docs"
        unnamed = [each.name for each in here if each.judgement.converts and f"`{each.name}`" not in executed]
        assert not unnamed


@pytest.mark.host
def test_what_is_called_newer_is_not_in_the_comfyui_that_is_here():
    checkout = find_checkout()
    if not name_version(checkout).startswith(f"ComfyUI {NEWEST_RUN}."):
        pytest.skip(f"{name_version(checkout)} is not the one that the list was made for")
    files = [checkout / "nodes.py", *(checkout / "comfy_extras").rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    assert not [name for name in NODES if f'"{name}"' in code]
