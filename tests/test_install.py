"""What installing the pack, or its tests, brings; and that none of it is ComfyUI's."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OF_COMFYUI = frozenset(
    {
        *("torch", "torchsde", "torchvision", "torchaudio", "numpy", "einops", "transformers", "tokenizers", "scipy"),
        *("sentencepiece", "safetensors", "aiohttp", "yarl", "pyyaml", "pillow", "tqdm", "psutil", "alembic", "av"),
        *("sqlalchemy", "filelock", "comfy-kitchen", "comfy-aimdo", "requests", "simpleeval", "blake3", "kornia"),
        *("spandrel", "pydantic", "pydantic-settings", "pyopengl", "comfy-angle"),
    }
)
"""What ComfyUI 0.8.0 to 0.33 name in their requirements.txt; its own frontend, templates and documents come besides."""
PULL_NEWER = frozenset({"diffusers", "yunchang", "huggingface-hub", "accelerate", "peft"})
"""Packages that ask for newer versions of ComfyUI's, or of what those need."""
OTHER_NAMES = {"PIL": "pillow", "websocket": "websocket-client"}
"""Modules whose package is called otherwise."""
ELSEWHERE = {"torchvision", "torchaudio", "triton", "server", "folder_paths", "flash_attn_interface", "sageattention"}
"""What comes with torch, or a stand-in replaces; ComfyUI's modules; kernels that are looked for before."""


def named(lines: list[str]) -> set[str]:
    """Packages of a list of requirements."""
    return {re.split(r"[^\w.-]", line)[0].lower() for line in lines if line.strip() and not line.startswith("#")}


def lines_of(path: str) -> list[str]:
    return (ROOT / path).read_text(encoding="utf-8").splitlines()


def test_installing_the_pack_changes_nothing_that_comfyui_has():
    asked = named(PROJECT["dependencies"]) | named(lines_of("requirements.txt"))
    assert asked == {"msgspec", "nvidia-ml-py", "packaging"}
    assert asked & (OF_COMFYUI | PULL_NEWER) == set()
    bound = [line for line in PROJECT["dependencies"] if line.startswith("packaging")]
    assert bound == ["packaging"]  # ComfyUI has one, by transformers: whichever it is will do


def test_the_tests_have_the_extra():
    assert set(PROJECT["optional-dependencies"]["diffusers"]) <= set(lines_of("tests/requirements.txt"))


def imported(folder: str) -> Iterator[tuple[str, Path]]:
    """(top level of a module, file) of each import."""
    for path in (ROOT / folder).rglob("*.py"):
        for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(statement, ast.Import):
                yield from ((alias.name.partition(".")[0], path) for alias in statement.names)
            elif isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
                yield statement.module.partition(".")[0], path


@pytest.mark.parametrize("folder", ["tests", "workers", "parallel_runtime"])
def test_what_is_imported_is_in_the_requirements(folder):
    ours = {path.name for path in ROOT.iterdir()} | {"docs", "draw_house"}
    given = named(lines_of("requirements.txt")) | named(lines_of("tests/requirements.txt")) | {"torch"}
    renamed = {**OTHER_NAMES, "pynvml": "nvidia-ml-py"}
    missing = {
        (name, str(path.relative_to(ROOT)))
        for name, path in imported(folder)
        if name not in ours | ELSEWHERE | set(sys.stdlib_module_names) | {"tomllib"}
        and not name.startswith("comfy")
        and renamed.get(name, name).lower() not in given
    }
    assert missing == set()
