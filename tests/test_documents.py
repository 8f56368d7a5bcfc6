"""What newcomers and artists read agrees with the code: links, requirements, node texts, help pages, templates."""

from __future__ import annotations

import ast
import json
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from PIL import Image

from parallel_runtime.sampling.samplers import SUPPORTED
from parallel_runtime.switches import SWITCHES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HELP = ROOT / "web" / "docs"
LOCALES = ROOT / "locales"
LANGUAGES = ["en", "zh", "ja"]
PACKAGES = ["nodes", "workers", "parallel_runtime"]

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
LARGEST_PICTURE = 400_000


@dataclass(frozen=True)
class Node:
    """A node's inputs and number of outputs, as its schema has them: its texts are those of locales/en."""

    inputs: list[str]
    outputs: int


def read_nodes() -> dict[str, Node]:
    """Every node by its id, read from the source: no ComfyUI needed."""
    sources = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "nodes").glob("*.py"))]
    found = [node for source in sources for node in ast.walk(source)]
    calls = [call for call in found if isinstance(call, ast.Call) and ast.unparse(call.func) == "make_schema"]
    functions = {node.name: node for node in found if isinstance(node, ast.FunctionDef)}

    def entries(listed: Any) -> Iterator[ast.Call]:
        """What a list holds; `*function()` stands for the list that the function returns."""
        for entry in listed.elts:
            if isinstance(entry, ast.Starred):
                returned = functions[entry.value.func.id].body[-1]
                yield from entries(returned.value)
            else:
                yield entry

    nodes = {}
    for call in calls:
        given: dict[str, Any] = {keyword.arg or "": keyword.value for keyword in call.keywords}
        inputs = [ast.literal_eval(entry.args[0]) for entry in entries(given["inputs"])]
        nodes[ast.literal_eval(call.args[0])] = Node(inputs, len(given["outputs"].elts))
    return nodes


NODES = read_nodes()


def load_locale(language: str, name: str) -> dict[str, Any]:
    return json.loads((LOCALES / language / f"{name}.json").read_text(encoding="utf-8"))


def tracked_files() -> list[Path]:
    """Files that git knows, as far as they are still there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"no git repository here: {listed.stderr.strip()}")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_the_nodes_are_found():
    assert {"ParallelConfig", "ParallelLoader", "ParallelSampler"} <= set(NODES)
    assert {"devices", "ulysses"} <= set(NODES["ParallelConfig"].inputs)


def test_the_apis_script_hands_on_what_comfyui_says_of_a_refused_graph(tmp_path):
    """Of /prompt's status 400, urllib's error alone names no input."""
    script = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    graph = tmp_path / "graph.json"
    graph.write_text('{"1": {"class_type": "UNETLoader", "inputs": {"unet_name": "a"}}}')
    why = '{"node_errors": {"1": "Value not in list"}}'

    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the handler's own name for it
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(400)
            self.end_headers()
            self.wfile.write(why.encode())

        def log_message(self, *values: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.handle_request, daemon=True).start()
        command = [sys.executable, "-c", script, f"http://127.0.0.1:{server.server_port}", str(graph)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode != 0
    assert why in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_and_picture_exists(document):
    targets = [target for target in LINK.findall(document.read_text(encoding="utf-8")) if "://" not in target]
    assert targets or document.name != "README.md"
    assert [target for target in targets if not (document.parent / target.partition("#")[0]).exists()] == []


def anchors(document: Path) -> set[str]:
    """Of a document's headings, as GitHub makes them of what is read there."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    read = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in read}


