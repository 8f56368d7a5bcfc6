"""Weights of which a rank has a share, and each block when it runs: bit for bit as with all of them on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parallel_runtime.engine.residency import Resident
from parallel_runtime.gpu_memory.arena import PlainArena
from parallel_runtime.loading import loaded_weights
from parallel_runtime.loading.checkpoint import CheckpointReader, open_checkpoint
from parallel_runtime.loading.loaded_weights import LoadedWeights
from parallel_runtime.streaming import shared_blocks
from parallel_runtime.streaming.dealer import Dealer
from parallel_runtime.streaming.share_memory import HostShare
from tests.comfyui_checkout import HOW, find_comfyui
from tests.parallel_runtime.streamed_run import KINDS
from tests.ranks import run_ranks
from tests.tiny_flux import tiny_config, write_diffusers_folder

COMFYUI = find_comfyui()
CPU = torch.device("cpu")
OTHERS = ["float8_e4m3fn", "scaled_fp8", "nvfp4", "int8_rotated"]
"""Of tests/comfyui_networks/formats.py, one of each kind."""
CONFIG = tiny_config(num_layers=2, num_single_layers=3, num_attention_heads=2)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    """Two models of one family with unlike weights."""
    folder = tmp_path_factory.mktemp("models")
    return [str(write_diffusers_folder(folder / f"{seed}", CONFIG, seed=seed)) for seed in (1, 2)]


@pytest.mark.long_but_for("3")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shares_give_what_whole_weights_give(ranks, files, tmp_path):
    arguments = {"path": files[0], "other": files[1], "folder": str(tmp_path)}
    for found in run_ranks(ranks, "tests.parallel_runtime.streamed_run:compare", arguments, timeout=280):
        for weights in KINDS:
            size, share, coming, largest = found.pop(f"{weights} bytes")
            # Two slots, the first block, and what is in no block: a CPU's share is not on it.
            assert 3 * largest < size < 5 * largest
            assert share <= coming / ranks + 512 * 7
            assert share > coming / ranks * 0.9
            assert not found.pop(f"{weights} here")
        assert all(found.values()), [name for name, right in found.items() if not right]


class StayingArena(PlainArena):
    """Comes back at the same addresses, as a GPU's does."""

    keeps_addresses = True


@pytest.fixture
def streamed_weights(monkeypatch) -> Callable[[str, Dealer], LoadedWeights]:
    monkeypatch.setattr(loaded_weights, "make_arena", StayingArena)

    def make(path: str, dealer: Dealer) -> LoadedWeights:
        reader = CheckpointReader(open_checkpoint(path), torch.float32)
        return LoadedWeights(reader, CPU, dealer)

    return make


def test_recordings_do_not_outlive_shares_which_come_back_elsewhere(files, streamed_weights):
    weights, made = streamed_weights(files[0], Dealer("host", 0, 1, None, "key", CPU)), []
    for _ in range(2):
        weights.fill(lambda done, total: None)
        made.append(weights.shared.own_part(0, 0, 1)[1])
        weights.give_back()
    assert made[0].data_ptr() != made[1].data_ptr()
    assert not weights.keeps_addresses  # so `LoadedModel` lets recordings go


def test_recordings_do_not_outlive_another_ranks_share_either(files, tmp_path, streamed_weights):
    stays, moves = (streamed_weights(files[0], Dealer("host", rank, 2, tmp_path, "key", CPU)) for rank in (0, 1))
    forgotten: list[int] = []
    held = SimpleNamespace(weights=stays, forget_recordings=lambda: forgotten.append(1))
    resident = SimpleNamespace(loaded_model=held)
    for weights in (stays, moves):
        weights.fill(lambda done, total: None)
    for times in (0, 0, 1, 1):
        if times and not forgotten:  # that rank alone had no memory for it, and has it again
            moves.give_back()
            moves.fill(lambda done, total: None)
        Resident.meet(resident)  # type: ignore[arg-type]
        assert len(forgotten) == times
    for weights in (stays, moves):
        weights.give_back()


def test_a_share_on_a_gpu_may_go_while_another_rank_looks_for_it(files, tmp_path, monkeypatch, streamed_weights):
    monkeypatch.setattr(Dealer, "on_device", True)
    monkeypatch.setattr(shared_blocks, "DeviceShare", lambda size, device: HostShare(size))
    stays, goes = (streamed_weights(files[0], Dealer("dealt", rank, 2, tmp_path, "key", CPU)) for rank in (0, 1))
    for weights in (stays, goes):  # neither runs, so neither knows the other's board
        weights.fill(lambda done, total: None)
    read_text = Path.read_text

    def read_when_gone(path: Path) -> str:
        monkeypatch.setattr(Path, "read_text", read_text)
        goes.give_back()
        return path.read_text()

    monkeypatch.setattr(Path, "read_text", read_when_gone)
    stays.give_back()
    assert Path.read_text is read_text, "it looked for the other's share"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(COMFYUI is None, reason=HOW)
@pytest.mark.long_but_for("common")
@pytest.mark.slow
@pytest.mark.parametrize("formats", [["plain", "int8_tensorwise"], OTHERS], ids=["common", "others"])
def test_a_comfyui_network_gives_the_same_in_every_format(formats, tmp_path):
    arguments = {"comfyui": str(COMFYUI), "folder": str(tmp_path), "formats": formats}
    for found in run_ranks(2, "tests.comfyui_networks.streamed:compare", arguments):
        assert len(found) == (11 * len(KINDS) + 2) * len(formats) + ("plain" in formats)
        for name, value in found.items():
            assert abs(value - 0.5) < 0.02 if name.endswith("share") else value is True, name
