"""Inputs of batches, and responses, that a disk has damaged or lost."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qllm.llm import QLLMEngine
from qllm.server.batch.input import Digested, checked
from qllm.server.http.access import ANYBODY
from qllm.server.state.response_store import ResponseStore
from qllm.server.state.store import Store
from tests.support.batches import COMPLETIONS, ended, line, records, start
from tests.support.serving import serving


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"def f5(") + 4] ^= 1  # another letter: still JSON
    path.write_bytes(data)


LOST: dict[str, tuple[Callable[[Path], object], set[int]]] = {
    "cut in the middle of line 4": (
        lambda path: path.write_bytes(b"".join(_lines(path)[:4]) + _lines(path)[4][:9]),
        {4, 5},
    ),
    "a flipped letter": (_flip, {5}),
    "missing": (lambda path: path.unlink(), set(range(6))),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), set(range(6))),
    "empty": (lambda path: path.write_bytes(b""), set(range(6))),
    "two lines in each other's place": (
        lambda path: path.write_bytes(
            b"".join(_lines(path)[n] for n in (1, 0, 2, 3, 4)) + _lines(path)[5]
        ),
        {0, 1},
    ),
    "zeros": (lambda path: path.write_bytes(bytes(path.stat().st_size)), set(range(6))),
    "more lines": (lambda path: path.write_bytes(path.read_bytes() + b"\n{}\n"), {5}),
}


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("expires", [False, True])
@pytest.mark.parametrize("how", LOST)
def test_a_batch_whose_input_is_damaged_ends_with_an_error_for_each_line_that_is(
    engine: QLLMEngine, tmp_path: Path, how: str, expires: bool
) -> None:
    store = Store(tmp_path)
    text = "\n".join(line(n) for n in range(6)).encode()
    file = store.add_file(ANYBODY, "in", io.BytesIO(text), len(text))
    batch_id = store.add_batch(ANYBODY, COMPLETIONS, file["id"], {}, -1 if expires else 600)["id"]
    lines = Digested(io.BytesIO(text))
    assert len(list(lines)) == 6
    store.accept(batch_id, bytes(lines.of_lines), 6)
    damage, lost = LOST[how]
    damage(store.path(file["id"]))
    store.close()
    with serving(engine, state_dir=tmp_path) as served, served.client() as client:
        batch = ended(client, batch_id)
        assert batch.status == ("expired" if expires else "completed")
        good, bad = records(client, batch.output_file_id), records(client, batch.error_file_id)
        assert served.get(f"/v1/files/{file['id']}/content").status_code == 500
        if not expires:
            for record in good:
                number = int(record["custom_id"].removeprefix("line-"))
                want = client.completions.create(
                    model="tiny", prompt=f"def f{number}(", max_tokens=4, seed=number
                )
                assert record["response"]["body"]["choices"][0]["text"] == want.choices[0].text
    told = {r["error"]["line"] - 1 for r in bad if r["error"]["code"] == "input_damaged"}
    assert told == lost
    assert len(good) + len(bad) == 6
    if expires:
        kept = {r["custom_id"] for r in bad if r["error"]["code"] == "batch_expired"}
        assert kept == {f"line-{n}" for n in range(6) if n not in lost}


@pytest.mark.parametrize("damage", [_flip, lambda path: path.unlink()])
def test_an_input_that_is_damaged_before_it_is_validated_fails_its_batch(
    engine: QLLMEngine, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    with serving(engine, state_dir=tmp_path) as served, served.client() as client:
        text = "\n".join(line(n) for n in range(6)).encode()
        file = client.files.create(file=("in", text), purpose="batch")
        damage(tmp_path / "files" / file.id)
        how: Any = {"endpoint": COMPLETIONS, "completion_window": "24h"}
        batch = ended(client, client.batches.create(input_file_id=file.id, **how).id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "input_damaged")


def test_a_batch_of_an_older_release_is_held_to_being_json(tmp_path: Path) -> None:
    text = line(0).encode() + b"\n{\n" + b'{"custom_id": 1, "body": {}}\n'
    (tmp_path / "in").write_bytes(text)
    found = list(checked(tmp_path / "in", 4, None))
    assert found[0] == (0, line(0).encode() + b"\n")
    assert found[1:] == [(1, None), (2, None), (3, None)]


def test_a_response_that_is_damaged_ends_as_failed(engine: QLLMEngine, tmp_path: Path) -> None:
    store = Store(tmp_path)
    row: dict[str, Any] = {"id": "resp_1", "status": "queued", "previous_response_id": None}
    ResponseStore(store).add(ANYBODY, "{}", "[]", row)
    store._db.execute("UPDATE responses SET response = '{'")
    store.close()
    with serving(engine, state_dir=tmp_path) as served:
        for _ in range(100):
            found = served.get("/v1/responses/resp_1")
            if found.status_code == 200:
                break
        assert found.json()["error"]["code"] == "response_damaged"


def test_a_good_batch_is_answered_and_leaves_no_digests(engine: QLLMEngine, tmp_path: Path) -> None:
    with serving(engine, state_dir=tmp_path) as served, served.client() as client:
        batch = ended(client, start(client, [line(n) for n in range(3)]).id)
        assert batch.status == "completed"
        assert len(records(client, batch.output_file_id)) == 3
    store = Store(tmp_path)
    assert not store.rows("SELECT * FROM batch_inputs")
    store.close()
