"""`compile` in Parallel Config has two choices; graphs and prompts of earlier versions hold true, false, or on."""

from __future__ import annotations

import pytest

from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import ConfigurationError

PUBLISHED = {
    "devices": "auto",
    "cfg": None,
    "data": None,
    "ulysses": None,
    "attention": "auto",
    "compile": False,
}
"""What Parallel Config of the first published templates hands on; the later ones only add to it."""


@pytest.mark.parametrize(("saved", "mode"), [(False, "off"), (True, "on"), ("auto", "auto"), ("on", "on")])
def test_what_earlier_versions_saved_means_on_and_off(saved, mode):
    config = ParallelConfig.from_mapping(PUBLISHED | {"compile": saved})
    assert config.compile == mode
    assert config.to_mapping()["compile"] == mode
    assert config == ParallelConfig(compile=mode)


def test_auto_is_the_default_and_compiles_on_gpus_only():
    assert ParallelConfig().compile == "auto"
    on_cpu, on_gpu = ([ParallelConfig(compile=mode).compiles(gpu) for mode in ("auto", "on", "off")] for gpu in (0, 1))
    assert on_cpu == [False, True, False]
    assert on_gpu == [True, True, False]


def test_another_word_is_refused_with_the_choices():
    with pytest.raises(ConfigurationError, match="Choose: auto, off"):
        ParallelConfig(compile="fast")
