"""The loader that a sampler's MODEL comes from, through other nodes, and not one that made its latent."""

from __future__ import annotations

from nodes.prompt_graph import find_loaders

PROMPT = {
    "8:2": {
        "class_type": "ParallelLoader",
        "inputs": {"model_name": "sub/high.safetensors", "parallel_config": ["8:1", 0]},
    },
    "3": {"class_type": "ParallelCheckpointLoader", "inputs": {"ckpt_name": "low.safetensors"}},
    "4": {"class_type": "LoraLoaderModelOnly", "inputs": {"model": ["8:2", 0], "strength_model": 1.0}},
    "5": {"class_type": "KSampler", "inputs": {"model": ["4", 0], "latent_image": ["9", 0]}},
    "6": {"class_type": "KSampler", "inputs": {"model": ["3", 0], "latent_image": ["5", 0]}},
}


def test_loaders_are_found_through_other_nodes_by_their_file():
    assert find_loaders(PROMPT.get, "5", "high.safetensors") == ["8:2"]
    assert find_loaders(PROMPT.get, "6", "low.safetensors") == ["3"]
    assert find_loaders(PROMPT.get, "6", "high.safetensors") == ["8:2"]
    assert find_loaders(PROMPT.get, "6", "other.safetensors") == []
    assert find_loaders(PROMPT.get, "", "other.safetensors") == []
