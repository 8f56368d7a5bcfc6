"""Which GPU is offered for a text encoder: by what others, the pool and the encoder take of each."""

from __future__ import annotations

from typing import Any

import pytest

from nodes.panel.encoder_gpu import find_place, place_encoders

GIB = 1 << 30
T5, FLUX = int(9.5 * GIB), int(22.2 * GIB)


@pytest.mark.parametrize(
    ("room", "pool", "gpu"),
    [
        ({0: 23, 1: 23}, (0, 1), None),  # it does not fit beside the model on the other one either
        ({0: 23, 1: 23, 2: 23}, (0, 1), 2),
        ({0: 23, 1: 23, 2: 9}, (0, 1), None),
        ({0: 31, 1: 47, 2: 79}, (0, 1, 2), 2),
        ({0: 31, 1: 47, 2: 47}, (0, 1, 2), 1),
        ({0: 47, 1: 79}, (0, 1), None),  # both fit ComfyUI's own
        ({0: 23}, (0,), None),
        ({0: 12, 1: 23, 2: 23}, (1, 2), None),  # the model is on others
        ({1: 79}, (0, 1), None),  # of ComfyUI's own GPU nothing is known
    ],
)
def test_the_gpu_with_most_room_is_offered_where_both_do_not_fit_comfyuis(room, pool, gpu):
    assert find_place(T5, FLUX, {index: size * GIB for index, size in room.items()}, pool, own=0) == gpu


def status(others: tuple[int, ...] = (1, 1, 1), total: int = 24, **known: int) -> dict[str, Any]:
    """Of GPUs of so many GiB; known: what a pool's rank takes of a model."""
    gpus = [{"index": index, "total": total * GIB, "others": taken * GIB} for index, taken in enumerate(others)]
    models = [{"name": f"{name}.safetensors", "bytes_per_rank": size} for name, size in known.items()]
    return {"gpus": gpus, "pools": [{"models": models}]}


def on_disk(kind: str, name: str) -> int:
    sizes = {
        "encoder": {"t5.safetensors": T5 - 1000, "clip_l.safetensors": 1000},
        "model": {"a/flux.safetensors": FLUX},
    }
    return sizes[kind].get(name, 0)


DUAL = ["t5.safetensors", "clip_l.safetensors", "flux", "default"]


def ask(encoders: Any, models: Any, told: dict[str, Any], pool: tuple[int, ...] = (0, 1)) -> list[Any]:
    return place_encoders({"encoders": encoders, "models": models}, told, on_disk, pool, 0, GIB)


def test_sizes_are_the_files_or_what_the_pool_knows():
    models = ["a/flux.safetensors"]
    offered = {"gpu": 2, "own": 0, "encoder": T5, "model": FLUX}
    assert ask([DUAL, ["gone.safetensors"]], models, status()) == [offered, None]
    small = status(flux=10 * GIB)  # in fp8, or a share of its blocks
    assert ask([DUAL], models, small) == [None]
    assert ask([DUAL], models, status(others=(9, 1, 1), flux=10 * GIB), (0,)) == [
        {**offered, "gpu": 1, "model": 10 * GIB}
    ]
    assert ask([DUAL], models, status(others=(1, 1, 20))) == [None]


@pytest.mark.parametrize("wish", [{}, {"encoders": 3, "models": "x"}, {"encoders": [1, None, [2]], "models": [{}]}])
def test_whatever_is_sent_is_answered(wish):
    assert [each for each in place_encoders(wish, status(), on_disk, (0, 1), 0, GIB) if each] == []
