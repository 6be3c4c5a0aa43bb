import re
from pathlib import Path

from qllm.server.config import ServerConfig
from qllm.server.metrics import Metrics
from tests.support.serving import Serving

TEXT = (Path(__file__).parents[3] / "docs" / "guides" / "serve.md").read_text()


def table(heading: str) -> list[list[str]]:
    section = TEXT.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_names_every_setting() -> None:
    named = [n for row in table("Settings of the server") for n in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted(ServerConfig.model_fields)


def test_the_page_names_the_defaults() -> None:
    for row in table("Settings of the server"):
        names = re.findall(r"`(\w+)`", row[0])
        values = [value.strip(" `") for value in row[1].split(",")]
        if len(values) != len(names) or not all(values):
            continue
        for name, text in zip(names, values, strict=True):
            default = ServerConfig.model_fields[name].default
            number = re.fullmatch(r"(\d+) (KiB|MiB)", text)
            if number:
                text = str(int(number[1]) << {"KiB": 10, "MiB": 20}[number[2]])
            if text not in ("none", "as `qllm run"):
                assert text == f"{default:g}" if isinstance(default, float) else str(default), name


def test_the_page_names_the_routes_there_are(served: Serving) -> None:
    paths = set(served.get("/openapi.json").json()["paths"]) | {"/ui", "/docs", "/openapi.json"}
    named = {n for row in table("Routes") for n in re.findall(r"(/[\w/.]+)`", row[0])}
    assert named == {path for path in paths if "{" not in path}


def test_the_page_names_metrics_that_exist() -> None:
    section = TEXT.split("## What to watch\n", 1)[1]
    ends = ("_seconds", "_total", "_perc", "_up", "_bytes", "_tokens", "_fds", "_share")
    named = {
        name
        for name in re.findall(r"`(\w+)`", section)
        if name.endswith(ends) or name.startswith("num_")
    }
    known = {
        f"{metric.name.removeprefix('qllm:')}{'_total' * (metric.type == 'counter')}"
        for metric in Metrics("m").registry.collect()
    }
    assert named == known
