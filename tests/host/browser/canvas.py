"""ComfyUI's canvas in a headless chromium: opened, driven, looked at."""

from __future__ import annotations

import json
import os
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

READY = "() => !!(window.app && window.app.graph && window.app.canvas)"
LONGEST = 120_000
"""Milliseconds that a page has for anything, beside ten other tests."""
_OURS = "/extensions/parallel-dit/"


def why_no_browser() -> str:
    """What is missing for these tests; "" where nothing is."""
    if find_spec("playwright") is None:
        return "the package playwright is not installed"
    return "" if find_chromium() else "no chromium on the PATH (or set CHROMIUM)"


def find_chromium() -> str | None:
    """$CHROMIUM, else the one on the PATH."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


class Canvas:
    """A page with ComfyUI's canvas.

    Args:
        page: of playwright.
        errors: gets what our files throw or write to the console as an error.
    """

    def __init__(self, page: Any, errors: list[str]):
        self.page = page
        self.errors = errors
        page.on("pageerror", lambda error: self._note(f"{error}\n{error.stack}"))
        page.on("console", lambda line: line.type == "error" and self._note(f"{line.text} {line.location}"))

    def _note(self, text: str) -> None:
        if _OURS in text or "ParallelDiT" in text:
            self.errors.append(text)

    def elsewhere(self) -> Canvas:
        """The canvas in a browser that has not seen it; what goes wrong there counts here."""
        page = self.page.context.browser.new_page(viewport=self.page.viewport_size)
        return open_page(page, self.page.url.partition("#")[0], self.errors)

    def run(self, script: str, argument: Any = None) -> Any:
        """Value of a JavaScript function, awaited."""
        return self.page.evaluate(script, argument)

    def load(self, workflow: Any) -> None:
        """Open a workflow as a new tab would; what its nodes settle to is the state that an undo goes back to."""
        self.run(
            """async (workflow) => {
              await app.loadGraphData(workflow);
              await new Promise(requestAnimationFrame);
              const tracker = app.extensionManager.workflow.activeWorkflow.changeTracker;
              (tracker.captureCanvasState ?? tracker.checkState).call(tracker);  // as older frontends call it
            }""",
            workflow,
        )

    def saved(self) -> Any:
        """The workflow as the canvas would save it; in JSON, which has no "undefined"."""
        return json.loads(self.run("() => JSON.stringify(app.rootGraph.serialize())"))

    def prompt(self) -> dict[str, Any]:
        """The workflow as the server would get it."""
        return self.run("async () => (await app.graphToPrompt()).output")

    def command(self, name: str) -> None:
        """Begin a command; a dialog of its may wait for an answer."""
        self.run("(name) => { app.extensionManager.command.execute(name) }", name)

    def undo(self) -> None:
        """Undo one step."""
        self.run("() => app.extensionManager.workflow.activeWorkflow.changeTracker.undo()")

    def steps(self) -> int:
        """How many steps can be undone."""
        return self.run("() => app.extensionManager.workflow.activeWorkflow.changeTracker.undoQueue.length")

    def picture(self, path: Path) -> None:
        """A screenshot; JPEG where the name says so."""
        quality = {"quality": 85} if path.suffix == ".jpg" else {}
        self.page.screenshot(path=path, type="jpeg" if quality else "png", **quality)


def open_page(page: Any, address: str, errors: list[str]) -> Canvas:
    """ComfyUI's page, when its canvas is there."""
    page.set_default_timeout(LONGEST)
    canvas = Canvas(page, errors)
    page.goto(address)
    page.wait_for_function(READY)
    page.wait_for_function("() => !!LiteGraph.registered_node_types.ParallelLoader")
    return canvas


@contextmanager
def open_canvas(address: str, width: int = 1280, height: int = 800) -> Iterator[Canvas]:
    """ComfyUI's page, ready, without the dialog of a first visit."""
    from playwright.sync_api import sync_playwright

    request = urllib.request.Request(
        f"http://{address}/settings/Comfy.TutorialCompleted", b"true", {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=60).close()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium(), args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        try:
            page = browser.new_page(viewport={"width": width, "height": height})
            yield open_page(page, f"http://{address}/", [])
        finally:
            browser.close()
