"""Patched weights in a rank: where they lie, what comes back, what is parked; never a patch on a patched weight."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_runtime import memory
from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import CheckpointError, NotLoadedError, RequestError
from parallel_runtime.loading import patched_weights
from parallel_runtime.loading.loaded_weights import LoadedWeights
from parallel_runtime.loading.patched_weights import PatchedWeights
from parallel_runtime.loading.weight_parts import parts
from parallel_runtime.networks.comfyui.comfy_code import use_comfyui
from parallel_runtime.patching.comfyui_patches import Computing
from parallel_runtime.patching.patch_data import Encoder, PatchSet, WeightPatches
from parallel_runtime.requests.comfyui_code import ComfyuiCode
from parallel_runtime.requests.conditioning import refer
from parallel_runtime.requests.control import Cancelled
from parallel_runtime.requests.requests import Forward, KeepPatches, Load, Release
from tests.comfyui_checkout import HOW, find_comfyui
from tests.parallel_runtime.test_weight_store import CONFIG, Rank, leave_room_for
from tests.tiny_flux import write_original

COMFYUI = find_comfyui()
pytestmark = pytest.mark.skipif(COMFYUI is None, reason=HOW)

LAYERS = ("double_blocks.0.img_attn.qkv", "single_blocks.0.linear1", "final_layer.adaLN_modulation.1", "img_in")
RANK, ALPHA = 4, 2.0


@pytest.fixture(scope="module", autouse=True)
def _comfy() -> None:
    use_comfyui(str(COMFYUI), {"cpu": True})


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [write_original(folder / f"{seed}.safetensors", CONFIG, seed=seed) for seed in (1, 2)]


def factors(path: Path, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(up, down) of each layer."""
    torch.manual_seed(seed)
    tensors = load_file(path)
    shapes = {layer: tensors[f"{layer}.weight"].shape for layer in LAYERS}
    return {layer: (torch.randn(out, RANK) * 0.2, torch.randn(RANK, given) * 0.2)
            for layer, (out, given) in shapes.items()}  # fmt: skip


def lora(path: Path, strength: float, seed: int = 0) -> PatchSet:
    from comfy.weight_adapter import LoRAAdapter

    patches: dict[str, Any] = {
        f"diffusion_model.{layer}.weight": [
            (strength, LoRAAdapter(set(), (up, down, ALPHA, None, None, None)), 1.0, None, None)
        ]
        for layer, (up, down) in factors(path, seed).items()
    }
    return Encoder().encode(patches)


def merged(path: Path, strength: float, seed: int = 0) -> Path:
    """A file with the same LoRA in its weights."""
    tensors = load_file(path)
    for layer, (up, down) in factors(path, seed).items():
        tensors[f"{layer}.weight"] += strength * ALPHA / RANK * (up @ down)
    target = path.with_name(f"{path.stem} with {seed} {strength}.safetensors")
    save_file(tensors, target)
    return target


class PatchingRank(Rank):
    """Keeps sets, and runs calls of ComfyUI's own network with them."""

    def load(self, path: Path, name: str = "", **options: Any) -> Any:
        config = ParallelConfig(devices="cpu:1", **options)
        code = ComfyuiCode(str(COMFYUI), {"cpu": True}, "float32")
        return self.run(Load(name or str(path), str(path), "float32", config.to_mapping(), 1, comfyui=code))[0]

    def keep(self, *sets: PatchSet, kept: tuple[str, ...] | None = None) -> None:
        tensors = {name: factor.view(torch.uint8).reshape(-1) for each in sets for name, factor in each.factors.items()}
        names = tuple(each.name for each in sets)
        request = KeepPatches(ComfyuiCode(str(COMFYUI)), tuple(tensors), names, kept)
        self.run(request, {**tensors, **{each.name: each.to_bytes() for each in sets}})

    def forward(self, name: Path | str, *sets: PatchSet) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        given = {"context": draw(1, 7, 64), "y": draw(1, 32), "guidance": torch.full((1,), 3.5)}
        reference, tensors = refer(1, given)
        tensors |= {"x": draw(1, 16, 8, 6), "timestep": torch.full((1,), 0.7)}
        first, second = (*(each.name for each in sets), "", "")[:2]
        request = Forward(str(name), reference, patches=(first, second))
        with torch.no_grad():
            return self.run(request, tensors)[1]["output"]

    def weights(self, name: Path) -> dict[str, torch.Tensor]:
        held = self.engine.residency.get(str(name)).loaded_model
        assert held is not None
        return {key: parameter.data for key, parameter in held.weights.network.named_parameters()}


