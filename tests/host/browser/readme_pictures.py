"""`python -m tests.host.browser.readme_pictures`: the README's picture, a run on two CPU ranks with the emoji FLUX."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.host.comfy_host import ComfyHost
from tests.host.emoji import FLUX, VAE, write_emoji_model
from tests.host.find_host import PACK_ROOT, find_host
from tests.host.workflow import Prompt, link, node

from .canvas import Canvas, open_canvas
from .test_panel import numbered, queue, set_setting, wait_for

IMAGES = PACK_ROOT / "docs" / "images"
SHOWN = "widgets"
"""Key of a PNG's text: the widgets that it shows of nodes of ours, by which a test sees that it is up to date."""
_PLACES = {
    "config": ("Parallel Config", 20, 60, 340, 470),
    "loader": ("Parallel Loader", 400, 60, 370, 235),
    "positive": ("Prompt", 400, 340, 370, 100),
    "latent": ("Empty latent", 400, 480, 370, 110),
    "vae": ("Load VAE", 400, 635, 370, 60),
    "sampler": ("", 810, 60, 330, 690),
    "decode": ("VAE Decode", 1180, 60, 260, 60),
    "save": ("Save Image", 1180, 160, 260, 340),
}
_PLACE = """(places) => {
  places.forEach(([title, x, y, width, height], index) => {
    const node = app.rootGraph.getNodeById(index + 1);
    node.title = title || node.constructor.title;
    node.pos = [x, y];
    node.setSize([width, Math.max(height, node.computeSize()[1])]);
    for (const widget of node.widgets ?? []) if (widget.name === "control_after_generate") widget.value = "fixed";
  });
  app.canvas.ds.scale = 1;
  app.canvas.ds.offset = [70, 80];
  app.canvas.setDirty(true, true);
}"""
_WIDGETS = """() => Object.fromEntries(app.rootGraph.nodes.filter((node) => node.comfyClass.startsWith("Parallel")).map(
  (node) => [node.comfyClass, node.widgets.map((widget) => widget.name).filter((name) => !name.startsWith("$$"))]))"""
_PREVIEWED = """() => app.rootGraph.nodes.some((node) => node.comfyClass.endsWith("Sampler")
  && (node.imgs?.length || node.widgets.some((widget) => widget.name.includes("image-preview"))))"""


def graph(sampler: str, steps: int) -> Prompt:
    """Text to image as an artist has it, but for the text's encoder."""
    auto = dict.fromkeys(("cfg", "data", "ulysses", "attention", "compile", "ring", "stages", "patches"), "auto")
    return {
        "config": node("ParallelConfig", devices="cpu:2", **auto, hosts=1, warmup_steps=1, weights="auto"),
        "loader": node(
            "ParallelLoader", model_name=FLUX, weight_dtype="default", parallel_config=link("config")
        ),
        "positive": node("TestEmoji", text="rocket"),
        "latent": node("EmptySD3LatentImage", width=128, height=128, batch_size=1),
        "vae": node("VAELoader", vae_name=VAE),
        "sampler": node(
            sampler, model=link("loader"), positive=link("positive"), negative=link("positive"),
            latent_image=link("latent"), seed=42, steps=steps, cfg=1.0, sampler_name="euler", scheduler="simple",
            denoise=1.0,
        ),
        "decode": node("VAEDecode", samples=link("sampler"), vae=link("vae")),
        "save": node("SaveImage", images=link("decode"), filename_prefix="picture"),
    }  # fmt: skip


def open_graph(canvas: Canvas, prompt: Prompt) -> None:
    """Put it on the canvas, each node in its place."""
    canvas.run("async (prompt) => { await app.loadApiJson(prompt, 'flux-dev'); }", numbered(prompt))
    canvas.run(_PLACE, [_PLACES[name] for name in prompt])


def take(canvas: Canvas, name: str, clip: dict[str, int]) -> None:
    """Write a part of the page, and note in the file which widgets of our nodes it shows."""
    widgets: dict[str, Any] = canvas.run(_WIDGETS)
    path = IMAGES / name
    canvas.page.screenshot(path=path, type="png", clip=clip)
    note = PngInfo()
    note.add_text(SHOWN, "\n".join(f"{kind}: {', '.join(names)}" for kind, names in sorted(widgets.items())))
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True, pnginfo=note)


def take_picture(canvas: Canvas, host: ComfyHost) -> None:
    """When the picture is there, the sampler with its preview beside it."""
    for name in ("Comfy.Minimap.Visible", "Comfy.Graph.CanvasInfo", "Comfy.Graph.CanvasMenu"):
        set_setting(canvas, name, False)
    open_graph(canvas, graph("KSampler", 40))
    queue(canvas, host)
    wait_for(lambda: canvas.run(_PREVIEWED) and not any(host.get("/queue").values()), 120)
    canvas.page.wait_for_timeout(8000)  # the picture is fetched and drawn, and the notice of it goes
    take(canvas, "canvas.png", {"x": 62, "y": 40, "width": 1458, "height": 820})


def main() -> None:
    """Command line."""
    with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
        host = ComfyHost(find_host(), Path(folder) / "base", ["--preview-method", "taesd"])
        try:
            write_emoji_model(host.base)
            with open_canvas(host.address, 1520, 900) as canvas:
                take_picture(canvas, host)
        finally:
            host.stop()


if __name__ == "__main__":
    main()
