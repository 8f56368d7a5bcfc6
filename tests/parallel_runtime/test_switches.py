"""$PARALLEL_DIT_OFF, and what a process does without that never compiles."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from parallel_runtime import switches
from parallel_runtime.attention.varying import leave_open
from parallel_runtime.errors import ConfigurationError
from parallel_runtime.mesh import single_rank_mesh
from parallel_runtime.models.flux import FLUX
from parallel_runtime.wrappers.parallel_transformer import parallelize
from tests.parallel_runtime.flux_forward import build_transformer


def test_what_is_named_is_off_and_the_rest_on(monkeypatch):
    monkeypatch.setenv(switches.VARIABLE, "peers, rewrites")
    assert [switches.is_on(what) for what in switches.SWITCHES] == [False, True, False]
    monkeypatch.delenv(switches.VARIABLE)
    assert all(map(switches.is_on, switches.SWITCHES))


def test_an_unknown_word_is_refused_with_those_that_are_known(monkeypatch):
    monkeypatch.setenv(switches.VARIABLE, "rewrites,recording")
    with pytest.raises(ConfigurationError, match="recording, which cannot.*rewrites, recordings, peers"):
        parallelize(build_transformer(), FLUX, single_rank_mesh())


def test_a_transformer_without_peers_has_no_memory_of_peers(monkeypatch):
    assert parallelize(build_transformer(), FLUX, single_rank_mesh())._split.peers is not None
    monkeypatch.setenv(switches.VARIABLE, "peers")
    assert parallelize(build_transformer(), FLUX, single_rank_mesh())._split.peers is None


def test_a_rank_starts_without_torchs_compiler():
    # torch._dynamo is imported by diffusers, with names of torch._inductor; what compiles is not.
    code = "import sys, workers.rank; print([m for m in sys.modules if m.startswith('torch._inductor.codegen')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_size_is_left_open_as_torch_does_it():
    own, theirs = torch.zeros(3, 4), torch.zeros(3, 4)
    leave_open(own, 1)
    torch._dynamo.maybe_mark_dynamic(theirs, 1)
    assert own.__dict__ == theirs.__dict__ != {}
