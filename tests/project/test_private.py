"""Files with data of requests are private, whatever the umask and the mode of older files."""

import ast
import io
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from qllm.engine import archive
from qllm.engine.memory import Claim
from qllm.engine.neighbours import Neighbours
from qllm.engine.storage.file import Layout, Lock, open_file
from qllm.floor import NO_FLOOR
from qllm.private import make_private_folder
from qllm.record.perfetto import write_perfetto
from qllm.record.trace import Trace
from qllm.scheduler.pressure import Pressure
from qllm.server.state.store import Store
from qllm.workloads.files import write_requests
from tests.support.files import ROOT, python_files

PUBLIC = {
    "qllm/cli/bench.py": "numbers of a bench",
    "qllm/cli/new_package.py": "code of a new policy or drafter",
    "qllm/cli/profile.py": "a folder for a profile of a model",
    "qllm/cli/sim.py": "a folder for figures",
    "qllm/cuda/calls.py": "compiled code",
    "qllm/device/cubins.py": "compiled code",
    "qllm/device/lanes.py": "a header of ours",
    "qllm/device/layout.py": "a header of ours",
    "qllm/device/serving.py": "a header of ours",
    "qllm/ingress/layout.py": "a file of ours",
    "qllm/measure/demo.py": "a folder for figures and traces",
    "qllm/measure/disk_rate.py": "random bytes in a folder of the user",
    "qllm/measure/plots.py": "figures",
    "qllm/measure/profile_figure.py": "a figure",
    "qllm/measure/random_moe.py": "a model",
    "qllm/models/depth_profile.py": "a profile of depths",
    "qllm/models/weights/dense.py": "a model",
    "qllm/models/weights/experts_in_file.py": "a folder for experts of models, for its owner alone",
    "qllm/upcycle/router_training.py": "a model",
    "qllm/upcycle/train.py": "a model",
    "qllm/sim/costs.py": "costs of a machine",
    "qllm/sim/figures.py": "a figure",
    "qllm/sim/outcome.py": "a folder for figures and traces",
}
"""Modules that write what is of no request, and what that is."""
MADE_BEFORE = {
    "qllm/engine/archive.py": "safetensors write into a file that is made first",
    "qllm/server/state/folder.py": "so does SQLite",
}
MAKERS = {
    "write_text", "write_bytes", "mkdir", "makedirs", "mknod", "save_file", "savefig", "tofile",
}  # fmt: skip
"""Names of methods and functions that make a file or a folder."""
MODULES = ("shutil.", "sqlite3.connect", "torch.save", "np.save", "np.memmap")


def makes_a_file(call: ast.Call) -> bool:
    """Return True if a call may make a file or a folder that is not private."""
    name = ast.unparse(call.func)
    given = [ast.unparse(value) for value in (*call.args, *(k.value for k in call.keywords))]
    if name.rpartition(".")[2] == "open":
        is_private = bool(given) and given[0].startswith("private_fd(")
        makes = any(re.fullmatch("'[rbt]*[wax+][rbt+]*'", text) for text in given)
        return not is_private and (makes or "O_CREAT" in " ".join(given))
    return name.rpartition(".")[2] in MAKERS or name.startswith(MODULES)


def makers(sources: dict[str, str]) -> set[str]:
    """The modules that make files which are not private."""
    calls = {path: ast.walk(ast.parse(source)) for path, source in sources.items()}
    return {
        path
        for path, nodes in calls.items()
        if any(isinstance(node, ast.Call) and makes_a_file(node) for node in nodes)
    }


def test_only_what_holds_no_requests_is_written_for_others() -> None:
    paths = set(python_files("qllm", "policies")) - {"qllm/private.py"}
    found = makers({path: (ROOT / path).read_text() for path in paths})
    assert found == PUBLIC.keys() | MADE_BEFORE.keys()


