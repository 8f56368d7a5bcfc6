"""Models that stream from the host's memory, which has too little for all of them: they take turns there."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.tiny_flux import tiny_config, write_diffusers_folder

CONFIG = tiny_config(num_layers=2, num_single_layers=3, num_attention_heads=2)


@pytest.mark.slow
def test_models_give_way_to_each_other_on_all_ranks_and_what_is_too_large_is_refused(tmp_path):
    files = [str(write_diffusers_folder(tmp_path / f"{seed}", CONFIG, seed=seed)) for seed in (1, 2)]
    arguments = {"path": files[0], "other": files[1], "folder": str(tmp_path)}
    for found in run_ranks(2, "tests.parallel_runtime.host_shortage_run:compare", arguments, timeout=280):
        assert all(found.values()), found
