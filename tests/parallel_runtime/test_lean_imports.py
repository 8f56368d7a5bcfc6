"""A rank imports what a transformer's forward needs, and no more."""

from __future__ import annotations

import json
import subprocess
import sys

from parallel_runtime.registry import MODELS

CODE = """
import json, sys
import diffusers
from parallel_runtime.loading.lean_imports import leave_out_unused_packages
leave_out_unused_packages()
made = [getattr(diffusers, name).__name__ for name in json.loads(sys.argv[1])]
heavy = {"transformers.modeling_utils", "transformers.models.auto", "scipy.stats", "accelerate"}
print(json.dumps([made, sorted(heavy & sys.modules.keys())]))
"""


def test_every_familys_transformer_is_there_without_the_models_of_transformers_and_scipy():
    wanted = [spec.transformer_class for spec in MODELS]
    run = subprocess.run([sys.executable, "-c", CODE, json.dumps(wanted)], capture_output=True, text=True, check=True)
    made, imported = json.loads(run.stdout)
    assert made == wanted
    assert imported == []
