"""An error is on the node at fault and in a notice, in the artist's words; known obstacles when a prompt is queued."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.host.workflow import LOADER, Prompt, Workflow, link, node
from tests.patience import wait_until

from .test_panel import set_setting

pytestmark = [pytest.mark.host, pytest.mark.slow]

TITLE = "My node"


@dataclass(frozen=True)
class Fault:
    """A prompt that fails.

    Args:
        at: node at fault, whose title is TITLE.
        says: parts of the notice.
    """

    prompt: Prompt
    at: str
    says: tuple[str, ...]


def refused() -> Prompt:
    graph = Workflow(loader="cpu:2").prompt()
    graph[LOADER] = graph.pop("model")
    graph["model"] = node("SelfAttentionGuidance", model=link(LOADER), scale=0.5, blur_sigma=2.0)
    return graph


def wrong_devices() -> Prompt:
    graph = Workflow(loader="cpu:2").prompt()
    graph["config"]["inputs"]["devices"] = "seven"
    return graph


FAULTS = {
    "a node that is refused": Fault(refused(), "model", (f"“{TITLE}”",)),
    "a patch of another pack": Fault(
        Workflow(loader="cpu:2", patch="attention").prompt(), "model", (f"functions that “{TITLE}” sets",)
    ),
    "a broken file": Fault(Workflow(loader="cpu:2", model="truncated.safetensors").prompt(), "model", ("truncated",)),
    "wrong devices": Fault(wrong_devices(), "config", ("seven",)),
}

SEEN = """() => {
  const seen = (kind) => document.querySelector(`.parallel-dit-notice.${kind}`)?.innerText ?? "";
  const framed = (node) => !!node.strokeStyles["parallel-dit-fault"];  // a frontend may take has_errors away
  const marked = app.rootGraph.nodes.filter(framed).map((node) => node.title);
  return { error: seen("error"), warning: seen("warning"), foreseen: window.foreseen, marked };
}"""
_KNOWN = """async () => {
  await (await import("/extensions/parallel-dit/js/obstacles.js")).refusedNodes(); }"""
_FORESEEN = """() => { window.foreseen = "";
  window.watching ??= new MutationObserver(() => {
    window.foreseen = document.querySelector(".parallel-dit-notice.warning")?.innerText || window.foreseen;
  }).observe(document.body, { childList: true, subtree: true }) ?? true; }"""
"""Keeps the last warning, which goes when the prompt fails at what it named."""


def queue(canvas, fault: Fault) -> dict:
    fault.prompt[fault.at]["_meta"] = {"title": TITLE}
    canvas.run("(prompt) => app.loadApiJson(prompt, 'fault')", fault.prompt)
    canvas.run(_KNOWN)  # else a prompt that fails at once may do so before the page has the words
    canvas.run(_FORESEEN)
    canvas.run("() => app.queuePrompt(0, 1)")
    canvas.page.wait_for_selector(".parallel-dit-notice.error")
    return canvas.run(SEEN)


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_is_on_the_node_at_fault_and_in_a_notice(canvas, name):
    fault = FAULTS[name]
    seen = queue(canvas, fault)
    assert TITLE in seen["marked"], seen
    assert all(part in seen["error"] for part in (TITLE, *fault.says)), seen
    if name == "a node that is refused":
        assert f"“{TITLE}”: it reads attention maps in there" in seen["foreseen"], "known when it was queued"
        assert seen["warning"] == "", "the error says it"


def test_the_notice_opens_the_log(canvas):
    queue(canvas, FAULTS["a patch of another pack"])
    canvas.page.get_by_role("button", name="Show log").click()
    canvas.page.wait_for_selector(".parallel-dit-notice pre")
    assert "rank" in canvas.page.locator(".parallel-dit-notice pre").inner_text()
    canvas.page.locator(".parallel-dit-notice.error").get_by_role("button", name="Close").click()
    assert canvas.run(SEEN)["error"] == ""
    assert canvas.run(SEEN)["marked"] == [TITLE]
    canvas.run("async () => (await import('/extensions/parallel-dit/js/fault_marks.js')).clearFaults()")
    assert canvas.run(SEEN)["marked"] == []
    queue(canvas, FAULTS["a patch of another pack"])
    canvas.run("() => document.activeElement?.blur()")
    canvas.page.keyboard.press("Escape")
    canvas.page.wait_for_selector(".parallel-dit-notice.error", state="detached")


@pytest.mark.parametrize(
    ("locale", "why", "cannot"),
    [("zh", "它读取其中的注意力图", "无法承载"), ("ja", "中の注意マップを読みます", "扱えません")],
)
def test_a_refusal_is_in_the_canvas_language(canvas, locale, why, cannot):
    loader = "LiteGraph.registered_node_types.ParallelLoader"
    canvas.run(f"() => {{ window.loaderBefore = {loader}; }}")
    set_setting(canvas, "Comfy.Locale", locale)
    # The canvas makes its node types anew; one that has done so already has nothing to wait for.
    wait_until(lambda: canvas.run(f"() => !!{loader} && {loader} !== window.loaderBefore"), 10)
    canvas.page.wait_for_timeout(2000)
    try:
        assert why in queue(canvas, FAULTS["a node that is refused"])["foreseen"]
        assert cannot in queue(canvas, FAULTS["a patch of another pack"])["error"]
    finally:
        set_setting(canvas, "Comfy.Locale", "en")
