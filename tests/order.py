"""Which test files begin first: those that take longest, lest one be all that is left when the others are through.

In the slow tier a file is one worker's (`--dist loadfile`), as tests of a file share what takes long to make: files of
models, a page with ComfyUI's canvas, a pool. One begun late is a tail that only its worker is busy with.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

LONGEST = (
    "tests/host/test_executed_templates.py",
    "tests/parallel_runtime/test_compiled_networks.py",
    "tests/host/test_model_nodes.py",
    "tests/workers/test_faults.py",
    "tests/host/test_loops.py",
    "tests/parallel_runtime/test_pipefusion.py",
    "tests/host/test_faults_in_loops.py",
    "tests/host/test_controlnet.py",
    "tests/host/test_comfyui_networks.py",
    "tests/host/test_comfyui_families.py",
    "tests/host/test_lora_combined.py",
    "tests/parallel_runtime/test_comfyui_networks.py",
    "tests/host/test_lora.py",
    "tests/parallel_runtime/test_family_calls.py",
    "tests/workers/test_compiling_in_pool.py",
    "tests/parallel_runtime/test_streamed_weights.py",
    "tests/host/test_same_picture.py",
    "tests/workers/test_several_hosts.py",
    "tests/workers/test_pool_lifetime.py",
    "tests/parallel_runtime/test_shared_vae.py",
    "tests/host/browser/test_older_comfyui.py",
    "tests/host/test_two_comfyuis.py",
    "tests/workers/test_silence.py",
    "tests/parallel_runtime/test_passes.py",
    "tests/workers/test_steps.py",
    "tests/workers/test_vae_in_pool.py",
    "tests/host/test_families.py",
    "tests/host/browser/test_panel.py",
    "tests/parallel_runtime/test_ranks_stay_together.py",
    "tests/host/test_without_extras.py",
    "tests/parallel_runtime/test_any_latent.py",
    "tests/host/test_checkpoints.py",
    "tests/parallel_runtime/test_recorded_networks.py",
    "tests/host/test_graph_stays_a_graph.py",
    "tests/parallel_runtime/test_host_file.py",
    "tests/parallel_runtime/test_same_bits.py",
    "tests/parallel_runtime/test_patching.py",
    "tests/parallel_runtime/test_own_graphs.py",
    "tests/host/browser/test_search_and_saved_workflows.py",
)
"""The longest first. The order of the others matters little."""


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items, by file; those of a file in their order, and files that are not named in theirs, behind the others."""
    places = {path: place for place, path in enumerate(LONGEST)}
    return sorted(items, key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONGEST)))
