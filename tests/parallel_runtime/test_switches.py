"""$PARALLEL_DIT_OFF, and what a process does without that never compiles."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parallel_runtime import switches
from parallel_runtime.attention.operators import leave_open
from parallel_runtime.errors import ConfigurationError
from parallel_runtime.exchange import grown_memory
from parallel_runtime.mesh.mesh import single_rank_mesh
from parallel_runtime.networks.diffusers.flux import FLUX
from parallel_runtime.networks.diffusers.parallel_transformer import parallelize
from tests.parallel_runtime.flux_forward import build_transformer


def test_what_is_named_is_off_and_the_rest_on(monkeypatch):
    monkeypatch.setenv(switches.VARIABLE, "peers, passes")
    assert [what for what in switches.SWITCHES if not switches.is_on(what)] == ["passes", "peers"]
    monkeypatch.delenv(switches.VARIABLE)
    assert all(map(switches.is_on, switches.SWITCHES))


def test_an_unknown_word_is_refused_with_those_that_are_known(monkeypatch):
    monkeypatch.setenv(switches.VARIABLE, "passes,recording")
    with pytest.raises(
        ConfigurationError, match="recording, which cannot.*passes, recordings, peers, host, gather, blocks"
    ):
        parallelize(build_transformer(), FLUX, single_rank_mesh())


def test_a_transformer_without_peers_has_no_memory_of_peers(monkeypatch):
    assert parallelize(build_transformer(), FLUX, single_rank_mesh())._peers is not None
    monkeypatch.setenv(switches.VARIABLE, "peers")
    assert parallelize(build_transformer(), FLUX, single_rank_mesh())._peers is None


@pytest.mark.slow
def test_a_rank_starts_without_torchs_compiler():
    # torch._dynamo is imported by diffusers, with names of torch._inductor; what compiles is not.
    code = "import sys, workers.rank.start; print([m for m in sys.modules if m.startswith('torch._inductor.codegen')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def private_names(source: Path) -> list[str]:
    """Private parts of torch that a file imports or reaches for, but for its own operators' namespaces."""
    found = []
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found.append(ast.unparse(node))
    return [name for name in found if re.match(r"torch\.((?!ops\.)\w+\.)*_[a-z]", name)]


def test_two_folders_reach_for_private_parts_of_torch():
    root = Path(switches.__file__).parents[1]
    sources = {
        path.relative_to(root): path
        for part in ("nodes", "workers", "parallel_runtime")
        for path in (root / part).rglob("*.py")
    }
    reaching = {str(name.parent) for name, path in sources.items() if private_names(path)}
    assert reaching == {"parallel_runtime/acceleration", "parallel_runtime/exchange"}


@pytest.mark.parametrize("failing", ["empty", "rendezvous"])
@pytest.mark.parametrize("error", [RuntimeError(), AttributeError("renamed"), TypeError("another signature")])
def test_peer_memory_that_raises_anything_is_memory_that_is_not_there(failing, error, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(f"torch.distributed._symmetric_memory.{failing}", fail)
    said = str(error) or "RuntimeError"
    assert grown_memory._tried(lambda torchs: getattr(torchs, failing)()) == (None, said)


def test_a_size_is_left_open_as_torch_does_it():
    own, theirs = torch.zeros(3, 4), torch.zeros(3, 4)
    leave_open(own, 1)
    torch._dynamo.maybe_mark_dynamic(theirs, 1)
    assert own.__dict__ == theirs.__dict__ != {}
