"""The HTTP API against a pool of two CPU ranks: status, actions, same-origin rules, and the script of docs/api.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from tests.patience import wait_until

from .find_host import PACK_ROOT
from .workflow import Workflow

pytestmark = pytest.mark.host

WORKFLOW = Workflow(loader="cpu:2", model="plan.safetensors", seed=401)


def cpu_pool(status: dict) -> dict:
    return next(pool for pool in status["pools"] if pool["kind"] == "cpu")


def states(host) -> dict[str, str]:
    return {model["name"]: model["state"] for model in cpu_pool(host.get("/parallel_dit/status"))["models"]}


@pytest.mark.slow
def test_status_tells_what_ran_and_models_are_parked_unloaded_and_come_back(host):
    assert host.run(WORKFLOW.prompt()).error is None
    # What ComfyUI lets go of when the prompt is over is told to the ranks, too.
    assert wait_until(lambda: cpu_pool(host.get("/parallel_dit/status"))["state"] == "idle")
    status = host.get("/parallel_dit/status")
    pool = cpu_pool(status)
    assert len(pool["ranks"]) == len(pool["devices"]) >= 2
    assert all(rank["device"] == "cpu" for rank in pool["ranks"])
    assert pool["details"]["degrees"]["ulysses"] == 2
    assert pool["details"]["heads"] > 0
    assert pool["host_bytes"] > 1 << 28
    run = status["runs"][0]
    assert run["model"] == "plan.safetensors"
    assert run["plan"] == pool["plan"]
    assert run["step_seconds"] > 0
    assert [span["end"] >= span["begin"] for span in status["timeline"]] == [True] * len(status["timeline"])
    assert sum(span["what"] == "step" for span in status["timeline"]) == WORKFLOW.steps
    assert states(host)["plan.safetensors"] == "resident"

    host.post("/parallel_dit/park", {"model": "plan.safetensors"})
    assert states(host)["plan.safetensors"] == "parked"
    assert host.run(replace(WORKFLOW, seed=402).prompt()).error is None
    assert states(host)["plan.safetensors"] == "resident"
    host.post("/parallel_dit/unload")
    assert states(host) == {}
    assert host.run(replace(WORKFLOW, seed=403).prompt()).error is None


@pytest.mark.slow
def test_unload_also_empties_the_pool_of_models_that_comfyui_has_dropped(host):
    """ComfyUI drops a MODEL that the workflow of now does not use; the pool keeps its weights."""
    assert host.run(WORKFLOW.prompt()).error is None
    other = replace(WORKFLOW.on("native"), seed=404)
    for seed in (404, 405):
        assert host.run(replace(other, seed=seed).prompt()).error is None
    run = host.run(replace(WORKFLOW, seed=406).prompt())
    assert run.error is None
    assert host.run(replace(other, seed=407).prompt()).error is None
    assert states(host)["plan.safetensors"] == "resident"
    host.post("/free", {"unload_models": True})
    deadline = time.monotonic() + 60
    while (found := states(host)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert found == {}
    assert "model" in run.executed  # it had been dropped


@pytest.mark.slow
def test_a_restart_gives_other_processes_and_the_next_prompt_works(host):
    assert host.run(replace(WORKFLOW, seed=404).prompt()).error is None
    before = {rank["pid"] for rank in cpu_pool(host.get("/parallel_dit/status"))["ranks"]}
    pool = cpu_pool(host.post("/parallel_dit/restart"))
    assert pool["state"] == "idle"
    assert not before & {rank["pid"] for rank in pool["ranks"]}
    assert host.run(replace(WORKFLOW, seed=405).prompt()).error is None


def test_the_nodes_say_their_english_texts_to_every_client(host):
    infos = host.get("/object_info")
    for name, texts in json.loads((PACK_ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8")).items():
        inputs = {
            key: given for part in ("required", "optional") for key, given in infos[name]["input"].get(part, {}).items()
        }
        said = {key: given[1].get("tooltip") for key, given in inputs.items()}
        assert said == {key: entry.get("tooltip") for key, entry in texts["inputs"].items()}
        assert infos[name]["output_tooltips"] == [entry["tooltip"] for entry in texts["outputs"].values()]
        assert (infos[name]["display_name"], infos[name]["description"]) == (
            texts["display_name"],
            texts["description"],
        )


@pytest.mark.slow
def test_other_sites_are_refused_wrong_requests_are_told_and_nothing_is_secret(host):
    def post(path: str, text: str, method: str = "POST", **headers: str) -> tuple[int, str]:
        request = urllib.request.Request(f"http://{host.address}{path}", text.encode(), headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    fetched = "Sec-Fetch-Site" in (host.host.path / "server.py").read_text()  # which ComfyUI 0.8.0 does not look at
    for path in ("start", "park", "unload", "stop", "restart"):
        assert post(f"/parallel_dit/{path}", "{}", Origin="http://evil.example")[0] == 403
        if fetched:
            assert post(f"/parallel_dit/{path}", "{}", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
        assert post(f"/parallel_dit/{path}", "[1]")[0] == 400
        assert post(f"/parallel_dit/{path}", "[" * 100_000)[0] == 400
        assert post(f"/parallel_dit/{path}", " " * 200_000 + "{}")[0] == 413
        for method in ("GET", "PUT", "DELETE", "PATCH"):
            assert post(f"/parallel_dit/{path}", "{}", method)[0] in (404, 405)
    assert post("/parallel_dit/error", "[" * 100_000)[0] == 400
    assert post("/parallel_dit/error", json.dumps(["a" * 10_000] * 20))[0] == 413
    # Whatever ComfyUI makes of a name that is not its own, it makes of ours: `/free` is a route of its.
    for headers in (
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"Host": "127.0.0.1:1", "Origin": "http://localhost:1"},
        {"Origin": "null"},
        {"Origin": f"http://{host.address}.evil.example"},
        {"Origin": f"https://{host.address}"},
    ):
        assert (post("/free", "{}", **headers)[0] == 403) == (post("/parallel_dit/error", "{}", **headers)[0] == 403)
    assert post("/parallel_dit/status", "", "GET", Origin="http://evil.example")[0] == 403
    code, text = post("/parallel_dit/start", '{"devices": "5"}')
    assert code == 409
    assert "asks for GPU 5" in json.loads(text)["error"]["cause"]
    assert post("/parallel_dit/park", '{"pool": "cuda:7"}')[0] == 409
    diagnostics = host.get("/parallel_dit/diagnostics")["text"]
    assert "torch" in diagnostics
    assert "last lines of pool-" in diagnostics
    for text in (diagnostics, json.dumps(host.get("/parallel_dit/status"))):
        assert str(Path.home()) + "/" not in text
        assert not re.search(r"(?i)secret|token=|password", text)


@pytest.mark.slow
def test_the_script_of_the_documentation_queues_a_prompt_on_the_default_devices_and_prints_the_plan(host, tmp_path):
    page = (PACK_ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    script = page.partition("```python\n")[2].partition("```")[0]
    assert len([line for line in script.splitlines() if line.strip()]) <= 20
    (tmp_path / "queue_parallel.py").write_text(script)
    graph = replace(WORKFLOW, loader="native", model="prefixed.safetensors", seed=406).prompt()
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    host.post("/settings", {"ParallelDiT.DefaultDevices": "cpu:2"})
    try:
        done = subprocess.run(
            [sys.executable, "queue_parallel.py", f"http://{host.address}", "graph.json"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )
    finally:
        host.post("/settings", {"ParallelDiT.DefaultDevices": ""})
    assert done.returncode == 0, done.stderr
    assert re.search(r"ulysses 2: 2 devices share .* [\d.]+ s per step", done.stdout), done.stdout
