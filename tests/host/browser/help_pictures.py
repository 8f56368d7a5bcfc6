"""`python -m tests.host.browser.help_pictures`: the help pages' pictures, of real runs on CPUs with the emoji FLUX."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from tests.host.comfy_host import ComfyHost
from tests.host.emoji import write_emoji_model
from tests.host.find_host import PACK_ROOT, find_host
from tests.host.test_doctor_node import doctor

from .canvas import Canvas, open_canvas
from .readme_pictures import graph, open_graph
from .test_panel import open_prompt, queue, set_setting

HELP = PACK_ROOT / "web" / "docs"
NAMES = {
    "ParallelConfig": "Parallel Config",
    "ParallelLoader": "Parallel Loader",
    "ParallelCheckpointLoader": "Parallel Checkpoint Loader",
    "ParallelSampler": "Parallel Sampler",
    "ParallelVAE": "Parallel VAE",
    "ParallelDoctor": "Parallel Doctor",
}
_SHOW = """([kind, title]) => {
  const node = app.rootGraph.nodes.find((node) => node.comfyClass === kind);
  node.title = title;
  app.canvas.ds.scale = 1;
  app.canvas.ds.offset = [200 - node.pos[0], 160 - node.pos[1]];
  app.canvas.setDirty(true, true);
  return node.size.slice();
}"""


def take(canvas: Canvas, kind: str) -> None:
    """A picture of the node of that type on the canvas, with a margin."""
    width, height = canvas.run(_SHOW, [kind, NAMES[kind]])
    time.sleep(0.7)  # texts follow the canvas in the next frames
    clip = {"x": 186, "y": 116, "width": width + 28, "height": height + 58}
    canvas.page.screenshot(path=HELP / kind / "node.jpg", type="jpeg", quality=80, clip=clip)


def take_all(canvas: Canvas, host: ComfyHost) -> None:
    """One picture for each page."""
    set_setting(canvas, "Comfy.Minimap.Visible", False)
    set_setting(canvas, "Comfy.Graph.CanvasInfo", False)  # it would lie over a long node
    open_graph(canvas, graph("ParallelSampler", 20))
    queue(canvas, host)
    time.sleep(8)  # the notice of the picture goes
    for kind in ("ParallelConfig", "ParallelLoader", "ParallelSampler"):
        take(canvas, kind)
    canvas.run(
        "() => { app.graph.clear(); app.graph.add(LiteGraph.createNode('ParallelCheckpointLoader'));"
        " app.graph.nodes[0].widgets[0].value = 'sd_xl_base_1.0.safetensors'; }"
    )
    take(canvas, "ParallelCheckpointLoader")
    canvas.run("() => { app.graph.clear(); app.graph.add(LiteGraph.createNode('ParallelVAE')); }")
    take(canvas, "ParallelVAE")
    open_prompt(canvas, doctor())
    queue(canvas, host)
    time.sleep(1)
    take(canvas, "ParallelDoctor")


def main() -> None:
    """Command line."""
    with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
        host = ComfyHost(find_host(), Path(folder) / "base", ["--preview-method", "taesd"])
        try:
            write_emoji_model(host.base)
            checkpoint = host.base / "models" / "checkpoints" / "sd_xl_base_1.0.safetensors"
            checkpoint.parent.mkdir(exist_ok=True)
            checkpoint.touch()  # a missing one is framed in red
            with open_canvas(host.address, height=1080) as canvas:  # the doctor's report is 820 high
                take_all(canvas, host)
        finally:
            host.stop()


if __name__ == "__main__":
    main()