def predicted(path: Path) -> torch.Tensor:
    rank = PatchingRank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_bytes", lambda device: 1 << 40)
        rank.load(path)
        return rank.forward(path)


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one - other).abs().max() < 1e-4 * other.abs().max()


@pytest.mark.slow_but_for("True")
@pytest.mark.parametrize("kept", [True, False])
def test_weights_are_patched_in_place_and_come_back_bit_for_bit(kept, files, monkeypatch):
    monkeypatch.setattr(patched_weights, "has_room", lambda tensors, device: kept)
    path, rank = files[0], PatchingRank()
    rank.load(path)
    plain, before = rank.forward(path), {name: data.clone() for name, data in rank.weights(path).items()}
    addresses = {name: data.data_ptr() for name, data in rank.weights(path).items()}
    sets = {strength: lora(path, strength) for strength in (0.8, -0.5)}
    rank.keep(*sets.values())
    for strength in (0.8, -0.5, 0.8):
        assert_same(rank.forward(path, sets[strength]), predicted(merged(path, strength)))
        assert addresses == {name: data.data_ptr() for name, data in rank.weights(path).items()}
    assert torch.equal(rank.forward(path), plain)
    assert all(torch.equal(before[name], data) for name, data in rank.weights(path).items())
    assert addresses == {name: data.data_ptr() for name, data in rank.weights(path).items()}


@pytest.mark.slow
def test_hooks_come_on_top_and_sets_that_are_dropped_are_not_known(files):
    path, rank = files[0], PatchingRank()
    rank.load(path)
    first, second = lora(path, 0.6), lora(path, 0.9, seed=1)
    rank.keep(first)
    rank.keep(second)
    both = predicted(merged(merged(path, 0.6), 0.9, seed=1))
    assert_same(rank.forward(path, first, second), both)
    assert_same(rank.forward(path, second), predicted(merged(path, 0.9, seed=1)))
    rank.keep(kept=(first.name,))
    with pytest.raises(NotLoadedError, match="LoRA"):
        rank.forward(path, second)
    assert_same(rank.forward(path, first), predicted(merged(path, 0.6)))


@pytest.mark.slow
@pytest.mark.parametrize("room", [True, False])
def test_hooks_that_take_turns_are_computed_once_where_there_is_room(room, files, monkeypatch):
    monkeypatch.setattr(patched_weights, "has_room", lambda tensors, device: room)
    computed: list[str] = []
    weight = Computing.weight
    monkeypatch.setattr(Computing, "weight", lambda *args: computed.append(args[1]) or weight(*args))
    path, rank = files[0], PatchingRank()
    rank.load(path)
    sets = [lora(path, strength, seed) for seed, strength in enumerate((0.5, 0.8, -0.6))]
    rank.keep(sets[0])
    rank.keep(sets[1])
    rank.keep(sets[2])
    turns = ((sets[0], sets[1]), (sets[0],), (sets[0], sets[2]))
    first = [rank.forward(path, *turn) for turn in turns]
    counted = len(computed)
    for _ in range(2):
        assert all(torch.equal(rank.forward(path, *turn), each) for turn, each in zip(turns, first, strict=True))
    assert (len(computed) == counted) == room
    assert_same(rank.forward(path), predicted(path))
    assert_same(first[2], predicted(merged(merged(path, 0.5), -0.6, seed=2)))


@pytest.mark.slow
@pytest.mark.parametrize("folder", [True, False], ids=["parked", "read again"])
def test_a_model_that_was_away_comes_back_with_what_is_asked_of_it(folder, files, tmp_path, monkeypatch):
    rank = PatchingRank(folder=tmp_path if folder else None)
    leave_room_for(1, files[0], monkeypatch, rank)
    for path in files:
        rank.load(path)
    plain = [rank.forward(path) for path in files]
    sets = [lora(path, 0.7) for path in files]
    rank.keep(*sets)
    wanted = [predicted(merged(path, 0.7)) for path in files]
    for _ in range(2):
        for path, patches, patched in zip(files, sets, wanted, strict=True):
            assert_same(rank.forward(path, patches), patched)
            assert rank.here() == [path.stem]
    assert all(torch.equal(rank.forward(path), each) for path, each in zip(files, plain, strict=True))
    rank.forward(files[0], sets[0])
    rank.run(Release(str(files[0])))
    assert torch.equal(rank.forward(files[0]), plain[0])


