"""The pages of docs/reference are those that the code makes, and name all there is."""

import ast
import re

import pytest

from qllm.config import EngineConfig
from qllm.ray.settings import RaySettings
from qllm.server.config import ServerConfig
from qllm.server.metrics import Metrics
from scripts import reference
from tests.support.files import ROOT
from tests.support.serving import Serving

FOLDER = ROOT / "docs" / "reference"
SERVE = (ROOT / "docs" / "guides" / "serve.md").read_text()


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return reference.pages()


def named(text: str) -> set[str]:
    """Return what the first cells of the tables of a page name."""
    return set(re.findall(r"^\| `([^`]+)` \|", text, re.M))


def test_the_pages_are_those_that_the_code_makes(made: dict[str, str]) -> None:
    for name, text in made.items():
        assert (FOLDER / name).read_text() == text, "run `python -m scripts.reference --write`"


def test_the_page_names_every_setting(made: dict[str, str]) -> None:
    settings = {*ServerConfig.model_fields, *RaySettings.model_fields}
    settings |= EngineConfig.__dataclass_fields__.keys()
    assert settings <= named(made["settings.md"])


def test_the_page_names_every_default(made: dict[str, str]) -> None:
    for name, field in ServerConfig.model_fields.items():
        if isinstance(field.default, int | float) and not isinstance(field.default, bool):
            assert f"| `{name}` | `{field.default}` |" in made["settings.md"]


def test_the_page_names_the_routes_there_are(served: Serving, made: dict[str, str]) -> None:
    paths = served.get("/openapi.json").json()["paths"]
    routes = {f"{method.upper()} {path}" for path in paths for method in paths[path]}
    found = {name for name in named(made["http.md"]) if " /" in name}
    assert found == routes


def test_the_guide_names_the_routes_there_are(served: Serving) -> None:
    paths = {*served.get("/openapi.json").json()["paths"], "/ui", "/docs", "/openapi.json"}
    rows = SERVE.split("## Routes\n", 1)[1].split("\n## ", 1)[0]
    found = set(re.findall(r"`(/[\w/.]+)`", rows))
    assert found == {path for path in paths if "{" not in path} | {"/ui"}


def test_the_page_names_the_metrics_there_are(made: dict[str, str]) -> None:
    known = {
        f"{metric.name}{'_total' * (metric.type == 'counter')}"
        for metric in Metrics("m").registry.collect()
    }
    found = named(made["metrics.md"])
    assert known == {name for name in found if not name.startswith("qllm:fleet_")}
    assert "qllm:fleet_engine_up" in found


def test_every_code_of_an_error_in_the_code_is_on_the_page(made: dict[str, str]) -> None:
    source = "".join(file.read_text() for file in (ROOT / "qllm" / "server").rglob("*.py"))
    assert set(re.findall(r'\bcode="(\w+)"', source)) <= named(made["errors.md"])


def test_each_setting_of_a_policy_has_a_meaning_and_its_defaults() -> None:
    rows = {name: (defaults, text) for name, defaults, text in reference._of_policies()}
    assert [name for name, (_, text) in rows.items() if not text] == []
    defaults, text = rows["`max_prompt_gap_ms`"]
    of = {each.partition(":")[0]: each for each in defaults.split("; ")}
    assert {"`None`", "`100`"} == of.keys()
    assert "`qllm2`" in of["`100`"]
    assert "`fcfs`" in of["`None`"]
    assert text.startswith("Longest gap between two tokens")  # of RankPolicy, which has the field


def test_a_type_of_the_page_is_no_path_of_a_module(made: dict[str, str]) -> None:
    assert "TextPart" in made["http.md"]
    assert re.findall(r"\w+__\w+", made["http.md"]) == []


def test_no_link_of_a_page_is_cut_by_the_end_of_a_line(made: dict[str, str]) -> None:
    for text in made.values():
        assert re.findall(r"\]\([^)\n]*\n", text) == []


def test_a_message_that_a_second_line_lengthens_is_whole() -> None:
    source = """
    def refuse():
        text = f"the body has {size} bytes of "
        text += "JSON; send less"
        raise ApiError(400, text, code="too_much")
    """
    tree = ast.parse("if True:" + source)
    assert list(reference._coded(tree)) == [
        ("too_much", "400", "the body has ... bytes of JSON; send less")
    ]


@pytest.mark.parametrize("width", [10, 40])
def test_a_long_cell_goes_on_in_the_rows_below(width: int) -> None:
    text = "words " * 60 + "`some code`"
    lines = reference.table(("a", "b"), [("x" * width, text)])
    assert max(map(len, lines)) <= reference.WIDTH
    cells = [line.strip("| ").split("|")[-1].strip() for line in lines[2:]]
    assert " ".join(cells) == text
