"""What the server keeps: private, and right on disks that are full, read-only or damaged."""

import asyncio
import io
import json
import logging
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from qllm.errors import ConfigError, QllmError
from qllm.llm import QLLMEngine
from qllm.server.app import create_app
from qllm.server.config import load_config
from qllm.server.http.errors import ANTHROPIC, ApiError
from qllm.server.state.response_store import ResponseStore
from qllm.server.state.store import Store
from tests.support.batches import COMPLETIONS
from tests.support.serving import Serving, serving

ASKED = {"model": "tiny", "input": "a", "max_output_tokens": 3, "temperature": 0}


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Collect what the server logs, tracebacks included; a server that starts takes it away."""
    lines: list[str] = []

    class Collects(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(logging.Formatter().format(record))

    handler, logger = Collects(), logging.getLogger("qllm.server")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def modes(folder: Path) -> dict[str, int]:
    paths = [folder, *folder.rglob("*")]
    return {str(p.relative_to(folder)): stat.S_IMODE(p.stat().st_mode) for p in paths}


def assert_private(folder: Path) -> None:
    for name, mode in modes(folder).items():
        assert mode == (0o700 if name in (".", "files") else 0o600), name


def filled(folder: Path) -> Store:
    """A store with a file, a batch and a response."""
    store = Store(folder)
    file = store.add_file("me", "in", io.BytesIO(b"x"))
    store.add_batch("me", COMPLETIONS, file["id"], {}, 60)
    row = {"id": "resp_1", "status": "completed", "previous_response_id": None, "text": "a" * 9000}
    ResponseStore(store).add("me", "{}", "[]", row)
    return store


# -- others on this host


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o177, 0o777])
def test_what_is_kept_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = filled(tmp_path / "state")
    finally:
        os.umask(before)
    assert_private(tmp_path / "state")
    assert {"lock", "batch.db", "batch.db-wal", "batch.db-shm"} < set(modes(tmp_path / "state"))
    store.close()


def test_a_folder_that_the_server_makes_was_never_open(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with log_lines() as logged:
            Store(tmp_path / "new" / "state").close()
    finally:
        os.umask(before)
    assert logged == []


def test_an_older_folder_is_closed_to_others_and_that_is_said_once(tmp_path: Path) -> None:
    store, folder = filled(tmp_path / "state"), tmp_path / "state"
    for path in (folder, *folder.rglob("*")):  # while it is open: the WAL is there
        path.chmod(0o755 if path.is_dir() else 0o644)
    store._db.execute("PRAGMA wal_checkpoint")
    os.close(store._held)  # as a server that was killed
    for number in (1, 0):
        with log_lines() as logged:
            again = Store(folder)
        assert_private(folder)
        assert ["open to other users" in text for text in logged] == [True] * number
        again.close()
    store._db.close()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o711, 0o1777])
def test_a_folder_that_others_need_is_refused_and_left_as_it_is(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "theirs").write_text("x")
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="holds 'theirs', which is not the server's"):
        Store(folder)
    assert modes(folder)["."] == mode
    assert stat.S_IMODE((folder / "theirs").stat().st_mode) == 0o644


def test_links_are_not_followed(tmp_path: Path) -> None:
    (theirs := tmp_path / "theirs").write_text("x")
    theirs.chmod(0o644)
    (files := tmp_path / "state" / "files").mkdir(parents=True)
    (files / "file-1").symlink_to(theirs)
    (tmp_path / "state").chmod(0o755)
    with pytest.raises(ConfigError):  # files without a database: something is missing
        Store(tmp_path / "state")
    assert stat.S_IMODE(theirs.stat().st_mode) == 0o644


# -- a database that is damaged


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _put(at: int, data: bytes) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(data)

    return put


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": _cut,
    "cut off by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "without a header": _put(0, bytes(100)),
    "zeros in page 3": _put(2 * 4096, bytes(4096)),
    "flipped in page 2": _put(4096, b"\xff" * 100),
    "another program's": lambda path: path.write_bytes(b"hello" * 3000),
    "an older version than its tables": _put(60, bytes(4)),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_database_is_told_at_the_start_with_the_way_out(tmp_path: Path, how: str) -> None:
    filled(tmp_path).close()
    DAMAGE[how](tmp_path / "batch.db")
    before = modes(tmp_path).keys()
    with pytest.raises(ConfigError, match=r"(?s)state_dir=.*\.recover.*move the folder away"):
        Store(tmp_path)
    assert modes(tmp_path).keys() >= before - {"batch.db"}, "nothing is thrown away"


def test_a_table_that_is_missing_is_damage(tmp_path: Path) -> None:
    filled(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "batch.db")) as db:
        db.execute("DROP TABLE response_events")
    with pytest.raises(ConfigError, match="it has no response_events"):
        Store(tmp_path)


def test_a_folder_that_cannot_be_made_names_the_setting() -> None:
    with pytest.raises(ConfigError, match="state_dir='/proc/x' cannot be used"):
        Store(Path("/proc/x"))


def test_what_a_killed_server_left_behind_is_removed(tmp_path: Path) -> None:
    store = filled(tmp_path)
    (kept,) = (tmp_path / "files").iterdir()
    for name in ("file-2", "file-3.part"):
        store.path(name).write_text("half")
    store.close()
    Store(tmp_path).close()
    assert list((tmp_path / "files").iterdir()) == [kept]


# -- disks without room


def _full(store: Store) -> None:
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")


def _read_only(store: Store) -> None:
    store._db.execute("PRAGMA query_only = ON")


def _has_room(store: Store) -> None:
    store._db.execute("PRAGMA max_page_count = 1000000000")
    store._db.execute("PRAGMA query_only = OFF")


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[Store]:
    """Collect the stores that servers make."""
    made: list[Store] = []
    real = Store.__init__

    def init(self: Store, *args: Any, **keywords: Any) -> None:
        real(self, *args, **keywords)
        made.append(self)

    monkeypatch.setattr(Store, "__init__", init)
    return made


def assert_no_room(answer: httpx.Response) -> None:
    assert answer.status_code == 507, answer.text
    assert answer.json()["error"]["code"] == "storage_full"
    assert int(answer.headers["retry-after"]) > 0


def upload(served: Serving, size: int = 10, **headers: str) -> httpx.Response:
    files = {"file": ("a.jsonl", b"x" * size)}
    how = {"data": {"purpose": "batch"}, "headers": headers, "timeout": 60}
    return httpx.post(f"{served.url}/v1/files", files=files, **how)  # type: ignore[arg-type]


def test_every_route_that_stores_says_that_there_is_no_room(
    engine: QLLMEngine, tmp_path: Path, stores: list[Store]
) -> None:
    with serving(engine, state_dir=tmp_path) as served:
        file = upload(served).json()["id"]
        kept = served.post("/v1/responses", ASKED).json()["id"]
        late = served.post("/v1/responses", {**ASKED, "background": True})
        assert late.status_code == 200
        batch = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
        _read_only(stores[0])
        told = []
        for method, path, body in (
            ("POST", "/v1/batches", batch),
            ("POST", "/v1/responses", {**ASKED, "background": True}),
            ("POST", "/v1/responses", {**ASKED, "background": True, "stream": True}),
            ("DELETE", f"/v1/files/{file}", None),
            ("DELETE", f"/v1/responses/{kept}", None),
        ):
            with log_lines() as logged:
                answer = httpx.request(method, f"{served.url}{path}", json=body, timeout=60)
            assert_no_room(answer)
            told.append([text for text in logged if "nothing of this request is kept" in text])
        assert [len(lines) for lines in told] == [1] * 5
        assert not any("Traceback" in text for lines in told for text in lines)
        assert_no_room(upload(served))
        assert [p.name for p in (tmp_path / "files").iterdir()] == [file]
        _has_room(stores[0])
        assert upload(served).status_code == 200


@pytest.mark.parametrize("fault", [_full, _read_only])
def test_an_ls_answer_that_cannot_be_stored_is_given_and_says_so(
    engine: QLLMEngine, tmp_path: Path, stores: list[Store], fault: Callable[[Store], None]
) -> None:
    with serving(engine, state_dir=tmp_path) as served:
        want = served.post("/v1/responses", ASKED).json()
        fault(stores[0])
        asked = {**ASKED, "metadata": {"a": "b" * 400}, "input": "a" + " " * 20_000}
        found = served.post("/v1/responses", ASKED | {"metadata": asked["metadata"]})
        for _ in range(40):  # until the database has no page left
            if "not_stored" in found.json():
                break
            found = served.post("/v1/responses", ASKED | {"metadata": asked["metadata"]})
        body = found.json()
        assert found.status_code == 200
        assert body["output"][0]["content"] == want["output"][0]["content"]
        assert body["store"] is False
        assert body["not_stored"]["code"] == "storage_full"
        assert served.get(f"/v1/responses/{body['id']}").status_code == 404
        _read_only(stores[0])
        text = served.post("/v1/responses", {**ASKED, "stream": True}).text
        last = json.loads(text.strip().rsplit("data: ", 1)[1])["response"]
        assert last["not_stored"]["code"] == "storage_full"
        assert last["output"][0]["content"] == want["output"][0]["content"]
        _has_room(stores[0])
        again = served.post("/v1/responses", ASKED).json()
        assert again["store"] is True
        assert "not_stored" not in again
        assert served.get(f"/v1/responses/{again['id']}").status_code == 200


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("number", [28, 30, 122])
def test_a_disk_without_room_for_an_upload_keeps_nothing(
    engine: QLLMEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with serving(engine, state_dir=tmp_path) as served:
        monkeypatch.setattr(f"qllm.server.state.store.os.{call}", full)
        assert_no_room(upload(served))
        monkeypatch.undo()
        assert not list((tmp_path / "files").glob("file-*[0-9a-f]")) or call == "replace"
        assert upload(served).status_code == 200


def test_a_full_disk_where_uploads_are_written_aside_is_no_wrong_request(
    engine: QLLMEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("starlette.formparsers.MultiPartParser.parse", full)
    with serving(engine, state_dir=tmp_path) as served:
        assert_no_room(upload(served))


def test_a_transaction_that_fails_leaves_none_open(tmp_path: Path) -> None:
    store = filled(tmp_path)
    _full(store)
    with pytest.raises(sqlite3.OperationalError, match="full"):  # noqa: SIM117
        with store.change() as db:
            db.executemany(
                "INSERT INTO response_events VALUES ('x', ?, ?)",
                [(n, "y" * 4000) for n in range(99)],
            )
    _has_room(store)
    assert store.rows("SELECT count(*) AS n FROM response_events") == [{"n": 0}]
    store.add_batch("me", COMPLETIONS, "file-1", {}, 60)
    store.close()


def test_a_key_keeps_so_many_bytes_and_others_go_on(engine: QLLMEngine, tmp_path: Path) -> None:
    def key(name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {name}"}

    settings: dict[str, Any] = {"api_keys": "a,b", "max_key_bytes": 5000}
    with serving(engine, state_dir=tmp_path, **settings) as served:
        first = upload(served, 4900, **key("a")).json()["id"]
        refused = upload(served, 2000, **key("a"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "storage_quota")
        assert "max_key_bytes" in refused.json()["error"]["message"]
        assert upload(served, 2000, **key("b")).status_code == 200
        mine = served.post("/v1/responses", ASKED, headers=key("a")).json()
        assert (mine["store"], mine["not_stored"]["code"]) == (False, "storage_quota")
        late = served.post("/v1/responses", {**ASKED, "background": True}, headers=key("a"))
        assert late.status_code == 413
        assert served.post("/v1/responses", ASKED, headers=key("b")).json()["store"] is True
        httpx.delete(f"{served.url}/v1/files/{first}", headers=key("a"))
        assert upload(served, 2000, **key("a")).status_code == 200


def test_bytes_of_a_key_are_those_of_what_it_keeps(tmp_path: Path) -> None:
    store = Store(tmp_path)
    kept = ResponseStore(store)

    def sums() -> tuple[int, int]:
        files = store.rows("SELECT coalesce(sum(bytes), 0) AS n FROM files")[0]["n"]
        sizes = "sum(length(asked) + length(input) + length(response))"
        rows = store.rows(f"SELECT coalesce({sizes}, 0) AS n FROM responses")
        used = store.rows("SELECT bytes FROM used WHERE owner = 'me'")
        return files + rows[0]["n"], used[0]["bytes"] if used else 0

    file = store.add_file("me", "in", io.BytesIO(b"x" * 77), 77)
    assert sums() == (77, 77)
    row: dict[str, Any] = {"id": "resp_1", "status": "queued", "previous_response_id": None}
    kept.add("me", json.dumps({"a": 1}), json.dumps([{"b": 2}]), row)
    kept.change("resp_1", {**row, "status": "completed", "text": "a" * 100})
    assert sums()[0] == sums()[1] > 177
    store.delete_file(file["id"], "me")
    assert sums()[0] == sums()[1] > 100
    kept.delete("resp_1", "me")
    assert sums() == (0, 0)
    store.close()


def test_uploads_leave_the_reserve_to_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, reserve_bytes=1000)

    def disk(free: int, total: int) -> None:
        found = SimpleNamespace(f_blocks=total, f_bavail=free, f_frsize=1)
        monkeypatch.setattr("qllm.server.state.store.os.statvfs", lambda _: found)

    disk(1100, 100_000)
    store.add_file("me", "in", io.BytesIO(b"x" * 100), 100)
    with pytest.raises(ApiError) as refused:
        store.add_file("me", "in", io.BytesIO(b"x" * 101), 101)
    assert refused.value.status_code == 507
    disk(1100, 5000)  # a tenth of a small disk
    store.add_file("me", "in", io.BytesIO(b"x" * 600), 600)
    with store._room("other", 500), pytest.raises(ApiError):  # what is coming counts
        store.add_file("me", "in", io.BytesIO(b"x" * 101), 101)
    store.close()


# -- whatever is raised


class Anything(BaseModel):
    """A body of any kind."""


RAISED: dict[str, tuple[Callable[[], Exception], int]] = {
    "RuntimeError": (lambda: RuntimeError("x"), 500),
    "KeyError": (lambda: KeyError("x"), 500),
    "MemoryError": (MemoryError, 500),
    "OSError": (lambda: OSError(2, "x"), 500),
    "no space": (lambda: OSError(28, "x"), 507),
    "read-only": (lambda: OSError(30, "x"), 507),
    "database full": (lambda: sqlite3.OperationalError("database or disk is full"), 507),
    "malformed": (lambda: sqlite3.DatabaseError("malformed"), 500),
    "group": (lambda: ExceptionGroup("x", [ValueError()]), 500),
    "engine": (lambda: QllmError("x"), 500),
}


@pytest.fixture(scope="module")
def app(shared_engine: QLLMEngine, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Make an app with all routes, which serves nobody."""
    folder = tmp_path_factory.mktemp("state")
    return create_app(shared_engine, load_config(None, {}, {"model": "tiny", "state_dir": folder}))


