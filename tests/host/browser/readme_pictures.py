"""`python -m tests.host.browser.readme_pictures`: the README's picture, of a run with a tiny FLUX on two CPU ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.host.comfy_host import ComfyHost
from tests.host.find_host import PACK_ROOT, find_host
from tests.host.workflow import Prompt, link, node
from tests.tiny_flux import write_original

from .canvas import Canvas, open_canvas
from .test_panel import numbered, queue, set_setting, wait_for

IMAGES = PACK_ROOT / "docs" / "images"
SHOWN = "widgets"
"""Key of a PNG's text: the widgets that it shows of nodes of ours, by which a test sees that it is up to date."""
FILE = "flux1-dev.safetensors"
_PLACES = {
    "config": ("Parallel Config", 20, 60, 340, 470),
    "loader": ("Parallel Loader", 400, 60, 370, 235),
    "positive": ("Positive prompt", 400, 340, 370, 120),
    "negative": ("Negative prompt (not used at CFG 1)", 400, 505, 370, 90),
    "latent": ("Empty latent", 400, 640, 370, 110),
    "sampler": ("", 810, 60, 330, 690),
    "save": ("Save latent", 1180, 190, 230, 60),
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
    """Text to image as an artist has it, but for texts that no encoder read."""
    auto = dict.fromkeys(("cfg", "data", "ulysses", "attention", "compile", "ring", "stages", "patches"), "auto")
    prompt = "a lighthouse keeper's cottage on a cliff at dusk, warm light in the windows, sea fog below, photograph"
    return {
        "config": node("ParallelConfig", devices="cpu:2", **auto, hosts=1, warmup_steps=1, weights="auto"),
        "loader": node(
            "ParallelLoader", model_name=FILE, weight_dtype="default", parallel_config=link("config")
        ),
        "positive": node("TestPrompt", text=prompt),
        "negative": node("TestPrompt", text=""),
        "latent": node("EmptySD3LatentImage", width=512, height=512, batch_size=1),
        "sampler": node(
            sampler, model=link("loader"), positive=link("positive"), negative=link("negative"),
            latent_image=link("latent"), seed=42, steps=steps, cfg=1.0, sampler_name="euler", scheduler="simple",
            denoise=1.0,
        ),
        "save": node("SaveLatent", samples=link("sampler"), filename_prefix="latents/picture"),
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
    """While steps are under way."""
    for name in ("Comfy.Minimap.Visible", "Comfy.Graph.CanvasInfo", "Comfy.Graph.CanvasMenu"):
        set_setting(canvas, name, False)
    open_graph(canvas, graph("KSampler", 4))
    queue(canvas, host)  # the pool is up and compiled nothing: the picture is of a run as artists know it
    canvas.run(
        "() => { for (const node of app.rootGraph.nodes) for (const widget of node.widgets ?? [])"
        " { if (widget.name === 'seed') widget.value = 43; if (widget.name === 'steps') widget.value = 30; }"
        " window.steps = 0; app.api.addEventListener('progress', () => window.steps++); }"
    )
    canvas.run("() => app.queuePrompt(0, 1)")
    wait_for(lambda: canvas.run("() => window.steps > 7") and canvas.run(_PREVIEWED), 120)
    take(canvas, "canvas.png", {"x": 62, "y": 40, "width": 1458, "height": 820})
    wait_for(lambda: not any(host.get("/queue").values()), 120)


def main() -> None:
    """Command line."""
    with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
        host = ComfyHost(find_host(), Path(folder) / "base")
        try:
            write_original(host.base / "models" / "diffusion_models" / FILE, seed=3)
            with open_canvas(host.address, 1520, 900) as canvas:
                take_picture(canvas, host)
        finally:
            host.stop()


if __name__ == "__main__":
    main()
