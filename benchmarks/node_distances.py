"""Runs every node that makes a MODEL of a MODEL, with the node's own defaults, on a tiny FLUX (of ComfyUI 0.8.0 a tiny
SD3): with Load Diffusion Model and with Parallel Loader on two ranks, in a real ComfyUI on the CPU. How far apart are
the latents?

    python -m benchmarks.node_distances                 # of the ComfyUI that tests take: COMFYUI_PATH, or ~/ComfyUI
    python -m benchmarks.node_distances 'CFG|Sampling'  # of some nodes; others keep their results
    python -m benchmarks.works_with                     # then: the page

Writes benchmarks/results/works_with.json, where results of other versions of ComfyUI stay. Exits with 1 where a node
that docs/works-with.md says works does not, or one that it says is refused is not.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.works_with import MODEL_NODES, RESULTS, How

TOLERANCE = 1e-4
"""Of the latent's scale, in float32."""
_PLAIN = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
_MODEL = "MODEL"
_TOO_LONG = ("TorchCompileModel",)
"""It compiles for minutes on a CPU."""
Infos = Mapping[str, Mapping[str, Any]]


def runnable(infos: Infos) -> Iterator[str]:
    """Nodes of the table that take one MODEL and otherwise plain values, and give a MODEL first."""
    for name in sorted(MODEL_NODES):
        if name not in infos or name in _TOO_LONG:
            continue
        required = infos[name]["input"].get("required", {}).values()
        links = [given[0] for given in required if not isinstance(given[0], list) and given[0] not in _PLAIN]
        if links == [_MODEL] and infos[name]["output"][:1] == [_MODEL]:
            yield name


def measure(host: Any, only: str) -> dict[str, dict[str, Any]]:
    """By node: how far our latent is from ComfyUI's, of its scale; or what was said instead.

    Args:
        only: an expression in the names of the nodes.
    """
    from benchmarks.in_comfyui.defaults import fill
    from tests.host.test_model_nodes import with_node
    from tests.host.workflow import SAVE, Workflow

    native = Workflow(cfg=3.0, steps=3)
    infos: Infos = host.get("/object_info")
    ours = native.on("cpu:2")
    plain = host.latent(host.run(native.prompt()), SAVE)
    found: dict[str, dict[str, Any]] = {}
    for name in runnable(infos):
        if not re.search(only, name):
            continue
        runs = {}
        for which, workflow in (("alone", native), ("ours", ours)):
            graph = with_node(workflow.prompt(), name, {})
            try:
                runs[which] = host.run({**graph, "model": fill({"model": graph["model"]}, infos, "off")["model"]})
            except Exception as error:  # noqa: BLE001 - a prompt that ComfyUI does not take is a line of the table
                found[name] = {"not run": f"{type(error).__name__}: {error}"[:200]}
                break
        else:
            found[name] = _compare(runs["alone"], runs["ours"], plain, lambda run: host.latent(run, SAVE))
        print(f"{name}: {found[name]}", flush=True)
    return found


def _compare(alone: Any, ours: Any, plain: Any, latent: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for which, run in (("alone", alone), ("ours", ours)):
        if run.error is not None:
            result[f"{which} said"] = run.error["exception_message"].strip().splitlines()[0][:200]
    if result:
        return result
    wanted = latent(alone)
    scale = wanted.abs().max()
    effect = bool((wanted - plain).abs().max() > 100 * TOLERANCE * scale)
    return {"distance": float((latent(ours) - wanted).abs().max() / scale), "effect": effect}


def wrong(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Nodes that do not do what the table says."""
    names = []
    for name, each in found.items():
        refused = MODEL_NODES[name].how is How.REFUSED
        if "ours said" in each:
            as_said = refused or "alone said" in each
        else:
            as_said = "distance" not in each or each["distance"] < TOLERANCE
        if not as_said:
            names.append(name)
    return names


def main() -> int:
    """Measure, write, say what is wrong."""
    from tests.host.comfy_host import ComfyHost
    from tests.host.find_host import find_host
    from tests.host.host_models import write_models

    with tempfile.TemporaryDirectory(prefix="node-distances-") as folder:
        host = ComfyHost(find_host(), Path(folder) / "base")
        try:
            write_models(host)
            version = host.get("/system_stats")["system"]["comfyui_version"]
            began = time.monotonic()
            found = measure(host, sys.argv[1] if len(sys.argv) > 1 else "")
        finally:
            host.stop()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[version] = {**results.get(version, {}), **found}
    RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1, sort_keys=True) + "\n")
    print(f"{len(found)} nodes of ComfyUI {version} in {time.monotonic() - began:.0f} s")
    for name in wrong(found):
        print(f"not as docs/works-with.md says: {name}: {found[name]}")
    return 1 if wrong(found) else 0


if __name__ == "__main__":
    sys.exit(main())
