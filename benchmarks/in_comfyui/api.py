"""ComfyUI's HTTP interface, as far as the measurements need it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from .graphs import Graph
from .runs import MeasurementError

_REPLY_SECONDS = 60


class Api:
    """One ComfyUI, which may come back at another address."""

    def __init__(self) -> None:
        self.address = ""
        """Such as 127.0.0.1:8188; known when it starts."""
        self._infos: dict[str, Any] = {}

    def answers(self) -> bool:
        """Whether it is up."""
        try:
            self.system_stats()
        except OSError:
            return False
        return True

    def queue(self, graph: Mapping[str, Any], client: str, previews: bool) -> str:
        """Queue a prompt of a client; return its id.

        Raises:
            MeasurementError: ComfyUI refused it.
        """
        content = {
            "prompt": graph,
            "client_id": client,
            "extra_data": {"preview_method": "latent2rgb" if previews else "none"},
        }
        return self._post("/prompt", content)["prompt_id"]

    def nodes(self, graph: Graph) -> Mapping[str, Any]:
        """What ComfyUI says of the nodes in a graph, and of others that were asked for before.

        Raises:
            MeasurementError: it does not have one of them.
        """
        for kind in {content["class_type"] for content in graph.values()} - set(self._infos):
            found = self._get(f"/object_info/{kind}")
            if kind not in found:
                raise MeasurementError(f"this ComfyUI has no node {kind}")
            self._infos.update(found)
        return self._infos

    def all_nodes(self) -> Mapping[str, Any]:
        """What ComfyUI says of all its nodes."""
        self._infos.update(self._get("/object_info"))
        return self._infos

    def events(self, prompt: str) -> Any:
        """What the pack of the benchmark has noted of a prompt."""
        return self._get(f"/benchmark/events/{prompt}")

    def outputs(self, prompt: str) -> Mapping[str, Any]:
        """What a prompt has left, by node."""
        return self._get(f"/history/{prompt}").get(prompt, {}).get("outputs", {})

    def idle(self) -> bool:
        """Nothing runs or waits."""
        queue = self._get("/queue")
        return not queue["queue_running"] and not queue["queue_pending"]

    def interrupt(self) -> None:
        """Cancel what is running."""
        self._post("/interrupt", {})

    def free(self) -> None:
        """What *Unload Models* and *Free model and node cache* do."""
        self._post("/free", {"unload_models": True, "free_memory": True})

    def pool_runs(self) -> list[dict[str, Any]]:
        """The pools' last runs, the newest first."""
        return self._get("/parallel_dit/status")["runs"]

    def unload_pools(self) -> None:
        """Let the pools' models go, also those that no MODEL stands for any more."""
        self._post("/parallel_dit/unload", {})

    def stop_pools(self) -> None:
        """End the pools; the next prompt starts them."""
        self._post("/parallel_dit/stop", {})

    def system_stats(self) -> Any:
        """What ComfyUI says of itself and its machine."""
        return self._get("/system_stats")

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=_REPLY_SECONDS) as answer:
            return json.load(answer)

    def _post(self, path: str, content: dict[str, Any]) -> Any:
        data, header = json.dumps(content).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{self.address}{path}", data, header)
        try:
            with urllib.request.urlopen(request, timeout=_REPLY_SECONDS) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise MeasurementError(f"ComfyUI refused {path}: {text[:600]}") from error
