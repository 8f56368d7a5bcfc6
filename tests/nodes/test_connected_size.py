"""The size that a loader predicts for."""

from __future__ import annotations

import pytest

from nodes.prompt_graph import USUAL, find_size


def prompt(**latent: object) -> dict[str, object]:
    return {
        "1": {"class_type": "ParallelLoader", "inputs": {"model_name": "a.safetensors"}},
        "2": {"class_type": "LoraLoaderModelOnly", "inputs": {"model": ["1", 0]}},
        "3": {"class_type": "EmptySD3LatentImage", "inputs": latent},
        "4": {"class_type": "KSampler", "inputs": {"model": ["2", 0], "latent_image": ["3", 0]}},
        "5": {"class_type": "KSampler", "inputs": {"model": ["2", 0], "latent_image": ["4", 0]}},
    }


@pytest.mark.parametrize(
    ("latent", "size"),
    [
        ({"width": 832, "height": 1216, "batch_size": 1}, (832, 1216)),
        ({"width": ["9", 0], "height": 1216}, USUAL),  # another node says it
        ({"width": 832, "height": 480, "length": 81}, USUAL),  # a video
        ({"width": 64, "height": 64}, USUAL),  # too small for any plan
        ({}, USUAL),
    ],
)
def test_it_is_that_of_the_empty_picture_behind_the_loader(latent, size):
    assert find_size(prompt(**latent), "1") == size


def test_of_several_sizes_none_is_taken_and_other_loaders_are_left_out():
    graph = prompt(width=832, height=1216)
    graph["6"] = {"class_type": "EmptyLatentImage", "inputs": {"width": 2048, "height": 2048}}
    graph["7"] = {"class_type": "SamplerCustomAdvanced", "inputs": {"guider": ["8", 0], "latent_image": ["6", 0]}}
    graph["8"] = {"class_type": "BasicGuider", "inputs": {"model": ["9", 0]}}
    graph["9"] = {"class_type": "ParallelLoader", "inputs": {}}
    assert find_size(graph, "1") == (832, 1216)
    assert find_size(graph, "9") == (2048, 2048)
    graph["8"] = {"class_type": "BasicGuider", "inputs": {"model": ["2", 0]}}
    assert find_size(graph, "1") == USUAL
    assert find_size(None, None) == USUAL
