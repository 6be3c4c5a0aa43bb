"""A child of `os.fork` ends, collects or closes an engine, and the parent's goes on."""

import json
from typing import Any

import pytest

from tests.support.engines import save_model
from tests.support.forked import start_program

CLIENTS = ("process", "attached", "remote", "thread")
WAYS = ("leave", "use", "collect", "close", "multiprocessing")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    model, folder = (tmp_path_factory.mktemp(name) for name in ("model", "socket"))
    code = "import sys\nfrom tests.support.forking import main\nmain(*sys.argv[1:])"
    with start_program(code, save_model(model), str(folder)) as process:
        out = process.stdout.read()
        assert process.wait(600) == 0, out
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return {(line["way"], line["client"]): (line["child"], line["found"]) for line in lines}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("way", WAYS)
def test_the_parents_engine_goes_on(
    found: dict[tuple[str, str], Any], way: str, client: str
) -> None:
    assert found[way, client] == (7, 8)


def test_every_way_was_tried(found: dict[tuple[str, str], Any]) -> None:
    assert set(found) == {(way, client) for way in WAYS for client in CLIENTS}
