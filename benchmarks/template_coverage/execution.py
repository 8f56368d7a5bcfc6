"""Runs templates that convert, made small, in a real ComfyUI: with our loader, and with Load Diffusion Model."""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.in_comfyui.runs import MeasurementError
from benchmarks.in_comfyui.server import PACK_ROOT, Server, default_python
from parallel_runtime.loading.header import read_header
from tests.comfyui_networks.large_files import LARGE_FILES

from .installed import Template
from .prompt_graph import read_prompt
from .small_files import SmallFile, small_files
from .small_prompt import CannotStandIn, SmallPrompt
from .totals import Judged, known_here

DEVICES = "cpu:2"
TOLERANCE = 1e-4
"""Of the latent's scale, in float32."""
_SECONDS = 280
_WAIT_FOR_MEMORY = 120
"""Seconds that others on the machine, such as tests beside this one, have to let go of what a large file needs."""
_LARGE = 200 << 20
"""Bytes of a file that does not stay."""


@dataclass(frozen=True)
class Executed:
    """What came of a template.

    Args:
        files: small files that stood for its own.
        latents: samplers whose latents were compared.
        difference: largest, of a latent's scale; None where it did not come to one.
        error: why it did not.
        steps: why loops of it went step by step, by the pool's status.
    """

    name: str
    files: tuple[str, ...]
    latents: int = 0
    difference: float | None = None
    error: str = ""
    steps: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """It gave ComfyUI's latents."""
        return self.difference is not None and self.difference < TOLERANCE


def executable(judged: Sequence[Judged]) -> list[Judged]:
    """Those that this ComfyUI has, that convert, and for whose files there are small ones."""
    return [each for each in known_here(judged) if each.judgement.converts and small_files(each.judgement.files)]


def draw(judged: Sequence[Judged], count: int, seed: int) -> list[Judged]:
    """A sample of templates: one of each family first, as far as it goes, then any."""
    drawn = list(judged)
    random.Random(seed).shuffle(drawn)
    families: set[tuple[str, ...]] = set()
    firsts = []
    for each in drawn:
        family = tuple(runner.title for runner in each.runners)
        if family not in families:
            families.add(family)
            firsts.append(each)
    chosen = [*firsts, *(each for each in drawn if each not in firsts)][:count]
    # Templates of one file together: large files do not all stay.
    return sorted(chosen, key=lambda each: [file.key for file in _files(each).values()])


def _files(judged: Judged) -> dict[str, SmallFile]:
    files = small_files(judged.judgement.files)
    assert files is not None, judged.name
    return files