@pytest.mark.slow
def test_a_patched_model_is_parked_as_it_is_in_its_file(files, tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 40, total=1 << 40))
    monkeypatch.setattr(patched_weights, "has_room", lambda tensors, device: True)
    rank = PatchingRank(folder=tmp_path)
    leave_room_for(1, files[0], monkeypatch, rank)
    rank.load(files[0])
    plain, patches = rank.forward(files[0]), lora(files[0], 0.7)
    rank.keep(patches)
    rank.forward(files[0], patches)
    rank.load(files[1])
    wanted = predicted(merged(files[0], 0.7))
    monkeypatch.setattr("parallel_runtime.loading.loaded_weights.read", None)  # it comes from the host
    assert torch.equal(rank.forward(files[0]), plain)
    assert_same(rank.forward(files[0], patches), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_a_patched_model_whose_file_has_gone_makes_way_for_another(change, files, tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 40, total=1 << 40))
    (tmp_path / "pool").mkdir()
    path = Path(shutil.copyfile(files[0], tmp_path / "model.safetensors"))
    rank = PatchingRank(folder=tmp_path / "pool")
    leave_room_for(1, path, monkeypatch, rank)
    rank.load(path)
    patches = lora(path, 0.7)
    rank.keep(patches)
    rank.forward(path, patches)
    path.unlink()
    if change == "replaced":
        shutil.copyfile(files[1], path)
    rank.load(files[1])
    assert torch.equal(rank.forward(files[1]), predicted(files[1]))
    assert rank.here() == [files[1].stem]
    with pytest.raises(NotLoadedError if change == "replaced" else CheckpointError, match="model"):
        rank.forward(path, patches)
    assert torch.equal(rank.forward(files[1]), predicted(files[1]))


def test_a_weight_that_is_set_to_another_shape_is_refused_and_leaves_the_model_as_it_was(files):
    path, rank = files[0], PatchingRank()
    rank.load(path)
    plain = rank.forward(path)
    given: Any = {f"diffusion_model.{LAYERS[0]}.weight": [(1.0, ("set", (torch.ones(3, 5),)), 1.0, None, None)]}
    wrong = Encoder().encode(given)
    rank.keep(wrong)
    with pytest.raises(RequestError, match=f"{LAYERS[0]}.weight.*size of tensor"):
        rank.forward(path, wrong)
    assert torch.equal(rank.forward(path), plain)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [True, False])
def test_a_change_that_was_cancelled_goes_on_from_there_or_leaves_nothing(files, monkeypatch, wanted):
    monkeypatch.setattr(patched_weights, "has_room", lambda tensors, device: True)
    path, rank = files[0], PatchingRank()
    rank.load(path)
    plain, patches = rank.forward(path), lora(path, 0.8)
    rank.keep(patches)
    written: list[str] = []
    put = LoadedWeights.put

    def cancelling(self, target: str, value: torch.Tensor) -> None:
        written.append(target)
        if len(written) == 3:
            raise Cancelled
        put(self, target, value)

    monkeypatch.setattr(LoadedWeights, "put", cancelling)
    with pytest.raises(Cancelled):
        rank.forward(path, patches)
    monkeypatch.setattr(LoadedWeights, "put", put)
    held = rank.engine.residency.get(str(path)).loaded_model
    assert held is not None
    assert held.patched._originals
    if wanted:
        assert_same(rank.forward(path, patches), predicted(merged(path, 0.8)))
    assert torch.equal(rank.forward(path), plain)
    assert not held.patched._originals, "no memory of the device is kept for weights that are as in the file"


@pytest.mark.slow
def test_originals_that_had_to_leave_the_device_are_had_again(files, monkeypatch):
    monkeypatch.setattr(patched_weights, "has_room", lambda tensors, device: True)
    path, rank = files[0], PatchingRank()
    rank.load(path)
    plain, sets = rank.forward(path), [lora(path, strength) for strength in (0.8, -0.3)]
    rank.keep(sets[0])
    rank.keep(sets[1])
    rank.forward(path, sets[0])
    with monkeypatch.context() as short:
        short.setattr(memory, "is_free", lambda wanted, device: False)
        held = rank.engine.residency.get(str(path)).loaded_model
        assert held is not None
        rank.engine.residency.store.prepare_run(held, 1)
    assert_same(rank.forward(path, sets[1]), predicted(merged(path, -0.3)))
    assert torch.equal(rank.forward(path), plain)


