"""Which test files begin first: those that take longest, lest one be all that is left when the others are through.

In the slow tier a file is one worker's (`--dist loadfile`), as tests of a file share what takes long to make: files of
models, a page with ComfyUI's canvas, a pool. One begun late is a tail that only its worker is busy with.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

LONGEST = (
    "tests/host/test_loops.py",
    "tests/host/test_executed_templates.py",
    "tests/host/test_faults_in_loops.py",
    "tests/host/test_comfyui_families.py",
    "tests/host/test_controlnet.py",
    "tests/parallel_runtime/test_compiled_networks.py",
    "tests/host/test_comfyui_networks.py",
    "tests/parallel_runtime/test_host_file.py",
    "tests/parallel_runtime/test_comfyui_stages.py",
    "tests/parallel_runtime/test_patching.py",
    "tests/parallel_runtime/test_family_forward.py",
    "tests/parallel_runtime/test_same_bits.py",
    "tests/test_in_comfyui.py",
    "tests/host/test_random_prompts.py",
    "tests/host/test_doctor_node.py",
    "tests/workers/test_faults.py",
    "tests/parallel_runtime/test_pipefusion.py",
    "tests/workers/test_steps.py",
    "tests/host/browser/test_panel.py",
    "tests/parallel_runtime/test_wan_forward.py",
    "tests/parallel_runtime/test_family_calls.py",
    "tests/host/test_checkpoints.py",
    "tests/workers/test_doctor_check.py",
    "tests/parallel_runtime/test_lean_imports.py",
    "tests/workers/test_compiling_in_pool.py",
    "tests/host/browser/test_use_all_gpus.py",
    "tests/host/browser/test_errors_on_the_canvas.py",
    "tests/workers/test_pool_lifetime.py",
    "tests/host/browser/test_search_and_saved_workflows.py",
)
"""The longest first. The order of the others matters little."""


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items, by file; those of a file in their order, and files that are not named in theirs, behind the others."""
    places = {path: place for place, path in enumerate(LONGEST)}
    return sorted(items, key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONGEST)))
