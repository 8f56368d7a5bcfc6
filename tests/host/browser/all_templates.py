"""`python -m tests.host.browser.all_templates`: "Use all GPUs" on official templates, in a browser.

On all of those whose nodes this ComfyUI has. Prints each that is not as it should be; --write FILE adds the result as
JSON, which docs/models.md is made with.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from benchmarks.template_coverage.installed import PACKAGE, installed_version, read_templates
from benchmarks.template_coverage.totals import judge_all, known_here
from tests.host.comfy_host import ComfyHost
from tests.host.find_host import find_host

from .canvas import open_canvas
from .conversion import convert_and_compare, touch_files


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.host.browser.all_templates", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--only", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    templates = {each.name: each for each in read_templates()}
    here = known_here(judge_all(list(templates.values())))
    judged = [each for each in here if each.name in (arguments.only or templates)]
    failed: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="canvas-") as folder:
        comfy = ComfyHost(find_host(), Path(folder) / "base")
        try:
            for each in judged:
                touch_files(templates[each.name], comfy.base / "models")
            infos = comfy.get("/object_info")
            with open_canvas(comfy.address) as canvas:
                for each in judged:
                    wrong = convert_and_compare(canvas, templates[each.name], each, infos)
                    if wrong:
                        failed[each.name] = wrong
                    print("NOT " if wrong else "ok  ", each.name, *wrong[:2], flush=True)
                if canvas.errors:
                    failed["console"] = canvas.errors
        finally:
            comfy.stop()
    converted = sum(each.judgement.converts for each in judged)
    print(f"{len(judged) - len(failed)} of {len(judged)} as judged ({converted} convert)", failed.get("console", ""))
    if arguments.write is not None:
        data = {
            "package": f"{PACKAGE} {installed_version()}",
            "frontend": metadata.version("comfyui-frontend-package"),
            "templates": len(judged),
            "converted": converted,
            "failed": failed,
        }
        arguments.write.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