class OneLayer:
    """A file of one layer; who opens it has a layer without numbers."""

    owned = None

    def __init__(self, weight: Any):
        self._weight = weight
        self.opened = 0

    def open(self, on_bytes: Any) -> Any:
        self.opened += 1
        network = torch.nn.ModuleDict({"layer": torch.nn.Linear(1, 1, bias=False)})
        network["layer"].weight = torch.nn.Parameter(self._weight, requires_grad=False)
        return network, lambda name, part: parts(self._weight)[part]

    def blocks(self, network: Any) -> list[str]:
        return []


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("kind", ["plain", "float8_e4m3fn", "mxfp8", "nvfp4", "int8_tensorwise"])
def test_a_weight_of_comfyuis_network_is_written_in_place_with_its_scales(kind, kept, monkeypatch):
    import comfy.quant_ops as quant

    monkeypatch.setattr(patched_weights, "has_room", lambda tensors, device: kept)
    torch.manual_seed(0)
    values = [torch.randn(64, 128).bfloat16() * scale for scale in (1.0, 30.0)]
    weights: list[Any] = values
    if kind != "plain":
        layout = quant.QUANT_ALGOS[kind]["comfy_tensor_layout"]
        options: dict[str, Any] = {} if kind == "mxfp8" else {"scale": "recalculate"}
        weights = [quant.QuantizedTensor.from_float(value, layout, **options) for value in values]
    read = lambda weight: weight.dequantize() if kind != "plain" else weight  # noqa: E731
    plain, other = read(weights[0]).clone(), read(weights[1]).clone()
    file = OneLayer(weights[0])
    network = LoadedWeights(file, torch.device("cpu"))
    network.fill(lambda done, total: None)
    patched_by = PatchedWeights(network)
    layer = network.network["layer"]
    region = layer.weight._qdata if kind != "plain" else layer.weight
    assert {part.untyped_storage().data_ptr() for part in parts(layer.weight)} == {region.untyped_storage().data_ptr()}
    for _ in range(2):  # the second time it is something else
        original = patched_by.originals(["layer.weight"])["layer.weight"]
        assert torch.equal(read(original), plain)
        network.put("layer.weight", weights[1])
        patched_by._has["layer.weight"] = (None, None)
        assert torch.equal(read(layer.weight), other)
    assert (file.opened == 1) == kept
    network.put_file("layer.weight", patched_by.originals(["layer.weight"])["layer.weight"])
    assert torch.equal(read(layer.weight), plain)
    assert not network.moved
    network.put("layer.weight", torch.zeros(64, 256))
    assert network.moved
    assert tuple(layer.weight.shape) == (64, 256)
    saved = torch.empty(network.size, dtype=torch.uint8)
    network.save(saved, lambda done, total: None)
    network.give_back()
    network.fill(lambda done, total: None, lambda size: SimpleNamespace(memory=saved, pin=lambda: None))  # type: ignore
    assert torch.equal(read(layer.weight), plain)


def test_after_a_bypass_that_fails_layers_are_wrapped_anew_whatever_is_asked_for(monkeypatch):
    wrapped, there = [], list[str]()

    def add_bypass(layer: Any, name: str, *others: Any) -> Any:
        wrapped.append(name)
        if name == "bad":
            raise RequestError("It does not fit.", "Take another one.")
        there.append(name)
        return there.clear

    monkeypatch.setattr(patched_weights, "add_bypass", add_bypass)
    monkeypatch.setattr(patched_weights, "decode_value", lambda value, factors: value)
    network = SimpleNamespace(get_submodule=lambda name: None)
    weights = SimpleNamespace(device=torch.device("cpu"), network=network, moved=False, settle=lambda names: None)
    patched = PatchedWeights(weights)  # type: ignore[arg-type]
    for name in ("good", "bad", "good", "bad", ""):
        given = WeightPatches(PatchSet(name, bypass={name: [name, 1.0]} if name else {}))
        with pytest.raises(RequestError) if name == "bad" else contextlib.nullcontext():
            patched.change(given, lambda done, total: None)
        assert there == (["good"] if name == "good" else [])
    assert wrapped == ["good", "bad", "good", "bad"]
