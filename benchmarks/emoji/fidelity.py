"""How near the picture is to Load Diffusion Model's, in 8-bit pictures: 64 prompts, one, two and three ranks.

    python -m benchmarks.emoji.fidelity          # with ComfyUI where the host tests find it; five minutes of two cores

One ComfyUI runs each prompt by Load Diffusion Model and by Parallel Loader with the same seed, by KSampler, euler, in
20 steps. One process decodes all latents.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.demo import decode
from benchmarks.emoji.autoencoder import SCALE, SHIFT
from benchmarks.emoji.glyphs import names
from tests.host.comfy_host import ComfyHost
from tests.host.emoji import write_emoji_model
from tests.host.find_host import find_host
from tests.host.workflow import Prompt, link, node

PROMPTS, STEPS = 64, 20
RANKS = (1, 2, 3)


def prompts() -> list[str]:
    """So many of the model's words."""
    named = list(names().values())
    return [" ".join(named[place * len(named) // PROMPTS]) for place in range(PROMPTS)]


def graph(file: str, prompt: str, seed: int, ranks: int, steps: int = STEPS, batch: int = 1) -> Prompt:
    """A picture, or some, by Load Diffusion Model (0 ranks) or by ours."""
    loader = {"model": node("UNETLoader", unet_name=file, weight_dtype="default")}
    if ranks:
        config = node("ParallelConfig", devices=f"cpu:{ranks}")
        inputs = {"model_name": file, "weight_dtype": "default", "parallel_config": link("config")}
        loader = {"config": config, "model": node("ParallelLoader", **inputs)}
    sampling = {"steps": steps, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    return {
        **loader,
        "text": node("TestEmoji", text=prompt),
        "latent": node("EmptySD3LatentImage", width=128, height=128, batch_size=batch),
        "sampler": node(
            "KSampler", model=link("model"), positive=link("text"), negative=link("text"), latent_image=link("latent"),
            seed=seed, **sampling,
        ),
        "save": node("SaveLatent", samples=link("sampler"), filename_prefix="latents/picture"),
    }  # fmt: skip


def draw(host: ComfyHost, prompt: Prompt) -> torch.Tensor:
    """The first of its pictures, (H, W, 3) uint8."""
    return decode((host.latent(host.run(prompt), "save")[:1] - SHIFT) * SCALE)


def table(pictures: dict[int, list[torch.Tensor]]) -> str:
    """Markdown: a row for each number of ranks, beside Load Diffusion Model (0)."""
    lines = ["| | largest difference, of 255 | pixels that differ | pictures without any |", "|---|---|---|---|"]
    for ranks in RANKS:
        pairs = zip(pictures[ranks], pictures[0], strict=True)
        apart = [(ours.int() - theirs.int()).abs().amax(2) for ours, theirs in pairs]
        share = torch.stack([(each > 0).float().mean() for each in apart]).mean().item()
        same = sum(not each.any() for each in apart)
        largest = max(int(each.max()) for each in apart)
        lines.append(f"| {ranks} rank{'s'[: ranks - 1]} | {largest} | {share:.2%} | {same} of {len(apart)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    pictures: dict[int, list[torch.Tensor]] = {ranks: [] for ranks in (0, *RANKS)}
    with tempfile.TemporaryDirectory() as folder:
        host = ComfyHost(find_host(), Path(folder) / "base")
        try:
            file = write_emoji_model(host.base)
            for ranks, seen in pictures.items():
                for seed, prompt in enumerate(prompts()):
                    seen.append(draw(host, graph(file, prompt, seed, ranks)))
        finally:
            host.stop()
    print(table(pictures))


if __name__ == "__main__":
    main()
