"""What quantised files, step caches and a second picture in the batch do to a picture: PSNR and SSIM over 64 prompts.

    python -m benchmarks.emoji.changes --out benchmarks/results    # with a ComfyUI, as the host tests; 15 minutes

Each picture is held against Load Diffusion Model's of the plain file, with the same seed, euler, and as many steps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.picture_distance import psnr, ssim
from tests.comfyui_networks import formats
from tests.host.comfy_host import ComfyHost
from tests.host.emoji import write_emoji_model
from tests.host.find_host import find_host
from tests.host.workflow import Prompt, link, node

from .fidelity import draw, graph, prompts

LENGTHS = (4, 8, 20, 28)
FLOAT8, INT8 = "scaled_fp8", "int8_tensorwise"


@dataclass(frozen=True)
class Way:
    """How a picture is computed.

    Args:
        ranks: of ours; 0: by Load Diffusion Model.
        format: of the file; "": as it is.
        cached: behind ComfyUI's EasyCache.
        batch: pictures at once, of which the first is looked at.
    """

    ranks: int = 0
    format: str = ""
    cached: bool = False
    batch: int = 1

    def prompt(self, file: str, words: str, seed: int, steps: int) -> Prompt:
        """The graph."""
        made = graph(f"{self.format}.safetensors" if self.format else file, words, seed, self.ranks, steps, self.batch)
        if self.cached:
            settings = {"reuse_threshold": 0.2, "start_percent": 0.15, "end_percent": 0.95, "verbose": False}
            made["cache"] = node("EasyCache", model=link("model"), **settings)
            made["sampler"]["inputs"]["model"] = link("cache")
        return made


EXACT = Way()
WAYS = {
    "ours, 2 ranks": Way(2),
    "Load Diffusion Model, two pictures at once": Way(batch=2),
    "float8 file, Load Diffusion Model": Way(format=FLOAT8),
    "float8 file, ours, 2 ranks": Way(2, FLOAT8),
    "int8 file, Load Diffusion Model": Way(format=INT8),
    "int8 file, Load Diffusion Model, two at once": Way(format=INT8, batch=2),
    "int8 file, ours, 2 ranks": Way(2, INT8),
    "EasyCache, Load Diffusion Model": Way(cached=True),
    "EasyCache, ours, 2 ranks": Way(2, cached=True),
}


def write_formats(base: Path, comfyui: Path, file: str) -> None:
    """The model's file in other formats, by ComfyUI's own quantisation."""
    folder = base / "models" / "diffusion_models"
    command = [sys.executable, formats.__file__, str(comfyui), str(folder / file), str(folder), FLOAT8, INT8]
    subprocess.run(command, check=True, capture_output=True)


def pictures(host: ComfyHost, way: Way, file: str, steps: int, every: int) -> torch.Tensor:
    """(prompts / every, 3, H, W), 0 to 255."""
    asked = list(enumerate(prompts()))[::every]
    drawn = [draw(host, way.prompt(file, words, seed, steps)) for seed, words in asked]
    return torch.stack(drawn).permute(0, 3, 1, 2).float()


def cell(found: torch.Tensor, exact: torch.Tensor) -> str:
    """The distance of all pictures at once."""
    return "the same" if torch.equal(found, exact) else f"{psnr(found, exact):.1f} / {ssim(found, exact):.4f}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--every", type=int, default=1, help="of the prompts")
    options = parser.parse_args()
    lines = [f"| PSNR in dB / SSIM | {' | '.join(f'{steps} steps' for steps in LENGTHS)} |", "|---|" + "---|" * 4]
    with tempfile.TemporaryDirectory() as folder:
        host = ComfyHost(find_host(), Path(folder) / "base")
        try:
            file = write_emoji_model(host.base)
            write_formats(host.base, host.host.path, file)
            exact = {steps: pictures(host, EXACT, file, steps, options.every) for steps in LENGTHS}
            for name, way in WAYS.items():
                cells = [cell(pictures(host, way, file, steps, options.every), exact[steps]) for steps in LENGTHS]
                lines.append(f"| {name} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
        finally:
            host.stop()
    if options.out:
        (options.out / "picture_changes.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