class Execution:
    """A ComfyUI with the stand-ins, and small files as they are needed.

    Args:
        comfyui: its folder.
        base: becomes its base directory.
    """

    def __init__(self, comfyui: Path, base: Path):
        self._comfyui = comfyui
        self._base = base
        self._models = base / "models" / "diffusion_models"
        self._loaded: tuple[str, ...] = ()
        self._server = Server(comfyui=comfyui, base=base, python=default_python(), arguments=["--cpu"], compile="off")
        stand_ins = Path(__file__).parent / "stand_ins"
        (base / "custom_nodes" / "stand-ins").symlink_to(stand_ins)

    @contextmanager
    def running(self) -> Iterator[None]:
        """While inside, the server runs."""
        self._server.start()
        self._infos = self._server.api.all_nodes()
        try:
            yield
        finally:
            self._server.stop()

    def execute(self, judged: Judged, template: Template) -> Executed:
        """Run one; whatever comes of it is in the result."""
        small_of = _files(judged)
        files = tuple(file.stem for file in small_of.values())
        small = SmallPrompt(judged.name, read_prompt(template.workflow), small_of.__getitem__, self._infos)
        try:
            self._leave_light(files)
            for file in small_of.values():
                self._write(file, files)
            weight_dtype = self._weight_dtype(list(small_of.values()))
            folders = {}
            for name, devices in (("native", None), ("parallel", DEVICES)):
                folder = self._base / "latents" / name
                folder.mkdir(parents=True, exist_ok=True)
                for old in folder.iterdir():
                    old.unlink()
                graph = small.make(devices, str(folder), weight_dtype)
                began = time.time()
                run = self._server.run(graph, time.monotonic() + _SECONDS)
                if run.error:
                    return Executed(judged.name, files, error=f"{name}: {run.error}"[:400])
                ran = [] if devices is None else self._runs(began)
                if devices is not None and not ran:
                    return Executed(judged.name, files, error="the pool computed nothing")
                steps = tuple(dict.fromkeys(run["why"] for run in ran if run["loop"] == "steps"))
                if judged.loops_in_pool and steps:
                    return Executed(judged.name, files, error=f"counted with its loops in the pool: {steps[0]}")
                if missing := [n for n in range(small.samplers) if not (folder / f"{n}.safetensors").exists()]:
                    return Executed(judged.name, files, error=f"{name}: ComfyUI left out samplers {missing}")
                folders[name] = folder
        except (CannotStandIn, MeasurementError) as error:
            self._server.settle(30)
            return Executed(judged.name, files, error=str(error)[:400])
        differences = []
        for number in range(small.samplers):
            wanted, latent = (load_file(folder / f"{number}.safetensors")["latent"] for folder in folders.values())
            if latent.shape != wanted.shape or not wanted.std() > 0:
                return Executed(judged.name, files, number, error=f"latents of {latent.shape} and {wanted.shape}")
            differences.append(float((latent - wanted).abs().max() / wanted.abs().max()))
        return Executed(judged.name, files, len(differences), max(differences, default=None), steps=steps)

    def _runs(self, began: float) -> list[dict[str, Any]]:
        """What the pool ran since a moment, the first of them first."""
        return [run for run in reversed(self._server.api.pool_runs()) if run["ended"] >= began]

    def _leave_light(self, wanted: tuple[str, ...]) -> None:
        """Let the models of the templates before go: ComfyUI and both ranks have a copy of each."""
        if wanted != self._loaded:
            self._server.api.unload_pools()
            self._server.api.free()
        self._loaded = wanted

    def _weight_dtype(self, files: Sequence[SmallFile]) -> str:
        """Float8 where the files' products are in it and they are large: in float32 they would need four times that."""
        large = [file for file in files if file.key in LARGE_FILES]
        return "fp8_e4m3fn" if any((self._models / file.name).stat().st_size > _LARGE for file in large) else "default"

    def _write(self, file: SmallFile, wanted: Sequence[str]) -> None:
        for path in self._models.iterdir():
            if path.stem not in wanted and path.stat().st_size > _LARGE:
                path.unlink()
        path = self._models / file.name
        if path.exists():
            return
        self._write_model(file, path)
        write_lora(path, self._base / "models" / "loras" / file.name)

    def _write_model(self, file: SmallFile, path: Path) -> None:
        if file.number > 1:  # other weights, of the same scale
            tensors = load_file(self._models / f"{file.key}.safetensors")
            rolled = {
                key: tensor.roll(file.number, -1) if tensor.ndim > 1 else tensor for key, tensor in tensors.items()
            }
            save_file(rolled, path, read_header(self._models / f"{file.key}.safetensors")[1])
        else:
            module = "tests.tiny_sdxl" if file.key == "sdxl" else "tests.comfyui_networks.write_files"
            command = [default_python(), "-m", module, str(self._comfyui), str(self._models), file.key]
            done = subprocess.run(command, cwd=PACK_ROOT, capture_output=True, text=True, check=False, timeout=_SECONDS)
            if done.returncode:
                raise MeasurementError(f"the small file {file.key} could not be written: {done.stderr[-300:]}")
        # In ComfyUI, and in both ranks.
        needed = 3 * path.stat().st_size + (2 << 30)
        if path.stat().st_size <= _LARGE:
            return
        deadline = time.monotonic() + _WAIT_FOR_MEMORY
        while psutil.virtual_memory().available < needed:
            if time.monotonic() > deadline:
                path.unlink()
                raise MeasurementError(f"no memory for three copies ({needed >> 30} GiB)")
            time.sleep(1)


def write_lora(file: Path, lora: Path) -> None:
    """A LoRA of rank 4 on three layers of a model's file."""
    with safe_open(file, framework="pt") as content:
        layers = [
            (name.removesuffix(".weight"), tuple(shape))
            for name in content.keys()  # noqa: SIM118 - it is no dict
            if name.endswith(".weight") and len(shape := content.get_slice(name).get_shape()) == 2
        ]
    drawn = torch.Generator().manual_seed(0)
    tensors = {}
    for layer, (rows, columns) in layers[:: max(1, len(layers) // 3)][:3]:
        tensors[f"diffusion_model.{layer}.lora_up.weight"] = torch.randn(rows, 4, generator=drawn) / 2
        tensors[f"diffusion_model.{layer}.lora_down.weight"] = torch.randn(4, columns, generator=drawn) / columns**0.5
    lora.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, lora)


def execute_all(
    judged: Sequence[Judged], templates: Sequence[Template], comfyui: Path, results: Path | None = None
) -> list[Executed]:
    """Run templates one after the other, and print each.

    Args:
        results: a file that gets a line of JSON for each.
    """
    by_name = {each.name: each for each in templates}
    done = []
    with tempfile.TemporaryDirectory(prefix="templates-") as folder:
        execution = Execution(comfyui, Path(folder))
        with execution.running():
            for each in judged:
                began = time.monotonic()
                found = execution.execute(each, by_name[each.name])
                done.append(found)
                shown = found.error or f"{found.difference:.1e} of scale, {found.latents} latents"
                shown += "".join(f", step by step: {why}" for why in found.steps)
                mark = "same" if found.same else "NOT"
                seconds = time.monotonic() - began
                print(f"{mark:4} {each.name} [{', '.join(found.files)}] {shown} {seconds:.0f} s", flush=True)
                if results is not None:
                    with results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(found)) + "\n")
    return done


def write_results(done: Sequence[Executed], drawn: str, path: Path) -> None:
    """What docs/models.md says of executed templates.

    Args:
        drawn: how they were chosen.
    """
    data = {
        "drawn": drawn,
        "executed": [asdict(each) for each in done if each.same],
        "left": [
            {"name": each.name, "error": each.error or f"another latent, by {each.difference}"}
            for each in done
            if not each.same
        ],
    }
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def find_comfyui() -> Path:
    """$COMFYUI_PATH, or ComfyUI in the home folder."""
    return Path(os.environ.get("COMFYUI_PATH") or Path.home() / "ComfyUI").expanduser()