@pytest.mark.parametrize(
    "source",
    [
        "open(path, 'w')",
        "open(path, mode='ab')",
        "path.open('x')",
        "Path(path).open('r+', encoding='utf-8')",
        "os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)",
        "path.write_text('x')",
        "folder.mkdir()",
        "shutil.copyfile(a, b)",
        "sqlite3.connect(path)",
    ],
)
def test_a_call_that_makes_a_file_is_seen(source: str) -> None:
    assert makers({"a.py": source}) == {"a.py"}


def test_private_files_and_files_that_are_read_are_none() -> None:
    source = "open(private_fd(path, os.O_WRONLY), 'w')\nopen(path)\nopen(path, 'rb')\nw.open(a)"
    assert makers({"a.py": source}) == set()


def trace(folder: Path) -> None:
    Trace(()).write_jsonl(folder / "run.jsonl")


def perfetto(folder: Path) -> None:
    write_perfetto((), folder / "run.json")


def requests(folder: Path) -> None:
    write_requests(folder / "requests.jsonl", ())


def checkpoint(folder: Path) -> None:
    archive.write(folder / "checkpoint", {}, {"k": torch.zeros(3)})


def kept_kv(folder: Path) -> None:
    place = folder / "kv"
    make_private_folder(place)
    Lock(place).close()
    layout = Layout((1, 1, 4, 8), (1, 1, 4, 8), torch.float32)
    open_file(place, layout, 2, {"weights": "a"}, reset=False).close()


def state(folder: Path) -> None:
    store = Store(folder / "state")
    store.add_file("me", "in", io.BytesIO(b"x"))
    store.close()


def claim(folder: Path) -> None:
    made = Claim("cpu", folder / "claims")
    with made.others():
        made.tell(1)
    made.close()


def neighbours(folder: Path) -> None:
    Neighbours("g", Pressure(NO_FLOOR, None), lambda: None, folder / "c").close()


WRITERS: dict[str, Callable[[Path], None]] = {
    "qllm/engine/neighbours.py": neighbours,
    "qllm/engine/memory.py": claim,
    "qllm/record/trace.py": trace,
    "qllm/record/perfetto.py": perfetto,
    "qllm/workloads/files.py": requests,
    "qllm/engine/archive.py": checkpoint,
    "qllm/block_file.py": kept_kv,
    "qllm/engine/storage/build.py": kept_kv,
    "qllm/server/state/folder.py": state,
    "qllm/server/state/store.py": state,
}
"""A call for each module that writes what is private."""


def test_each_module_that_writes_in_private_is_called_here() -> None:
    paths = python_files("qllm")
    assert {p for p in paths if "from qllm.private" in (ROOT / p).read_text()} == WRITERS.keys()


@pytest.fixture(params=[0o000, 0o022, 0o177])
def masked(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.parametrize("write", dict.fromkeys(WRITERS.values()), ids=lambda x: x.__name__)
def test_a_writer_makes_what_its_owner_alone_may_read(
    write: Callable[[Path], None], masked: None, tmp_path: Path
) -> None:
    write(tmp_path)
    made = list(tmp_path.rglob("*"))
    assert made
    for path in made:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
        if path.is_file() and path.parent == tmp_path:
            path.chmod(0o666)  # it lay there for all
    write(tmp_path)
    for path in tmp_path.iterdir():
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_a_checkpoint_is_private_with_a_safetensors_that_makes_its_file_for_all(
    masked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_for_all(tensors: Any, path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(save(tensors, metadata))

    monkeypatch.setattr(archive, "save_file", save_for_all)
    checkpoint(tmp_path)
    assert stat.S_IMODE((tmp_path / "checkpoint").stat().st_mode) == 0o600


def test_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o644)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    Trace(()).write_jsonl(pipe)
    assert os.read(reader, 100).startswith(b'{"qllm_trace"')
    os.close(reader)
    assert stat.S_IMODE(pipe.stat().st_mode) == 0o644