@pytest.mark.parametrize("how", RAISED)
def test_whatever_a_route_raises_has_the_body_of_an_error(
    app: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, status = RAISED[how]

    async def raises(*_: object, **__: object) -> None:
        raise make()

    shortcut = app.middleware_stack._app
    routes = [route for route in _all(app.routes) if getattr(route, "methods", None)]
    assert set(app.openapi()["paths"]) <= {r.path.replace(":path", "") for r in routes}
    for route in app.routes:
        monkeypatch.setattr(route, "handle", raises)
    ways = [(m, r.path, {"content-type": "x/y"}) for r in routes for m in sorted(r.methods)]
    for path in shortcut._ends:
        monkeypatch.setitem(shortcut._ends, path, (raises, Anything))
        ways.append(("POST", path, {"content-type": "application/json"}))

    async def ask() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            for method, path, headers in ways:
                answer = await client.request(method, path, content=b"{}", headers=headers)
                assert answer.status_code == status, (method, path, answer.text)
                if method == "HEAD":
                    continue
                error = answer.json()["error"]
                assert error["message"]
                if not path.startswith(ANTHROPIC):
                    assert error.keys() == {"message", "type", "param", "code"}
                if status == 507:
                    assert int(answer.headers["retry-after"]) > 0

    asyncio.run(ask())


def _all(routes: Any) -> Iterator[Any]:
    for route in routes:
        inner = getattr(route, "original_router", None)
        yield from [route] if inner is None else _all(inner.routes)
