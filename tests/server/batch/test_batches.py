import io
import os
import re
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from qllm.errors import ConfigError
from qllm.llm import QLLMEngine
from qllm.server.batch import worker
from qllm.server.batch.worker import problems
from qllm.server.http.errors import ApiError
from qllm.server.requests.apart import LONG, Apart
from qllm.server.state.response_store import ResponseStore
from qllm.server.state.store import TABLES, Store
from tests.support.batches import COMPLETIONS, RESPONSES, ended, line, records, start
from tests.support.forked import start_program
from tests.support.serving import Serving, serving
from tests.support.waiting import wait_for


@pytest.mark.parametrize("endpoint", [COMPLETIONS, "/v1/chat/completions", RESPONSES])
def test_a_batch_answers_as_the_endpoint_does(client: openai.OpenAI, endpoint: str) -> None:
    made = start(client, [line(n, endpoint) for n in range(12)], endpoint)
    assert (made.object, made.status, made.metadata) == ("batch", "validating", {"a": "ü"})
    batch = ended(client, made.id)
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 12, "completed": 12, "failed": 0}
    assert made.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.error_file_id is None
    found = records(client, batch.output_file_id)
    assert [r["custom_id"] for r in found] == [f"line-{n}" for n in range(12)]
    assert {r["response"]["status_code"] for r in found} == {200}
    assert {r["response"]["body"]["service_tier"] for r in found} == {"flex"}
    ask: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "seed": 5}
    if endpoint == RESPONSES:
        response = Response.model_validate(found[5]["response"]["body"])
        how: dict[str, Any] = {"model": "tiny", "max_output_tokens": 4, "extra_body": {"seed": 5}}
        want = client.responses.create(input="def f5(", **how)
        assert (response.output_text, response.status) == (want.output_text, "incomplete")
        assert found[5]["response"]["body"]["store"] is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)
        return
    choice = found[5]["response"]["body"]["choices"][0]
    if endpoint == COMPLETIONS:
        assert choice["text"] == client.completions.create(prompt="def f5(", **ask).choices[0].text
    else:
        chat: Any = [{"role": "user", "content": "def f5("}]
        answer = client.chat.completions.create(messages=chat, **ask)
        assert choice["message"]["content"] == answer.choices[0].message.content


def test_a_response_in_a_batch_stands_alone(client: openai.OpenAI) -> None:
    wrong: list[dict[str, Any]] = [
        {"previous_response_id": "resp_x"}, {"background": True}, {"store": True},
        {"stream": True}, {"model": "gpt"},
    ]  # fmt: skip
    lines = [line(n, RESPONSES, **more) for n, more in enumerate([*wrong, {"store": False}])]
    batch = ended(client, start(client, lines, RESPONSES).id)
    assert batch.request_counts.model_dump() == {"total": 6, "completed": 1, "failed": 5}
    found = records(client, batch.error_file_id)
    for record, more in zip(found, wrong, strict=True):
        error = record["response"]["body"]["error"]
        assert error["param"] == next(iter(more)), error


def test_wrong_lines_are_in_the_error_file(client: openai.OpenAI) -> None:
    lines = [
        line(0), line(1, temperature=300), line(2, stream=True), line(3, model="gpt"),
        line(4, stopp=1), line(5, prompt=""), line(6),
    ]  # fmt: skip
    batch = ended(client, start(client, lines).id)
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 7, "completed": 2, "failed": 5}
    good, bad = records(client, batch.output_file_id), records(client, batch.error_file_id)
    assert [r["custom_id"] for r in good] == ["line-0", "line-6"]
    assert [(r["custom_id"], r["response"]["status_code"]) for r in bad] == [
        ("line-1", 400), ("line-2", 400), ("line-3", 404), ("line-4", 400), ("line-5", 400),
    ]  # fmt: skip
    assert bad[0]["response"]["body"]["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([], "empty_file", None),
        ([line(0), "{"], "invalid_json_line", 2),
        ([line(0), "[1]"], "invalid_line", 2),
        ([line(0), line(1, "/v1/chat/completions")], "mismatched_url", 2),
        ([line(0), line(1), line(0)], "duplicate_custom_id", 3),
        ([line(0).replace('"POST"', '"GET"')], "mismatched_url", 1),
        ([line(0).replace('"custom_id"', '"id"')], "invalid_line", 1),
        (["[" * 100_000], "invalid_json_line", 1),
    ],
)
def test_a_file_that_is_no_batch_fails(
    client: openai.OpenAI, lines: list[str], code: str, number: int | None
) -> None:
    batch = ended(client, start(client, lines).id)
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert next((e.code, e.line) for e in batch.errors.data) == (code, number)
    assert batch.output_file_id is None


