"""`python -m tests.host.browser.draw_examples`: writes example_workflows/ of examples.py, each with its picture."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.emoji.drawing import Artist
from tests.host.comfy_host import ComfyHost
from tests.host.find_host import PACK_ROOT, find_host
from tests.host.workflow import Prompt

from .canvas import Canvas, open_canvas
from .cards import SCENES, draw_card
from .example_files import model_entry
from .examples import EXAMPLES, Example

FOLDER = PACK_ROOT / "example_workflows"
_NOTE = """## {title}

{words}

All GPUs take part; without **Parallel Config** the split is chosen for the model and the picture. *Use one GPU* in the
loader's menu brings ComfyUI's own loader back. Files that are missing are offered for download.
"""

_SAVE = """async ([prompt, note, entries]) => {
  await app.loadApiJson(prompt, "example");
  const graph = app.rootGraph;
  for (const node of graph.nodes) {
    const found = (node.widgets ?? []).map((widget) => entries[widget.value]).filter(Boolean);
    if (found.length) node.properties.models = found;
    node.title = LiteGraph.registered_node_types[node.type].title;
    node.setSize([Math.max(node.size[0], node.type === "CLIPTextEncode" ? 400 : 300), node.size[1]]);
  }
  graph.arrange(70);
  const left = Math.min(...graph.nodes.map((node) => node.pos[0]));
  const top = Math.min(...graph.nodes.map((node) => node.pos[1]));
  const words = LiteGraph.createNode("MarkdownNote");
  graph.add(words);
  words.widgets[0].value = note;
  words.setSize([420, 240]);
  words.pos = [left - 500, top];
  await new Promise((done) => setTimeout(done, 300));
  const saved = JSON.parse(JSON.stringify(graph.serialize()));
  for (const node of saved.nodes) delete node.properties.ver;
  return saved;
}"""


_BY_HAND = {
    "parallel-flux-dev-two-gpus": ("FLUX.1 dev", "text to image, KSampler"),
    "flux-dev-parallel-sampler": ("FLUX.1 dev", "text to image, Parallel Sampler"),
    "parallel-flux-dev-pipefusion": ("FLUX.1 dev", "PipeFusion, for slow links"),
    "parallel-wan-text-to-video": ("Wan 2.1", "text to video"),
}
"""Examples whose graphs are not made here: title and use of their cards."""


def draw_all_cards() -> None:
    """Draw them anew: `python -c "from tests.host.browser.draw_examples import *; draw_all_cards()"` does no more."""
    artist = Artist()
    titles = {name: (example.title, example.use) for name, example in EXAMPLES.items()} | _BY_HAND
    for name, (title, use) in titles.items():
        draw_card(artist, SCENES[name], title, use, FOLDER / f"{name}.jpg")


def _numbered(prompt: Prompt) -> Prompt:
    """With numbers for names, as the canvas gives its nodes."""
    numbers = {name: str(number) for number, name in enumerate(prompt, 1)}

    def moved(value: Any) -> Any:
        return [numbers[value[0]], value[1]] if isinstance(value, list) else value

    return {
        numbers[name]: {**each, "inputs": {key: moved(value) for key, value in each["inputs"].items()}}
        for name, each in prompt.items()
    }


def save(canvas: Canvas, name: str, example: Example) -> dict[str, Any]:
    """An example as the canvas saves it."""
    values = [value for each in example.prompt.values() for value in each["inputs"].values()]
    entries = {value: model_entry(value) for value in values if isinstance(value, str) and model_entry(value)}
    note = _NOTE.format(title=example.title, words=example.words)
    return canvas.run(_SAVE, [_numbered(example.prompt), note, entries])


def main() -> int:
    """Command line; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="canvas-") as folder:
        comfy = ComfyHost(find_host(), Path(folder) / "base")
        try:
            with open_canvas(comfy.address) as canvas:
                for name, example in EXAMPLES.items():
                    saved = save(canvas, name, example)
                    text = json.dumps(saved, indent=1, ensure_ascii=False) + "\n"
                    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
                    print(name, len(text), flush=True)
        finally:
            comfy.stop()
    draw_all_cards()
    return 0


if __name__ == "__main__":
    sys.exit(main())