def test_every_link_into_a_document_meets_a_heading():
    dead = []
    for document in [*DOCUMENTS, ROOT / "benchmarks" / "results" / "in_comfyui.md"]:
        for target in LINK.findall(document.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            file = document.parent / path if path else document
            if anchor and "://" not in target and file.suffix == ".md" and anchor not in anchors(file):
                dead.append((document.name, target))
    assert dead == []


def test_pictures_are_small():
    pictures = list((ROOT / "docs" / "images").iterdir())
    assert pictures
    assert [picture.name for picture in pictures if picture.stat().st_size > LARGEST_PICTURE] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_python_file_that_is_named_exists(document):
    folders = [*PACKAGES, "benchmarks", "docs", "tests"]
    paths = [*ROOT.glob("*.py"), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    files = ["/" + path.relative_to(ROOT).as_posix() for path in paths]
    named = set(re.findall(r"[\w/]+\.py\b", document.read_text(encoding="utf-8")))
    assert named or document.name != "architecture.md"
    assert [name for name in sorted(named) if not any(file.endswith("/" + name) for file in files)] == []


def test_every_mechanism_of_the_sources_has_a_place_and_a_test():
    lines = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("|") and "---" not in line]
    mechanisms = [row for row in rows if row[0].strip() != "Mechanism"]
    assert len(mechanisms) > 30
    for name, source, place, proof in mechanisms:
        assert {word.strip() for word in source.split(",")} <= {"design", "manual", "guide"}, name
        assert all((ROOT / path).is_file() for path in re.findall(r"`([\w/]+\.py)`", place) if "/" in path), name
        tests = re.findall(r"`([\w/]+\.py)::(test_\w+)`", proof)
        assert tests, name
        for path, test in tests:
            assert re.search(rf"^def {test}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), (name, test)


def test_requirements_are_those_of_the_project_and_leave_torch_alone():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.strip()]
    assert sorted(requirements) == sorted(project["dependencies"])
    assert not any(re.match(r"torch(vision|audio)?\b", line) for line in requirements)
    assert project["urls"]["Repository"] in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_registry_gets_what_it_asks_for():
    """docs.comfy.org/registry/specifications."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, comfy = content["project"], content["tool"]["comfy"]
    assert re.fullmatch(r"[a-z](?!.*[-_.]{2})[a-z0-9._-]{0,98}", project["name"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert (ROOT / project["license"]["file"]).is_file()
    assert {"PublisherId", "DisplayName", "Icon", "requires-comfyui"} == set(comfy)
    assert f'_FLOOR = "{comfy["requires-comfyui"].removeprefix(">=")}"' in (ROOT / "__init__.py").read_text()
    icon = ROOT / comfy["Icon"].partition("/main/")[2]
    width, height = struct.unpack(">II", icon.read_bytes()[16:24])  # of a PNG
    assert width <= 800
    assert height <= 400


def test_messages_that_are_explained_are_messages_of_the_code():
    files = [ROOT / "__init__.py", *(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))]
    # A message may run over several string literals; joined they read as one.
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in files))
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.partition("| You see |")[2].partition("\n\n")[0]
    first_cells = [row.split("|")[1] for row in table.splitlines()[1:]]
    messages = [text for cell in first_cells for text in re.findall(r"`([^`]+)`", cell) if " " in text]
    parts = [part.strip() for text in messages for part in text.split("…")]
    assert len(parts) > 10
    assert [part for part in parts if part not in code] == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_node_and_input_has_its_texts(language):
    texts, english = load_locale(language, "nodeDefs"), load_locale("en", "nodeDefs")
    assert set(texts) == set(NODES)
    for name, node in NODES.items():
        assert list(texts[name]["inputs"]) == node.inputs, name
        assert list(texts[name]["outputs"]) == [str(index) for index in range(node.outputs)], name
        entries, told = ([*each[name]["inputs"].values(), *each[name]["outputs"].values()] for each in (texts, english))
        assert texts[name]["display_name"]
        assert texts[name]["description"]
        assert [bool(entry.get("tooltip")) for entry in entries] == [bool(entry.get("tooltip")) for entry in told], name
        assert all(entry["name"] for entry in texts[name]["inputs"].values())
        assert all(entry["tooltip"] for entry in texts[name]["outputs"].values())


@pytest.mark.parametrize("language", LANGUAGES)
def test_nodes_speak_of_devices_and_not_of_how_they_work(language):
    texts = list(_texts(load_locale(language, "nodeDefs")))
    assert [text for text in texts if re.search(r"(?i)\brank|\bpools?\b|\bpark|\bdealt\b|进程池|プール", text)] == []


@pytest.mark.parametrize("language", ["zh", "ja"])
def test_the_other_languages_are_translated(language):
    for name, texts in load_locale(language, "nodeDefs").items():
        entries = [*texts["inputs"].values(), *texts["outputs"].values()]
        tooltips = [entry["tooltip"] for entry in entries if "tooltip" in entry]
        words = [texts["display_name"], texts["description"], *tooltips]
        assert [text for text in words if text.isascii()] == [], name


def test_the_picture_of_the_readme_shows_the_present_nodes():
    connected = {"model", "positive", "negative", "latent_image", "parallel_config"}
    definitions = json.loads((LOCALES / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    with Image.open(ROOT / "docs" / "images" / "canvas.png") as picture:
        shown = dict(line.split(": ") for line in picture.text["widgets"].splitlines())
    assert shown.keys() == {"ParallelConfig", "ParallelLoader"}
    for kind, widgets in shown.items():
        present = definitions[kind]["inputs"].keys() - connected
        assert {*widgets.split(", ")} == present, "run python -m tests.host.browser.readme_pictures"


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


@pytest.mark.parametrize("language", LANGUAGES)
def test_texts_hold_nothing_that_the_canvas_would_interpret(language):
    # vue-i18n, which shows them, reads these as parameters, links and plurals.
    for path in (LOCALES / language).glob("*.json"):
        texts = list(_texts(json.loads(path.read_text(encoding="utf-8"))))
        assert texts
        assert [text for text in texts if re.search(r"[{}|@$]", text)] == []


def _texts(item: Any) -> Iterator[str]:
    if isinstance(item, dict):
        for value in item.values():
            yield from _texts(value)
    else:
        yield item


def test_every_setting_has_one_name_everywhere():
    server = (ROOT / "nodes" / "panel" / "settings.py").read_text(encoding="utf-8")
    canvas = json.loads((ROOT / "web" / "settings.json").read_text(encoding="utf-8"))
    read = set(re.findall(r'"(ParallelDiT\.\w+)"', server))
    assert read
    assert read == {setting["id"] for setting in canvas}
    for language in LANGUAGES:
        texts = load_locale(language, "settings")
        assert set(texts) == {setting.replace(".", "_") for setting in read}
        assert language == "en" or [text for text in _texts(texts) if text.isascii() and text != "auto"] == []


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", NODES)
def test_every_node_has_a_help_page_that_explains_every_input(name, language):
    page = (HELP / name / f"{language}.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == NODES[name].inputs


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", NODES)
def test_every_help_page_has_its_picture_and_a_common_mistake(name, language):
    page = (HELP / name / f"{language}.md").read_text(encoding="utf-8")
    assert f"]({name}/node.jpg)" in page  # the canvas looks for it from the folder of all pages
    assert (HELP / name / "node.jpg").stat().st_size < LARGEST_PICTURE
    assert {"en": "## A common mistake", "zh": "## 常见错误", "ja": "## よくある間違い"}[language] in page


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_samplers_of_the_pool_are_named_as_they_are(language):
    tooltip = load_locale(language, "nodeDefs")["ParallelSampler"]["inputs"]["sampler_name"]["tooltip"]
    page = (HELP / "ParallelSampler" / f"{language}.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| `sampler_name`"))
    for text in (tooltip, row):
        assert [name for name in SUPPORTED if not re.search(rf"(?<![a-z_]){name}(?![a-z0-9_])", text)] == []


def test_every_environment_variable_and_switch_stands_in_the_table():
    code = [path for folder in ("nodes", "workers", "parallel_runtime") for path in (ROOT / folder).rglob("*.py")]
    named = {name for path in code for name in re.findall(r"\bPARALLEL_DIT_[A-Z_]+\b", path.read_text())}
    text = (ROOT / "docs" / "environment.md").read_text()
    variables = re.findall(r"^\| `(PARALLEL_DIT_[A-Z_]+)`", text, re.M)
    assert sorted(variables) == sorted(named)
    assert re.findall(r"^\| `([a-z]+)`", text, re.M) == list(SWITCHES)


def test_no_file_names_a_registry_or_a_place_of_one_machine():
    hosts = ["pypi" + ".org", "python" + "hosted", "npm" + "js.", "ana" + "conda.org", "download." + "pytorch"]
    places = ["/" + "root/", "/" + "work/"]
    home = Path.home().as_posix()
    if home.count("/") > 1:
        places.append(home + "/")
    found = []
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        found += [f"{path.relative_to(ROOT)}: {word}" for word in hosts + places if word in text]
    assert found == []