def test_a_batch_has_a_largest_size() -> None:
    text = line(0).encode()
    many = (text.replace(b"line-0", b"line-%d" % n) for n in range(50_002))
    assert [p.code for p in problems(many, COMPLETIONS, 1 << 20)[1]] == ["too_many_lines"]


def test_a_line_is_no_larger_than_a_body_may_be() -> None:
    """It is refused before it is parsed, which would hold up everybody."""
    lines = iter([b"[" * 5000, b'{"custom_id": "a"'])
    total, found = problems(lines, COMPLETIONS, 4096)
    assert total == 2
    assert [p.code for p in found] == ["line_too_large", "invalid_json_line"]
    assert "5000 bytes; at most 4096 (max_body_bytes)" in found[0].message


def test_an_upload_that_fails_leaves_nothing(tmp_path: Path) -> None:
    class Full:
        def read(self, size: int = -1) -> bytes:
            raise OSError(28, "No space left on device")

    store = Store(tmp_path)
    with pytest.raises(OSError, match="No space"):
        store.add_file("a", "f.jsonl", Full())  # type: ignore[arg-type]
    assert not list((tmp_path / "files").iterdir())
    store.close()
    (tmp_path / "files" / "file-1.part").write_bytes(b"half")  # a server was killed
    Store(tmp_path).close()
    assert not list((tmp_path / "files").iterdir())


def test_a_cancelled_batch_keeps_what_was_answered(
    client: openai.OpenAI, engine: QLLMEngine
) -> None:
    lines = [line(0, max_tokens=1)]
    lines += [line(n, max_tokens=3000, ignore_eos=True) for n in range(1, 30)]
    batch = start(client, lines)
    wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch.id)
    assert batch.status == "cancelled"
    assert batch.cancelled_at is not None
    found = records(client, batch.output_file_id)
    assert len(found) == batch.request_counts.completed < 30
    assert found[0]["custom_id"] == "line-0"
    wait_for(lambda: engine.stats()["num_live"] == 0)
    assert client.batches.cancel(batch.id).status == "cancelled"
    done = ended(client, start(client, [line(0)]).id)
    with pytest.raises(openai.ConflictError, match="completed"):
        client.batches.cancel(done.id)


