"""The sidebar tab against a pool of two CPU ranks, and texts on nodes, in a browser: one page for all of it."""

from __future__ import annotations

import itertools
import time

import pytest

from tests.host.test_doctor_node import doctor
from tests.host.workflow import Prompt, Workflow

from .canvas import LONGEST, Canvas

pytestmark = [pytest.mark.host, pytest.mark.slow]

PANEL = "section.pdit"
_TEXT = """(kind) => {
  const node = (app.rootGraph ?? app.graph).nodes.find((node) => node.comfyClass === kind
    || (kind === "subgraph" && node.subgraph));
  const widget = node?.widgets?.find((widget) => ["$$node-text-preview", "$$report"].includes(widget.name));
  return String(node?.parallelDitText || widget?.value || "");
}"""


_SIZES = """() => Object.fromEntries(app.rootGraph.nodes.map((node) => {
  const preview = node.widgets?.some(({ name }) => name.includes("image-preview")) || node.imgs?.length;
  return [node.id, preview ? null : [...node.size]];  // ComfyUI makes room for its own preview
}))"""


def numbered(prompt: Prompt) -> Prompt:
    """The same graph with numbers for names, as the canvas would give them."""
    numbers = {name: str(number) for number, name in enumerate(prompt, 1)}

    def renamed(value):
        return [numbers[value[0]], value[1]] if isinstance(value, list) else value

    return {
        numbers[name]: {**node, "inputs": {key: renamed(value) for key, value in node["inputs"].items()}}
        for name, node in prompt.items()
    }


def open_prompt(canvas: Canvas, prompt: Prompt) -> None:
    canvas.run("async (prompt) => { await app.loadApiJson(prompt, 'parallel'); }", numbered(prompt))


def queue(canvas: Canvas, host) -> None:
    """Run what is on the canvas, to its end."""
    canvas.run("() => app.queuePrompt(0, 1)")
    wait_for(lambda: not any(host.get("/queue").values()))


def wait_for(holds, seconds: float = LONGEST / 1000):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := holds():
            return found
        time.sleep(0.1)
    raise TimeoutError("it did not come")


def text_on(canvas: Canvas, kind: str) -> str:
    return canvas.run(_TEXT, kind)


def panel_text(canvas: Canvas) -> str:
    return canvas.page.inner_text(PANEL) if canvas.page.query_selector(PANEL) else ""


def show_panel(canvas: Canvas, on: bool) -> None:
    if bool(canvas.page.query_selector(PANEL)) != on:
        canvas.run("() => app.extensionManager.sidebarTab.toggleSidebarTab('parallel-dit')")
    wait_for(lambda: bool(canvas.page.query_selector(PANEL)) == on)


def set_setting(canvas: Canvas, name: str, value: str | bool) -> None:
    canvas.run("async ([name, value]) => { await app.extensionManager.setting.set(name, value); }", [name, value])


def test_the_panel_follows_a_prompt_and_its_buttons_work_with_the_keyboard(host, canvas, tmp_path):
    host.post("/parallel_dit/unload")
    open_prompt(canvas, Workflow(loader="cpu:2", model="plan.safetensors", seed=501, steps=6).prompt())
    show_panel(canvas, True)
    queue(canvas, host)
    wait_for(lambda: "plan.safetensors" in panel_text(canvas) and "ulysses 2" in panel_text(canvas))
    panel = canvas.page.locator(PANEL)
    assert panel.locator(".pdit-timeline").count() == 1
    assert "tokens 1 of 2" in panel_text(canvas)
    wait_for(lambda: "measured" in panel_text(canvas))  # behind the first steps
    assert "steps" in panel_text(canvas)
    overflow = "(panel) => panel.scrollWidth - panel.clientWidth"
    assert panel.evaluate(overflow) <= 0
    canvas.picture(tmp_path / "panel.png")

    wait_for(lambda: panel.locator("[data-key]").count() > 1)  # none while a busy machine lets the pool's answer wait
    buttons = panel.locator("[data-key]").evaluate_all("(all) => all.map((each) => each.dataset.key)")
    assert len(buttons) == len(set(buttons)) > 1, "a model that is loaded under two configurations stands there once"

    park = panel.locator("[data-key^='park cpu']").first
    park.focus()
    canvas.page.keyboard.press("Enter")
    wait_for(lambda: "parked" in panel_text(canvas))
    # The button cannot be pressed again: the keyboard goes on beside it, and leaves with Escape.
    focused = "() => document.activeElement?.dataset.key ?? ''"
    wait_for(lambda: canvas.run(focused).startswith("unload cpu"))
    canvas.page.keyboard.press("Escape")
    wait_for(lambda: not canvas.page.query_selector(PANEL))
    show_panel(canvas, True)
    for action in ("start", "park", "unload", "stop", "restart", "copy"):
        panel.locator(f"[data-action={action}]").wait_for()
        canvas.page.keyboard.press("Tab")
        reached = canvas.run(
            "() => { const at = document.activeElement; return [at.dataset.action, at.matches(':focus-visible')]; }"
        )
        if action == "start" and reached[0] != "start":  # where the keys are after a panel opened, the canvas decides
            panel.locator("[data-action=start]").focus()
            reached = ["start", True]
        assert reached == [action, True]
    queue_again(canvas, host, 502)
    wait_for(lambda: "loaded" in panel_text(canvas))


