"""The measurements in a real ComfyUI, as far as they can be tried without one: files, graphs, plans, tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.in_comfyui.bench import Bench
from benchmarks.in_comfyui.defaults import fill
from benchmarks.in_comfyui.families import REAL, tiny
from benchmarks.in_comfyui.files import FileStore, list_entries, write_file
from benchmarks.in_comfyui.gguf_files import write_gguf
from benchmarks.in_comfyui.graphs import (
    BY_DEFAULT,
    SAMPLER,
    Picture,
    Way,
    controlled,
    custom,
    decoded,
    plain,
    two_experts,
    with_loras,
)
from benchmarks.in_comfyui.host_families import HOST_REAL, file_name, loaded_as_tensors
from benchmarks.in_comfyui.host_files import Part
from benchmarks.in_comfyui.journey_verdict import BEST, NATIVE, faults
from benchmarks.in_comfyui.measures.distances import CHANGES
from benchmarks.in_comfyui.measures.journey import EMPTY, FULL, TURNS
from benchmarks.in_comfyui.measures.prompts import seconds_of_parts
from benchmarks.in_comfyui.measures.speed import short_speed
from benchmarks.in_comfyui.random_q4_k import BLOCK, BLOCK_BYTES, q4_k
from benchmarks.in_comfyui.report import tables
from benchmarks.in_comfyui.runs import Run
from benchmarks.in_comfyui.sets import SETS, plan
from benchmarks.in_comfyui.whole_prompts import PARTS, WHOLE, part_of, whole_graph
from tests.comfyui_checkout import HOW, find_comfyui
from tests.host.find_host import PACK_ROOT, find_host
from tests.ranks import run_ranks

SMALL = ("flux", "klein", "sd35", "wan1")
CONFIG_INFO = {"input": {"required": {"devices": ["STRING", {"default": "auto"}], "cfg": [["auto", "1"], {}]}}}


@pytest.mark.parametrize("name", SMALL)
def test_a_written_file_holds_no_zeros(tmp_path, name):
    family = tiny()[name]
    path = tmp_path / "model.safetensors"
    write_file(path, family, 3, "cpu")
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    for key, tensor in tensors.items():
        assert tensor.dtype == family.dtype
        assert tensor.count_nonzero() > 0.99 * tensor.numel(), key
    assert len({tensor.flatten()[0].item() for tensor in tensors.values()}) == len(tensors)


@pytest.mark.parametrize("name", REAL)
def test_the_disk_room_that_is_asked_for_holds_the_file_and_little_more(name):
    family = REAL[name]
    size = sum(torch.Size(entry.shape).numel() for entry in list_entries(family)) * family.dtype.itemsize / 1e9
    assert size < family.gigabytes < size + 0.2


@pytest.mark.slow
@pytest.mark.skipif(find_comfyui() is None, reason=HOW)
def test_files_for_comfyuis_own_networks_are_recognised_in_their_formats(tmp_path):
    arguments = {"comfyui": str(find_comfyui()), "folder": str(tmp_path)}
    (found,) = run_ranks(1, "tests.comfyui_networks.benchmark_files:look", arguments)
    formats = {name: HOST_REAL[name].format for name in loaded_as_tensors()}
    assert found["quantised"] == {name: kind in ("scaled fp8", "int8") for name, kind in formats.items()}
    for name, gigabytes in found["gigabytes"].items():
        assert gigabytes < HOST_REAL[name].gigabytes < gigabytes + 0.5, name


def test_a_gguf_file_has_the_shapes_and_the_spread_of_numbers_that_were_asked_for(tmp_path):
    gguf = pytest.importorskip("gguf")
    generator = torch.Generator().manual_seed(1)
    parts = [
        Part("blocks.0.weight", (64, 2 * BLOCK_BYTES), torch.uint8, lambda _: q4_k(generator, (64, 2 * BLOCK), 0.05)),
        Part("norm.weight", (5,), torch.float32, lambda _: torch.ones(5)),
    ]
    path = tmp_path / "model.gguf"
    write_gguf(path, "flux", parts, "cpu")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    matrix = tensors["blocks.0.weight"]
    assert matrix.tensor_type.name == "Q4_K"
    assert tensors["norm.weight"].data.tolist() == [1] * 5
    numbers = torch.from_numpy(gguf.quants.dequantize(matrix.data, matrix.tensor_type))
    assert numbers.shape == (64, 2 * BLOCK)
    assert abs(numbers.std() - 0.05) < 0.002
    assert abs(numbers.mean()) < 0.001


def test_files_that_nothing_needs_make_room_and_others_stay(tmp_path, monkeypatch):
    store = FileStore(tmp_path, REAL, small=False)
    for name in ("klein", "sdxl", "wan1"):
        (tmp_path / f"{name}.safetensors").touch()
    monkeypatch.setattr(store, "_free", lambda: 20.0 - 9.0 * len(list(tmp_path.iterdir())))
    monkeypatch.setattr("subprocess.run", lambda *_, **__: None)
    store.make(["klein", "klein-b"], ["wan1"], 1)
    assert [path.name for path in tmp_path.iterdir()] == ["klein.safetensors"]
    assert store.fitting(["klein", "flux"]) == ["klein"]


def test_every_input_of_a_node_is_filled_and_what_is_given_stays():
    graph = {"config": {"class_type": "ParallelConfig", "inputs": {"devices": "0"}}}
    for choice, wish, expected in (
        (["BOOLEAN", {"default": False}], "default", True),
        (["BOOLEAN", {"default": False}], "off", False),
        (["COMBO", {"default": "auto", "options": ["auto", "on", "off"]}], "default", "auto"),
        (["COMBO", {"default": "auto", "options": ["auto", "on", "off"]}], "on", "on"),
    ):
        required = {**CONFIG_INFO["input"]["required"], "compile": choice}
        filled = fill(graph, {"ParallelConfig": {"input": {"required": required}}}, wish)
        assert filled["config"]["inputs"] == {"devices": "0", "cfg": "auto", "compile": expected}


def test_several_latents_have_a_node():
    graph = plain(Way("0"), Picture(HOST_REAL["own-h3"], "own-h3", 1, 4))
    assert graph["latent"]["class_type"] == "BenchmarkLatents"


def test_a_gguf_file_is_loaded_by_the_pack_that_reads_it_and_a_missing_node_is_named():
    picture = Picture(HOST_REAL["own-flux-gguf"], "own-flux-gguf", 1, 4)
    assert file_name("own-flux-gguf-b") == "own-flux-gguf-b.gguf"
    assert plain(Way("0"), picture)["model"]["inputs"]["model_name"] == "own-flux-gguf.gguf"
    native = plain(Way(), picture)
    assert native["model"] == {"class_type": "UnetLoaderGGUF", "inputs": {"unet_name": "own-flux-gguf.gguf"}}
    with pytest.raises(ValueError, match="UnetLoaderGGUF"):
        fill({"model": native["model"]}, {}, "on")


@pytest.mark.parametrize("way", [Way(), Way("0"), Way("0,1", "ParallelSampler")], ids=lambda way: way.title)
def test_graphs_link_only_to_nodes_that_are_there(way):
    picture = Picture(REAL["klein"], "klein", 1, 4)
    one = plain(way, picture)
    two = two_experts(way, picture, "klein-b")
    other = custom(way, picture), with_loras(custom(way, picture), [("a", 0.5), ("b", 1.0)])
    for graph in (one, decoded(one, picture), controlled(one, picture, "union.safetensors"), two, *other):
        links = [value for node in graph.values() for value in node["inputs"].values() if isinstance(value, list)]
        assert links
        assert {node for node, _ in links} <= set(graph)


def test_an_artist_with_the_defaults_has_no_configuration_and_a_lora_goes_between_loader_and_sampler():
    graph = custom(Way(BY_DEFAULT), Picture(REAL["flux"], "flux", 1, 4, batch=2))
    assert {"ParallelLoader", "ParallelConfig"} & {each["class_type"] for each in graph.values()} == {"ParallelLoader"}
    assert graph["model"]["inputs"] == {"model_name": "flux.safetensors"}
    assert graph["latent"]["inputs"]["batch_size"] == 2
    changed = with_loras(graph, [("a", 0.5), ("b", 1.0)])
    assert changed["lora 0"]["inputs"]["model"] == ["model", 0]
    assert changed["guider"]["inputs"]["model"] == changed["sigmas"]["inputs"]["model"] == ["lora 1", 0]
    config = plain(Way("0", compile="on"), Picture(REAL["flux"], "flux", 1, 4))
    infos = {each["class_type"]: {"input": {}} for each in config.values()}
    assert fill(config, infos, "default")["model config"]["inputs"]["compile"] == "on"


def _journeys(**changes):
    """Results of four journeys without a fault, but for one row: `name`, its `place`, and what is `other` there."""
    results = []
    for name, ms, seconds in ((EMPTY, 124.0, 2.5), (FULL, 123.0, 2.4), (NATIVE, 178.0, 3.6), (BEST, 122.0, 2.4)):
        rows = [
            {"what": turn.what, "graph": turn.graph, "shape": turn.shape, "error": "", "first step s": 0.2}
            | ({"prompt s": 1.0} if turn.cancelled else {"prompt s": seconds, "ms": ms})
            for turn in TURNS
        ]
        rows[0] |= {"first step s": 11.0, "prompt s": 14.0}
        if name == changes.get("name"):
            rows[changes["place"]] |= changes["other"]
        results.append({"name": name, "kind": "journey", "error": "", "rows": rows})
    return results


@pytest.mark.parametrize(
    ("name", "place", "other", "said"),
    [
        (EMPTY, 0, {"first step s": 19.9}, ""),
        (EMPTY, 0, {"first step s": 20.1}, "first step came after 20.1 s, not 20"),
        (FULL, 0, {"first step s": 12.1}, "first step came after 12.1 s, not 12"),
        (FULL, 0, {"prompt s": 30.0, "ms": 170.0}, ""),
        (FULL, 3, {"prompt s": 3.7}, "prompt 4 (1024²): 3.7 s, Load Diffusion Model 3.6"),
        (EMPTY, 10, {"first step s": 8.0, "prompt s": 10.0}, ""),
        (EMPTY, 12, {"prompt s": 10.0}, "prompt 13 (CFG 3.5): 10.0 s, Load Diffusion Model 3.6"),
        (FULL, 10, {"prompt s": 10.0}, "prompt 11 (batch 2): 10.0 s, Load Diffusion Model 3.6"),
        (EMPTY, 17, {"first step s": 8.0, "prompt s": 10.0}, ""),
        (EMPTY, 17, {"first step s": 20.1}, "prompt 18 (float8 file): its first step came after 20.1 s, not 20"),
        (FULL, 17, {"prompt s": 10.0}, "prompt 18 (float8 file): 10.0 s, Load Diffusion Model 3.6"),
        (EMPTY, 18, {"prompt s": 10.0}, "prompt 19 (float8 file): 10.0 s, Load Diffusion Model 3.6"),
        (EMPTY, 4, {"ms": 170.0}, ""),
        (EMPTY, 5, {"ms": 127.6}, ""),
        (EMPTY, 5, {"ms": 128.0}, "prompt 6 (2048²): 128.0 ms a step, the best 124.0"),
        (FULL, 5, {"ms": 126.0}, "prompt 6 (2048²): 126.0 ms a step, the best 122.0"),
        (FULL, 5, {"ms": 120.0}, "caches empty, flux 2 × 2: 124.0 ms a step at best, elsewhere 120.0"),
        (EMPTY, 5, {"ms": 130.0, "ms mean": 125.0}, ""),
        (NATIVE, 5, {"ms": 100.0}, ""),
        (BEST, 5, {"ms": 110.0}, "ms a step at best, elsewhere 110.0"),
        (FULL, 22, {"error": "hung"}, "prompt 23 (cancelled) failed: hung"),
        (NATIVE, 7, {"error": "out of memory"}, "prompt 8 (768²) failed: out of memory"),
    ],
)
def test_a_journey_falls_short_where_it_is_slow_or_fails_and_nowhere_else(name, place, other, said):
    found = faults(_journeys(name=name, place=place, other=other), speeds=True)
    assert bool(found) == bool(said)
    assert all(said in each for each in found[:1])
    slow_only = "failed" not in said
    assert bool(faults(_journeys(name=name, place=place, other=other), speeds=False)) == (bool(said) and not slow_only)


def test_a_journey_that_was_not_played_or_ended_early_falls_short():
    results = _journeys()
    assert faults(results, speeds=True) == []
    results[1] |= {"rows": [], "error": "ComfyUI ended"}
    assert faults(results, speeds=True) == [f"{FULL}: ComfyUI ended", f"{FULL} was not played"]
    assert "| 25 SamplerCustomAdvanced | 0.2 | 2.5 | 124.0 |" in tables({}, results)


def _measured(folder, name, only=""):
    """Results of a set with tiny models on CPUs, in a real ComfyUI."""
    command = [sys.executable, "-m", "benchmarks.in_comfyui", "--set", name, "--cpu", "--out", str(folder)]
    path = os.pathsep.join([find_host().python_path, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "--only", only, "--comfyui", str(find_comfyui())],
        cwd=PACK_ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (folder / f"table-{name}.md").read_text()
    return json.loads((folder / f"results-{name}.json").read_text())["results"]


@pytest.mark.long
@pytest.mark.skipif(find_comfyui() is None, reason=HOW)
def test_a_journey_of_tiny_models_in_a_real_comfyui(tmp_path):
    """Every prompt of both loaders succeeds, or the command fails; the server is a real one, on CPUs."""
    results = _measured(tmp_path, "journey")
    assert [len(result["rows"]) for result in results[:3]] == [len(TURNS)] * 3
    assert all("ms" in row or row["what"] == "cancelled" for result in results for row in result["rows"])


def test_distances_are_a_table_in_which_equal_bits_and_failures_are_said():
    rows = [{"what": "as it is", "distance": 0.0, "bits": True}, {"what": "split", "error": "out of | memory"}]
    text = tables({}, [{"name": "d", "kind": "distance", "model": "FLUX", "error": "", "rows": rows}])
    assert "| FLUX | as it is | 0.0e+00 | same bits |" in text
    assert "| FLUX | split | – | out of / memory |" in text
    for change in CHANGES:
        graph = change.changed(plain(change.way, Picture(REAL["flux"], "flux", 1, 4, change.batch)))
        assert {
            value[0] for each in graph.values() for value in each["inputs"].values() if isinstance(value, list)
        } <= set(graph)


WHOLE_WAYS = [(Way(), False), (Way("0,1"), False), (Way("0,1"), True)]


@pytest.mark.parametrize("small", [False, True], ids=["real", "small"])
@pytest.mark.parametrize("whole", WHOLE.values(), ids=list(WHOLE))
def test_a_whole_prompt_goes_from_a_text_to_a_saved_file(whole, small):
    family = replace({**REAL, **HOST_REAL}[whole.file], cfg=1.0)
    for way, parallel in WHOLE_WAYS:
        picture = Picture(family, whole.file, 1, whole.steps)
        graph = whole_graph(whole, way, picture, "a text", parallel, small)
        taken = {"save"}
        while (
            more := {value[0] for name in taken for value in graph[name]["inputs"].values() if isinstance(value, list)}
            - taken
        ):
            taken |= more
        left = set(graph) - taken
        assert left <= {"negative"}, f"nothing takes {left}"
        kinds = {graph[name]["class_type"] for name in taken}
        assert {"CLIPTextEncode", "VAELoader", "VAEDecode"} <= kinds
        assert ("ParallelVAE" in kinds, "ParallelLoader" in kinds) == (parallel, bool(way.devices))
        assert {part_of(kind) for kind in kinds} == set(PARTS)


def test_seconds_by_part_add_up_and_what_comes_before_the_first_step_is_load():
    picture = Picture(replace(HOST_REAL["own-flux"], cfg=1.0), "own-flux", 1, 4)
    graph = whole_graph(WHOLE["own-flux"], Way(), picture, "a text", False, False)
    moments = {"clip": 0.5, "encoded": 1.0, "positive": 3.0, "vae": 3.5, "model": 4.0, SAMPLER: 6.0, "picture": 20.0}
    steps = [{"kind": "step", "node": SAMPLER, "time": time} for time in (14.0, 16.0, 18.0, 20.0)]
    nodes = [*moments.items(), ("save", 21.5)]
    run = Run("p", posted=0.0, ended=22.0, events=steps, nodes=nodes)
    parts = seconds_of_parts(graph, run)
    assert parts == {"text": 2.5, "load": 0.5 + 0.5 + 2.0 + 6.0, "steps": 8.0, "decode": 1.5, "save": 0.5}
    rows = [{"what": "first", "all s": run.seconds, **parts}]
    common = {"kind": "prompts", "file": "own-flux", "model": "FLUX", "gpus": 1, "error": ""}
    results = [
        {"name": "native", "way": NATIVE, "rows": [{**rows[0], "all s": 33.0}], **common},
        {"name": "ours", "way": "ours", "rows": rows, **common},
    ]
    assert "| FLUX | ours | 1 | first | 2.5 | 9.0 | 8.0 | 1.5 | 0.5 | 0.5 | 22.0 | 1.50 |" in tables({}, results)


@pytest.mark.skipif(find_comfyui() is None, reason=HOW)
def test_text_encoders_are_what_comfyui_takes_their_files_for():
    (found,) = run_ranks(1, "tests.comfyui_networks.benchmark_files:look_at_encoders", {"comfyui": str(find_comfyui())})
    assert {name: kind for name, (kind, _) in found.items()} == {
        "clip-l": "CLIP_L", "t5": "T5_XXL", "umt5": "T5_XXL", "qwen-2.5": "QWEN25_7B", "qwen-3": "QWEN3_4B",
        "gemma": "GEMMA_3_12B", "ltx-projection": "", "qwen-3-vl": "QWEN3VL_32B",
    }  # fmt: skip
    sizes = {name: round(gigabytes, 1) for name, (_, gigabytes) in found.items()}
    assert sizes["t5"] == 9.5  # t5xxl_fp16.safetensors has as much
    assert sizes["umt5"] == 6.7
    assert sizes["qwen-3"] == 8.0


@pytest.mark.long
@pytest.mark.skipif(find_comfyui() is None, reason=HOW)
def test_whole_prompts_of_tiny_models_in_a_real_comfyui(tmp_path):
    results = _measured(tmp_path, "prompts", "prompts own-(flux|wan) (native|cpu:2)")
    assert [result["error"] for result in results] == [""] * 6
    for result in results:
        *rows, queued = result["rows"]
        expected = [] if result["name"].endswith("vae") else ["first"]
        assert [row["what"] for row in rows] == [*expected, "other seed", "other text"]
        assert all(row["steps"] > 0 and row["decode"] > 0 for row in rows)
        assert all((row["text"] > 0) == (row["what"] != "other seed") for row in rows)
        assert queued["what"] == "each of 6 queued"
        assert 0 < queued["all s"] < 10 * rows[0]["all s"]


def test_a_machine_with_one_gpu_leaves_out_what_takes_two_and_families_can_be_chosen():
    for name in SETS:
        single, both = plan(name, "0", "0"), plan(name, "0", "0,1")
        assert all(measure.devices == 1 for measure in single)
        for measures in (single, both):
            assert len({measure.name for measure in measures}) == len(measures)
        assert both
        assert single or name == "pools"
    chosen = plan("all", "0", "0,1", ("klein",))
    assert {file for measure in chosen for file in measure.files} == {"klein"}


def test_what_failed_is_told_beside_what_was_found_before():
    half = {"name": "speed", "kind": "speed", "model": "FLUX", "way": "a | b", "gpus": 2, "ms": 70.5, "error": "hung"}
    row = {"what": "first", "first step s": 3.0, "prompt s": 4.0}
    start = {"name": "start", "kind": "start", "model": "FLUX", "way": "x", "gpus": 1, "rows": [row], "error": ""}
    control = {"name": "net", "kind": "controlnet", "model": "FLUX", "way": "x", "gpus": 1, "ms": 9.5} | {
        "ms without": 8.0
    }
    text = tables({"GPUs": ["H200", "H200"]}, [half, start, control])
    assert "| FLUX | a / b | 2 | 70.5 | – |" in text
    assert "| speed | hung |" in text
    assert "| FLUX | x | 1 | first | 3.0 | 4.0 | – | – | – |" in text
    assert "| FLUX | x | 1 | 9.5 | – | 8.0 | – | – | – |" in text
    assert "| start |" not in text


def _run(milliseconds: float, steps: int = 4) -> Run:
    moments = [1.0 + step * milliseconds / 1000 for step in range(steps)]
    events = [{"kind": "step", "time": moment, "node": SAMPLER} for moment in moments]
    return Run("prompt", 0.0, ended=2.0, events=[*events, {"kind": "mark", "time": moments[-1], "node": "mark"}])


@pytest.mark.parametrize(("devices", "prompts"), [("", 1), ("0", 2)])
def test_a_short_measurement_takes_few_prompts(devices, prompts):
    bench = Bench(None, HOST_REAL, "0", "0,1", cpu=False, deadline=time.monotonic() + 60)  # type: ignore[arg-type]
    bench.make = lambda way, file, **changes: _run(124.0)  # type: ignore[method-assign]
    found: dict = {}
    short_speed(bench, found, "own-flux", Way(devices))
    assert (found["ms"], found["later prompts"]) == (124.0, prompts)


@pytest.mark.parametrize("order", [("", "0"), ("0", "")])
def test_latents_are_compared_whichever_was_made_first(tmp_path, order):
    bench = Bench(None, REAL, "0", "0,1", cpu=False)  # type: ignore[arg-type]
    latents = {"": torch.full((1, 4), 2.0), "0": torch.full((1, 4), 2.5)}
    distances = []
    for devices in order:
        run = _run(100.0)
        run.saved = tmp_path / f"{devices or 'own'}.latent"
        save_file({"latent_tensor": latents[devices]}, run.saved)
        distances.append(bench.distance("picture", Way(devices), run))
    assert distances == [None, pytest.approx(0.25)]