def test_a_batch_over_its_time_expires(
    engine: QLLMEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qllm.server.batch.batches.WINDOW_S", 1)
    with serving(engine, state_dir=tmp_path) as served, served.client() as client:
        lines = [line(0), *(line(n, max_tokens=4000, ignore_eos=True) for n in range(1, 20))]
        batch = ended(client, start(client, lines).id)
        assert batch.status == "expired"
        assert batch.expired_at is not None
        good, bad = records(client, batch.output_file_id), records(client, batch.error_file_id)
    assert {r["custom_id"] for r in good + bad} == {f"line-{n}" for n in range(20)}
    assert len(good) + len(bad) == 20
    assert {r["error"]["code"] for r in bad} == {"batch_expired"}


def test_ls_does_not_wait_for_a_batch(client: openai.OpenAI, served: Serving) -> None:
    lines = [line(n, max_tokens=400, ignore_eos=True) for n in range(40)]
    batch = start(client, lines)
    wait_for(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    answer = served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    assert answer.status_code == 200
    assert client.batches.retrieve(batch.id).status == "in_progress"
    client.batches.cancel(batch.id)
    ended(client, batch.id)


def test_files(client: openai.OpenAI, served: Serving) -> None:
    made = [
        client.files.create(file=(f"{n}.jsonl", line(n).encode()), purpose="batch")
        for n in range(3)
    ]
    assert (made[0].filename, made[0].bytes, made[0].status) == (
        "0.jsonl", len(line(0)), "processed",
    )  # fmt: skip
    assert client.files.content(made[1].id).text == line(1)
    assert [f.id for f in client.files.list(limit=2).data] == [made[2].id, made[1].id]
    listed = [f.id for f in client.files.list(limit=2, order="asc")]
    assert listed[-3:] == [f.id for f in made]
    assert [f.id for f in client.files.list(after=made[1].id, order="asc")] == [made[2].id]
    assert not client.files.list(purpose="batch_output", after=made[0].id, order="asc").data
    assert client.files.delete(made[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made[0].id)
    with pytest.raises(openai.BadRequestError, match="'batch'"):
        client.files.create(file=("a", b"a"), purpose="assistants")
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(
            file=("a", b"a"),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
    wrong = served.post("/v1/batches", {"input_file_id": "../batch.db", "endpoint": COMPLETIONS,
                                        "completion_window": "24h"})  # fmt: skip
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "file_not_found")
    assert served.get("/v1/files/..%2Fbatch.db/content").status_code == 404


def test_a_file_in_use_stays(client: openai.OpenAI) -> None:
    batch = start(client, [line(n, max_tokens=4000, ignore_eos=True) for n in range(9)])
    with pytest.raises(openai.ConflictError, match="cancel it first"):
        client.files.delete(batch.input_file_id)
    client.batches.cancel(batch.id)
    ended(client, batch.id)
    assert client.files.delete(batch.input_file_id).deleted


def test_a_key_sees_only_its_own(engine: QLLMEngine, tmp_path: Path) -> None:
    with (
        serving(engine, state_dir=tmp_path, api_keys="a,b") as served,
        served.client("a") as ours,
        served.client("b") as theirs,
    ):
        batch = start(ours, [line(0)])
        assert ended(ours, batch.id).status == "completed"
        assert not theirs.files.list().data
        assert not theirs.batches.list().data
        for read in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
            with pytest.raises(openai.NotFoundError):
                read(batch.input_file_id)
        for act in (theirs.batches.retrieve, theirs.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                act(batch.id)
        assert [b.id for b in ours.batches.list()] == [batch.id]


def test_without_a_state_dir_there_are_no_batches(engine: QLLMEngine) -> None:
    with serving(engine) as served:
        answer = served.get("/v1/batches")
        assert answer.status_code == 404
        assert "needs --state-dir" in answer.json()["error"]["message"]


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ConfigError, match="used by another server"):
        Store(tmp_path)
    store._db.execute("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(ConfigError, match="has version 99"):
        Store(tmp_path)


def test_a_folder_of_version_1_is_brought_up_to_date(tmp_path: Path) -> None:
    """Its batches go on, its answers are kept, and responses have a place."""
    with closing(sqlite3.connect(tmp_path / "batch.db")) as old:
        old.executescript(f"{TABLES} PRAGMA user_version = 1;")
        old.execute("INSERT INTO files VALUES ('file-1', 'me', 'in', 'batch', 1, 1)")
        names = "id, owner, endpoint, input_file_id, status, metadata, created_at, expires_at"
        old.execute(
            f"INSERT INTO batches ({names}, total) VALUES "
            f"('batch_1', 'me', '{COMPLETIONS}', 'file-1', 'in_progress', '{{}}', 1, 9, 2)"
        )
        old.execute("INSERT INTO answers VALUES ('batch_1', 0, 1, '{}')")
        old.commit()
    for _ in range(2):  # the second finds it up to date
        store = Store(tmp_path)
        assert store.unfinished() == ["batch_1"]
        assert store.answered("batch_1") == {0}
        assert store.batch("batch_1")["total"] == 2
        assert store.file("file-1", "me") is not None
        kept = ResponseStore(store)
        response_id = f"resp_{len(kept.unfinished())}"
        row = {"id": response_id, "status": "queued", "previous_response_id": None}
        kept.add("me", "{}", "[]", row)
        assert kept.get(response_id, "me") == row
        assert store.rows("SELECT 1 FROM sqlite_master WHERE name = 'responses_by_age'")
        store.close()


def test_a_half_made_end_is_made_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    file = store.add_file("me", "in", io.BytesIO(b"x"))
    batch_id = store.add_batch("me", COMPLETIONS, file["id"], {}, 60)["id"]
    store.move(batch_id, "in_progress", only_from=("validating",), total=3)
    for number, is_ok in ((2, True), (0, True), (1, False)):
        store.answer(batch_id, number, is_ok, {"line": number})
    store.move(batch_id, "finalizing", only_from=("in_progress",))
    output = f"file-{batch_id.removeprefix('batch_')}-output"
    store.path(f"{output}.part").write_text("half")
    store.path(output).write_text("a whole file that no row names")
    store.close()
    store = Store(tmp_path)
    assert store.unfinished() == [batch_id]
    for _ in range(2):
        store.finish(batch_id, "completed")
    ended_ = store.batch(batch_id)
    assert ended_["status"] == "completed"
    assert store.path(ended_["output_file_id"]).read_text() == '{"line": 0}\n{"line": 2}\n'
    assert store.path(ended_["error_file_id"]).read_text() == '{"line": 1}\n'
    assert [row["id"] for row in store.page("files", "me", None, 9)] == [
        ended_["error_file_id"], ended_["output_file_id"], file["id"],
    ]  # fmt: skip
    store.close()


# -- a server that is killed


HOLDS = """
import itertools
from qllm.server.state.store import Store
answer, numbers = Store.answer, itertools.count()
def hold(*arguments):
    if next(numbers) >= {}:
        raise OSError("the disk is full")
    answer(*arguments)
Store.answer = hold
"""
"""The beginning of a program whose server can write so many answers of lines."""
SERVE = """
import os
for number in (1, 2):
    os.dup2(os.open({!r}, os.O_WRONLY | os.O_APPEND), number)
from qllm.cli import main
main()
"""


class Process:
    """`qllm serve` as its own process.

    Args:
        state: Its folder.
        most: Answers of lines that its disk has room for.
    """

    def __init__(self, state: Path, most: int | None = None) -> None:
        log = state / f"log-{time.monotonic_ns()}"
        log.touch()
        code = f"{'' if most is None else HOLDS.format(most)}{SERVE.format(str(log))}"
        self.process = start_program(
            code, "serve", "tiny", "--port", "0", "--threads", "1", "--state-dir", str(state),
            "--set", "conformance=false",
        )  # fmt: skip
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()
        wait_for(lambda: self.process.poll() is not None or "http://" in log.read_text(), 120)
        url = re.search(r"http://\S+", log.read_text())
        assert url, log.read_text()
        self.client = openai.OpenAI(base_url=f"{url[0]}/v1", api_key="none", max_retries=20)
        self.client.models.list()

    def end(self, how: signal.Signals) -> int:
        self.client.close()
        self.process.send_signal(how)
        return int(self.process.wait(60))


def num_completed(server: Process, batch_id: str) -> int:
    return int(server.client.batches.retrieve(batch_id).request_counts.completed)


def test_batches_go_on_after_a_server_that_was_killed_and_one_that_was_drained(
    engine: QLLMEngine, tmp_path: Path
) -> None:
    """SIGTERM leaves the batch for later and lets a stream end; the next server has the rest."""
    num_lines = 40
    lines = [line(n, max_tokens=40, ignore_eos=True) for n in range(num_lines)]
    server = Process(tmp_path, most=8)
    batch_id = start(server.client, lines).id
    wait_for(lambda: num_completed(server, batch_id) == 8)
    assert server.end(signal.SIGKILL) == -signal.SIGKILL

    server = Process(tmp_path, most=16)
    assert num_completed(server, batch_id) >= 8
    wait_for(lambda: num_completed(server, batch_id) == 24)
    stream = server.client.completions.create(
        model="tiny", prompt="x", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    assert list(stream)[-1].choices[0].finish_reason == "length"
    url = str(server.client.base_url)
    server.client.close()
    assert server.process.wait(240) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    store = Store(tmp_path)
    assert store.batch(batch_id)["status"] == "in_progress"
    store.close()

    with serving(engine, state_dir=tmp_path) as served, served.client() as client:
        batch = ended(client, batch_id, 120)
        assert batch.status == "completed"
        counts = {"total": num_lines, "completed": num_lines, "failed": 0}
        assert batch.request_counts.model_dump() == counts
        found = records(client, batch.output_file_id)
    assert [r["custom_id"] for r in found] == [f"line-{n}" for n in range(num_lines)]
    assert {r["response"]["body"]["usage"]["completion_tokens"] for r in found} == {40}


def gone(*_: Any) -> None:
    os._exit(1)


def test_a_line_that_takes_too_much_is_an_error_and_the_others_are_answered(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, do = worker.line_of, Apart.do
    lines = [line(0), line(1, prompt="a" * LONG)]
    with monkeypatch.context() as patch:
        patch.setattr(worker, "line_of", gone)

        def doing(apart: Apart, num_bytes: int, function: Any, *args: Any, **how: Any) -> Any:
            is_short = function is gone and num_bytes < LONG
            return do(apart, num_bytes, read if is_short else function, *args, **how)

        patch.setattr(Apart, "do", doing)
        batch = ended(client, start(client, lines).id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    (failed,) = records(client, batch.error_file_id)
    assert failed["custom_id"] == "line-1"
    assert failed["response"]["body"]["error"]["code"] == "body_too_costly"


def test_a_line_whose_name_takes_too_much_is_an_error_and_the_others_are_answered(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    do = Apart.do

    def doing(apart: Apart, num_bytes: int, function: Any, *args: Any, **how: Any) -> Any:
        is_ended = function in (worker.line_of, worker.custom_id_of) and num_bytes >= LONG
        return do(apart, num_bytes, *((gone,) if is_ended else (function, *args)), **how)

    with monkeypatch.context() as patch:
        patch.setattr(Apart, "do", doing)
        batch = ended(client, start(client, [line(0), line(1, prompt="a" * LONG)]).id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    (failed,) = records(client, batch.error_file_id)
    assert failed["custom_id"] is None
    assert failed["response"]["body"]["error"]["code"] == "body_too_costly"


def test_a_batch_whose_file_takes_too_much_fails_and_says_so(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    do = Apart.do

    def doing(apart: Apart, num_bytes: int, function: Any, *args: Any, **how: Any) -> Any:
        what = (gone,) if function is worker.problems_of else (function, *args)
        return do(apart, num_bytes, *what, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Apart, "do", doing)
        batch = ended(client, start(client, [line(0, prompt="a" * LONG)]).id)
    assert batch.status == "failed"
    assert [e.code for e in batch.errors.data] == ["body_too_costly"]


def test_a_batch_waits_for_the_process_that_reads_long_bodies(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    do, ended_once = Apart.do, set()

    def doing(apart: Apart, num_bytes: int, function: Any, *args: Any, **how: Any) -> Any:
        if function in (worker.problems_of, worker.line_of) and function not in ended_once:
            ended_once.add(function)
            raise ApiError(503, "it was ended")
        return do(apart, num_bytes, function, *args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Apart, "do", doing)
        batch = ended(client, start(client, [line(0, prompt="a" * LONG)]).id)
    assert (batch.status, len(ended_once)) == ("completed", 2)