def queue_again(canvas: Canvas, host, seed: int) -> None:
    """The same graph with another seed: the loader comes from the cache."""
    canvas.run(
        """(seed) => { for (const node of app.rootGraph.nodes) for (const widget of node.widgets ?? [])
          if (widget.name === "seed" && node.comfyClass === "KSampler") widget.value = seed; }""",
        seed,
    )
    queue(canvas, host)


def test_light_and_dark_and_the_language_of_the_canvas(canvas, tmp_path):
    show_panel(canvas, True)

    def colour() -> str:
        return canvas.run("""() => getComputedStyle(document.querySelector("section.pdit")).color""")

    dark = colour()
    set_setting(canvas, "Comfy.ColorPalette", "light")
    wait_for(lambda: colour() != dark)
    canvas.picture(tmp_path / "light.png")
    for locale, word in (("ja", "待避"), ("zh", "移至内存"), ("en", "Park")):
        set_setting(canvas, "Comfy.Locale", locale)
        show_panel(canvas, False)
        show_panel(canvas, True)
        wait_for(lambda word=word: word in panel_text(canvas))
    set_setting(canvas, "Comfy.ColorPalette", "dark")


def test_a_panel_asks_each_second_while_it_is_open_on_a_page_that_is_seen_and_draws_what_has_changed(canvas):
    asked: list[str] = []
    canvas.page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/status") else None)

    def requests(seconds: float) -> int:
        canvas.page.wait_for_timeout(300)  # one may be on its way
        asked.clear()
        canvas.page.wait_for_timeout(1000 * seconds)
        return len(asked)

    show_panel(canvas, True)
    assert 2 <= requests(4) <= 4
    seen = "(hidden) => Object.defineProperty(document, 'hidden', { configurable: true, get: () => hidden })"
    canvas.run(seen, True)
    assert requests(2) == 0
    canvas.run(seen, False)
    assert requests(2) >= 1
    show_panel(canvas, False)
    assert requests(2) == 0
    show_panel(canvas, True)
    wait_for(lambda: canvas.page.query_selector(f"{PANEL} h3"))
    status = canvas.run("async () => await (await app.api.fetchApi('/parallel_dit/status')).json()")
    canvas.page.route("**/parallel_dit/status", lambda route: route.fulfill(json=status))
    canvas.page.wait_for_timeout(2000)
    canvas.run("() => document.querySelector('section.pdit h3').setAttribute('data-kept', '')")
    assert requests(3) >= 1
    assert canvas.page.query_selector(f"{PANEL} [data-kept]"), "what is the same is not drawn again"
    status["pools"], status["gpus"], status["notes"] = [], [], []
    wait_for(lambda: not canvas.page.query_selector(f"{PANEL} [data-kept]"))
    canvas.page.unroute("**/parallel_dit/status")


def test_texts_stand_on_sampler_loader_config_and_on_the_node_around_a_subgraph(host, canvas):
    open_prompt(canvas, Workflow(loader="cpu:2", model="plan.safetensors", seed=504, steps=3).prompt())
    before = canvas.run(_SIZES)
    queue(canvas, host)
    wait_for(lambda: "ulysses 2" in text_on(canvas, "KSampler"))
    wait_for(lambda: text_on(canvas, "ParallelLoader").startswith("One picture of "))
    after = canvas.run(_SIZES)
    assert {name: size for name, size in after.items() if size} == {name: before[name] for name in after if after[name]}
    assert "The split is chosen for the model" in text_on(canvas, "ParallelConfig")
    canvas.run(
        """() => { const graph = app.rootGraph;
          const inside = graph.nodes.filter((node) => ["ParallelConfig", "ParallelLoader"].includes(node.comfyClass));
          graph.convertToSubgraph(new Set(inside)); }"""
    )
    queue_again(canvas, host, 505)  # other numbers, but the same nodes: the loader comes from the cache
    wait_for(lambda: "ulysses 2" in text_on(canvas, "KSampler"))
    canvas.run(
        """() => { const { subgraph } = app.rootGraph.nodes.find((node) => node.subgraph);
          const loader = subgraph.nodes.find((node) => node.comfyClass === "ParallelLoader");
          loader.widgets.find(({ name }) => name === "weight_dtype").value = "fp32"; }"""
    )
    queue(canvas, host)
    wait_for(lambda: text_on(canvas, "subgraph").startswith("One picture of "))


