"""ComfyUI's VAEs, the rows of a picture shared out over ranks: against the same module in one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parallel_runtime.acceleration
from parallel_runtime.acceleration import channels_last
from parallel_runtime.vae.families import Half
from parallel_runtime.vae.row_functions import RowFunctions
from parallel_runtime.vae.rows import Rows, share_out
from parallel_runtime.vae.shared_vae import run_half
from tests.comfyui_checkout import HOW, find_comfyui
from tests.comfyui_vaes import plain_kernels
from tests.comfyui_vaes.ranks import as_on_a_gpu
from tests.comfyui_vaes.tiny import TINY
from tests.ranks import run_ranks

COMFYUI = find_comfyui()


USED_MOST = ["flux", "wan 2.1"]
FUSED = {"bias", "double", "scale", "scale and SiLU", "length", "length and SiLU"}


def compare(ranks: int, names: list[str], fused: bool) -> None:
    """Assert that so many ranks compute what a VAE alone does."""
    args = {"comfyui": str(COMFYUI), "names": names, "fused": fused}
    found = run_ranks(ranks, "tests.comfyui_vaes.ranks:compare", args)
    differences = {
        (name, half): difference
        for name, halves in found[0]["differences"].items()
        for half, difference in halves.items()
    }
    assert {name for name, _ in differences} == set(names)
    # Of quantised layers another order of sums rounds some inputs otherwise.
    assert not {each: apart for each, apart in differences.items() if not apart < (1e-3 if "int8" in each[0] else 1e-5)}
    assert set(found[0]["ran"].values()) == {ranks}
    assert ranks == 1 or found[0]["strides"] == [1]
    assert set(found[0]["fused"]) == (FUSED if fused else set())
    assert found[0]["in graphs"] == sorted(f"{name} decoder" for name in names if "h3" in name and fused)


@pytest.mark.slow_but_for("True")
@pytest.mark.skipif(COMFYUI is None, reason=HOW)
@pytest.mark.parametrize("fused", [False, True])
def test_ranks_compute_what_a_vae_alone_does(fused):
    compare(2, USED_MOST, fused)


@pytest.mark.slow
@pytest.mark.skipif(COMFYUI is None, reason=HOW)
@pytest.mark.parametrize(
    ("ranks", "fused"),
    [
        (3, True),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((2, True), (1, True), (2, False))),
    ],
)
def test_ranks_compute_what_every_vae_does(ranks, fused):
    compare(ranks, list(TINY), fused)


@pytest.mark.slow
@pytest.mark.skipif(COMFYUI is None, reason=HOW)
def test_a_ranks_peak_of_memory_is_its_share():
    found = run_ranks(2, "tests.comfyui_vaes.ranks:peaks", {"comfyui": str(COMFYUI), "names": USED_MOST})
    for rank in found:
        # A transport's thread may hold on to a sent row for a moment: that is no part of what is reckoned.
        assert rank["together"] == pytest.approx(rank["as_if"], rel=0.01), "what is reckoned is what an exchange takes"
        shares = {name: own / alone for name, (alone, own) in rank["large"].items()}
        assert len(shares) == 4
        assert {name: share for name, share in shares.items() if share > 0.505} == {}


class Unknown(nn.Module):
    """Of no class that we know: uses a norm again behind SiLU."""

    def decode(self, x):
        normed = F.group_norm(x, 2)
        return F.silu(normed) + normed


def test_a_vae_that_nobody_knows_runs_as_it_is():
    x = torch.randn((1, 4, 6, 6), generator=torch.Generator().manual_seed(1))
    with as_on_a_gpu():
        made = run_half(Unknown(), "decoder", x.clone(), unit=1, ranks=1, rank=0, group=None)
    assert made is not None
    assert torch.equal(made, Unknown().decode(x))


class Broken:
    """Kernels on a machine where Triton finds no C compiler."""

    FAILURES = (RuntimeError,)

    @staticmethod
    def add_to_channels(x, bias):
        raise RuntimeError("Failed to find C compiler.")


def test_without_a_compiler_a_vae_runs_by_pytorchs_functions(monkeypatch, caplog):
    caplog.set_level("INFO")
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device, **options: torch.ones(*sizes, **options))
    usable = channels_last.usable.__wrapped__
    monkeypatch.setattr(parallel_runtime.acceleration, "channels_last_kernels", Broken, raising=False)
    assert not usable(gpu)
    assert "Failed to find C compiler." in caplog.text
    monkeypatch.setattr(parallel_runtime.acceleration, "channels_last_kernels", plain_kernels)
    monkeypatch.setattr(plain_kernels, "FAILURES", (), raising=False)
    assert usable(gpu)
    assert not usable(torch.device("cpu"))


@pytest.mark.parametrize("fused", [False, True])
def test_kernels_are_used_where_all_ranks_have_them(fused):
    x = torch.randn((1, 4, 6, 6), generator=torch.Generator().manual_seed(1))
    with as_on_a_gpu(), RowFunctions(Half(), Rows(0, (1,), lambda: None), lambda: None, fused):
        before = plain_kernels.calls.total()
        made = F.silu(F.group_norm(x, 2))
        used = plain_kernels.calls.total() - before
    assert bool(used) == fused
    assert torch.allclose(made, F.silu(F.group_norm(x, 2)), atol=1e-5)


def test_rows_are_shared_out_in_proportion():
    assert share_out(88, 11, (3, 4, 4)) == [24, 32, 32]
    with pytest.raises(ValueError, match="cannot be shared"):
        share_out(12, 11, (3, 4, 4))
