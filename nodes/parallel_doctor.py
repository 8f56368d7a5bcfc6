"""Parallel Doctor: what works on this machine, what does not, and what to do about it."""

from __future__ import annotations

import logging
from typing import Any

from comfy_api.latest import io

from parallel_runtime.said import Said

from .interrupt import stopping_with_prompt
from .node_text import make_schema, show_text
from .panel.settings import wished_config
from .parallel_config import ConfigSocket

log = logging.getLogger("parallel_dit")
CHECKING = Said("Checking this machine ...")


class ParallelDoctor(io.ComfyNode):
    """Runs the doctor each time it is queued. A pool that runs is left alone; the check takes place beside it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            "ParallelDoctor",
            search_aliases=["multi gpu", "diagnose", "check", "nccl", "bandwidth", "parallel"],
            inputs=[ConfigSocket.Input("parallel_config", optional=True)],
            outputs=[io.String.Output()],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> float:
        """Never the same as last time: a machine changes without its inputs changing."""
        return float("nan")

    @classmethod
    def execute(cls, parallel_config: dict[str, Any] | None = None) -> io.NodeOutput:
        """Run the doctor and show its report; ConfigurationError for missing devices, PoolError for no report."""
        # Imported here and not at the top: ComfyUI's start shall not pay for it.
        from workers.doctor.__main__ import run_doctor

        config = wished_config(parallel_config)
        with stopping_with_prompt() as interrupted:
            show_text(CHECKING)
            verdict = run_doctor(config.devices, interrupted)
        log.log(logging.INFO if verdict.works else logging.WARNING, "%s", verdict.text)
        return io.NodeOutput(verdict.text, ui=show_text(verdict.text))