def test_a_page_that_was_opened_since_then_says_what_cached_nodes_said(host, canvas):
    prompt = Workflow(loader="cpu:2", model="plan.safetensors", seed=511, steps=2).prompt()
    open_prompt(canvas, prompt)
    queue(canvas, host)
    wait_for(lambda: text_on(canvas, "ParallelLoader").startswith("One picture of "))
    canvas = canvas.elsewhere()
    prompt["sampler"]["inputs"]["seed"] = 512
    open_prompt(canvas, prompt)
    assert not text_on(canvas, "ParallelLoader")
    queue(canvas, host)
    wait_for(lambda: text_on(canvas, "ParallelLoader").startswith("One picture of "))
    assert "The split is chosen for the model" in text_on(canvas, "ParallelConfig")


def test_a_cancel_on_the_canvas_ends_the_run_without_an_error_and_the_model_stays(host, canvas):
    open_prompt(canvas, Workflow(loader="cpu:2", model="plan.safetensors", seed=508, steps=500).prompt())
    canvas.run("() => { window.steps = 0; app.api.addEventListener('progress', () => window.steps++); }")
    canvas.run("() => app.queuePrompt(0, 1)")
    wait_for(lambda: canvas.run("() => window.steps > 2"))
    canvas.command("Comfy.Interrupt")
    wait_for(lambda: not any(host.get("/queue").values()))
    assert canvas.run("() => window.steps") < 500
    assert canvas.page.locator(".parallel-dit-notice").count() == 0
    pools = host.get("/parallel_dit/status")["pools"]
    assert "plan.safetensors" in [model["name"] for pool in pools for model in pool["models"]]


def test_the_doctor_says_that_it_is_at_work_and_all_of_its_report_can_be_read(host, canvas, tmp_path):
    open_prompt(canvas, doctor())
    canvas.run(
        """() => { window.told = [];
          const box = document.querySelector("pre[aria-label]");
          new MutationObserver(() => window.told.push(box.textContent)).observe(box, { childList: true }); }"""
    )
    queue(canvas, host)
    end = "gloo on cpu:0,1: the right numbers"
    wait_for(lambda: end in text_on(canvas, "ParallelDoctor"))
    assert any("Checking this machine" in text for text in canvas.run("() => window.told"))
    canvas.picture(tmp_path / "doctor.png")
    hidden = canvas.run(
        "() => { const box = document.querySelector('pre[aria-label]'); return box.scrollHeight - box.clientHeight; }"
    )
    assert (
        hidden <= 0
        or canvas.run("() => getComputedStyle(document.querySelector('pre[aria-label]')).overflowY") == "auto"
    )
    size = canvas.run("() => app.rootGraph.nodes.find((node) => node.comfyClass === 'ParallelDoctor').size.slice()")
    assert size[1] > 300


def test_a_start_is_told_on_the_node_in_order(host, canvas):
    host.post("/parallel_dit/restart")
    canvas.run(
        """() => { window.states = [];
          for (const event of ["progress_text", "parallel_dit.text"])
            app.api.addEventListener(event, ({ detail }) => window.states.push(detail.text)); }"""
    )
    open_prompt(canvas, Workflow(loader="cpu:2", model="tiny.safetensors", seed=507, weight_dtype="fp32").prompt())
    queue(canvas, host)
    wait_for(lambda: canvas.run("() => window.states.some((text) => text.includes('Latent '))"))
    told = [text for text, _ in itertools.groupby(canvas.run("() => window.states"))]
    opened = next(index for index, text in enumerate(told) if text.startswith("Opening"))
    planned = next(index for index, text in enumerate(told) if text.startswith("One picture of"))
    ran = next(index for index, text in enumerate(told) if "Latent " in text)
    assert opened < planned < ran
