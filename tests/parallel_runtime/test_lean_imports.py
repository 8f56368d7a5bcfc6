"""A rank imports what a transformer's forward needs, and no more."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from parallel_runtime.loading.checkpoint import MODELS
from tests.tiny_flux import tiny_config, write_diffusers_folder

CODE = """
import json, sys
import workers.rank.start
from parallel_runtime.networks.diffusers.lean_imports import leave_out_unused_packages
leave_out_unused_packages()
import diffusers
made = [getattr(diffusers, name).__name__ for name in json.loads(sys.argv[1])]
heavy = {"transformers", "scipy.stats", "accelerate", "sympy"}
heavy |= {"torch._dynamo", "torch._inductor", "torch.distributed._symmetric_memory"}
print(json.dumps([made, sorted(heavy & sys.modules.keys())]))
"""


@pytest.mark.slow
def test_every_familys_transformer_is_there_without_transformers_scipy_and_the_compiler():
    wanted = [spec.transformer_class for spec in MODELS]
    run = subprocess.run([sys.executable, "-c", CODE, json.dumps(wanted)], capture_output=True, text=True, check=True)
    made, imported = json.loads(run.stdout)
    assert made == wanted
    assert imported == []


PLAIN_FORWARD = """
import sys
from pathlib import Path
import workers.rank.start
from parallel_runtime.networks.diffusers.lean_imports import leave_out_unused_packages, untraced_classes
leave_out_unused_packages()
import torch
from parallel_runtime.loading.checkpoint import open_checkpoint
from benchmarks.load_transformer import load_transformer
from parallel_runtime.mesh.mesh import single_rank_mesh
from parallel_runtime.networks.diffusers.parallel_transformer import parallelize
checkpoint = open_checkpoint(Path(sys.argv[1]))
module = load_transformer(checkpoint, torch.float32, torch.device("cpu"))
wrapped = parallelize(module, checkpoint.spec, single_rank_mesh())
given = {"context": torch.zeros(1, 7, 64), "y": torch.zeros(1, 32), "guidance": torch.ones(1)}
wrapped.predict(torch.zeros(1, 16, 8, 6), torch.tensor([0.5]), given)
from parallel_runtime.attention.rotary import rotate
rotate(torch.zeros(1, 2, 2, 4), torch.zeros(2, 4), torch.zeros(2, 4))
private = ("torch._dynamo", "torch._inductor", "torch.distributed._symmetric_memory", "triton")
ours = ("compiled_methods", "passes", "peer_kernels")
unwanted = [*private, *(f"parallel_runtime.acceleration.{name}" for name in ours)]
assert not set(unwanted) & sys.modules.keys(), set(unwanted) & sys.modules.keys()
torch.compiler.allow_in_graph(list(untraced_classes(module)))
from torch._dynamo import trace_rules
blocks = {type(block) for block in module.transformer_blocks}
print([kind.__name__ for kind in blocks if trace_rules.is_callable_allowed(kind)])
"""


@pytest.mark.slow
def test_a_plain_forward_needs_no_compiler_which_learns_later_what_diffusers_says_of_its_classes(tmp_path):
    path = write_diffusers_folder(tmp_path / "tiny", tiny_config(num_layers=1, num_single_layers=1))
    run = subprocess.run([sys.executable, "-c", PLAIN_FORWARD, str(path)], capture_output=True, text=True)
    assert run.stdout == "['FluxTransformerBlock']\n", run.stderr


CHECKED = """
import json, sys
import workers.rank.start
from parallel_runtime.networks.diffusers.lean_imports import import_diffusers, leave_out_unused_packages
diffusers = import_diffusers()
diffusers.utils.USE_PEFT_BACKEND = True  # as where peft is installed
leave_out_unused_packages()
import torch
from parallel_runtime.engine.opened import DiffusersFamily
from parallel_runtime.requests.conditioning import Conditioning
from tests.families import FAMILIES
for name, family in FAMILIES.items():
    for call in family.calls:
        given = {key: value for key, value in call.items() if key not in ("x", "timestep")}
        if name == "FLUX.1":
            given["ref_latents"] = [torch.zeros(1, 16, 6, 6)]
        DiffusersFamily(family.model, family.config).check(Conditioning(given), call["x"].to("meta"))
heavy = {"torch._dynamo", "torch._inductor", "sympy", "torch.fx.experimental.symbolic_shapes"}
print(sorted(heavy & sys.modules.keys()), diffusers.utils.USE_PEFT_BACKEND)
"""


@pytest.mark.slow
def test_a_call_is_checked_before_it_runs_without_the_compiler():
    run = subprocess.run([sys.executable, "-c", CHECKED], capture_output=True, text=True)
    assert run.stdout == "[] False\n", run.stdout + run.stderr
