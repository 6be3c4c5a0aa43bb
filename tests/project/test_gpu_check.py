"""`make gpu-check` walked on a CPU, and what it makes of parts that fail or take too long."""

import io
import json
import os
import random
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import bits, exact, gathered, parts
from bench.gpu import check as gpu_check
from bench.gpu.part import Part
from qllm.errors import DeviceError
from tests.support import families
from tests.support.files import ROOT

BIG = {"model", "decode", "ls_alone", "mixed_chunked-priority", "mixed_qllm2"}
LOADS = {"capacity", "load_fcfs"}
PEERS = {"interference", "loop_on_device", "peer_eager", "peer_continuous_batching"}


def test_the_budgets_fit_into_eight_minutes() -> None:
    turns = gpu_check.in_turn(gpu_check.IN_ALL)
    assert sum(max(gpu_check.PARTS[name].budget_s for name in turn) for turn in turns) < 8 * 60


def test_what_is_timed_runs_alone() -> None:
    assert gpu_check.in_turn(["exact", "kernels", "tests", "qwen3"]) == [
        ["exact", "tests"], ["kernels"], ["qwen3"],
    ]  # fmt: skip


@pytest.mark.slow  # collects all tests three times; a wrong import fails `make gpu-check` at once
def test_tests_for_a_gpu_import_only_what_is_there() -> None:
    """The machine with the GPU has torch, transformers, cupy; no server, no NIXL, no pydantic."""
    missing = (
        "fastapi", "llguidance", "nixl", "openai", "pydantic", "starlette", "uvicorn", "xxhash",
    )  # fmt: skip
    collect = (
        f"import sys; sys.modules.update(dict.fromkeys({missing})); import pytest; "
        "sys.exit(pytest.main(['-q', '--collect-only', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    )

    def collected(*what: str) -> set[str]:
        command = [sys.executable, "-c", collect, "-m", "gpu", *what]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:]
        return {line for line in done.stdout.splitlines() if "::" in line}

    chosen = collected(*gpu_check.gpu_tests(), gpu_check.ENGINES)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", "tests"]
    every = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert chosen == {line for line in every.stdout.splitlines() if "::" in line}
    assert len(chosen) > 20


def test_what_was_prepared_elsewhere_is_found_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "PREPARED", tmp_path)
    folder = tmp_path / "triton" / "ABC"
    folder.mkdir(parents=True)
    elsewhere = {"k.json": "/far/away/build/gpu/triton/ABC/k.json"}
    note = folder / "__grp__k.json"
    note.write_text(json.dumps({"child_paths": elsewhere}))
    gpu_check.relocate()
    found = json.loads(note.read_text())["child_paths"]
    assert found == {"k.json": str(folder / "k.json")}


def test_the_scheduler_is_built_again_for_a_change_of_each_of_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = gpu_check.SCHEDULER.parent / "csrc"
    text = "".join(map(Path.read_text, own.glob("*.h")))
    others = {(own / name).resolve().parent for name in re.findall(r'#include "(\.\./.*)"', text)}
    assert others == {gpu_check.RINGS}
    built, folders = tmp_path / "built.so", (tmp_path / "csrc", tmp_path / "rings")
    monkeypatch.setattr(gpu_check, "SCHEDULER", built)
    monkeypatch.setattr(gpu_check, "RINGS", folders[1])
    for path in (*(folder / "a.h" for folder in folders), built):
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (100, 100))
    assert gpu_check.Build.is_new()
    for folder in folders:
        os.utime(folder / "a.h", (200, 200))
        assert not gpu_check.Build.is_new()
        os.utime(folder / "a.h", (100, 100))


def run_part(code: str, budget_s: float, tmp_path: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", code]
    log = tmp_path / "p.log"
    found: dict[str, Any] = gpu_check.run_part("p", command, gpu_check.Part(budget_s), log)
    return found


def test_a_part_that_fails_or_hangs_keeps_what_it_said(tmp_path: Path) -> None:
    line = gpu_check.MARK + json.dumps({"section": "a", "x": 1})
    say = f"print({line!r}, flush=True); print({gpu_check.MARK!r} + '{{\"sec', flush=True); "
    for end, budget, status in (
        ("1 / 0", 20, 1),
        ("import time; time.sleep(600)", 20, "out of time"),
    ):
        part = run_part(say + end, budget, tmp_path)
        assert part["status"] == status
        assert part["sections"] == {"a": {"x": 1}}
        assert not gpu_check.is_ok(part)
    part = run_part(say, 20, tmp_path)
    assert gpu_check.is_ok(part)
    part["sections"]["a"]["error"] = "no"
    assert not gpu_check.is_ok(part)


FAULTY = """
import json, os, sys
mark, sticky = {mark!r}, {sticky}
skip = sys.argv[2].split(",") if len(sys.argv) > 2 else []
for name in ("a", "b", "c"):
    if name in skip:
        continue
    found = {{"section": name}} | ({{"error": "illegal address"}} if name != "c" else {{}})
    print(mark + json.dumps(found), flush=True)
    if "error" in found:
        os._exit(sticky)
"""


def test_an_error_that_stays_ends_one_section(tmp_path: Path) -> None:
    code = FAULTY.format(mark=gpu_check.MARK, sticky=gpu_check.STICKY)
    part = run_part(code, 60, tmp_path)
    assert part["status"] == 0
    assert list(part["sections"]) == ["a", "b", "c"]
    assert not gpu_check.is_ok(part)
    # one that says nothing new is not tried for ever
    part = run_part(f"import os; os._exit({gpu_check.STICKY})", 60, tmp_path)
    assert part["status"] == gpu_check.STICKY


class Ended(BaseException):
    """The end of a part's process, with its status."""


def said_until_its_end(run: Callable[[Part], None]) -> dict[str, Any]:
    """Run what ends the process of a part with STICKY; return what has left it by then."""

    def end(status: int) -> None:
        raise Ended(status)

    out = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(out))  # keeps a text until a flush
        patch.setattr(os, "_exit", end)
        with pytest.raises(Ended, match=f"^{gpu_check.STICKY}$"):
            run(Part(dry=False))
        return gpu_check.sections(out.getvalue().decode())


def test_a_device_that_answers_no_more_ends_the_process_with_that_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost() -> dict[str, Any]:
        raise RuntimeError("an illegal address")

    def run(part: Part) -> None:
        part.section("good", dict)
        part.section("bad", lost)

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    assert list(said_until_its_end(run)) == ["good", "bad"]


def test_a_loop_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs() -> dict[str, Any]:
        raise DeviceError("a stage hangs")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("it is waited for"))
    found = said_until_its_end(lambda part: part.section("loop", hangs))
    assert "a stage hangs" in found["loop"]["error"]


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_a_new_process_makes_again_what_others_need(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []

    def make(part: Part, which: str) -> Any:
        made.append(which)
        return SimpleNamespace(config=SimpleNamespace(num_hidden_layers=3))

    monkeypatch.setattr(parts, "make_model", make)
    monkeypatch.setattr(parts, "sizes_of", lambda model: {})
    for what in ("decode", "mixed", "interference", "on_device", "peer"):
        monkeypatch.setattr(parts, what, lambda *_, **how: {})
    monkeypatch.setattr(parts, "capacity", lambda *_: {"requests_per_s": 2.0})
    monkeypatch.setattr(parts, "loaded", lambda part, model, policy, rate: {"rate": rate})
    parts.big(Part(dry=True, skip=["model", "decode", "capacity"]), name)
    said = gpu_check.sections(capsys.readouterr().out)
    assert made == [name]
    assert not {"model", "decode", "capacity"} & set(said)
    assert {"ls_alone", "mixed_qllm2"} < set(said)
    assert ("load_fcfs" in said) == (name == "mixtral")
    assert not any("error" in section for section in said.values())


def test_layers_are_as_many_as_fit() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**parts.SHAPES["mixtral"])
    per_layer = 2 * (8 * 3 * 4096 * 14336 + 8 * 4096 + 2 * 4096 * (4096 + 1024) + 2 * 4096)
    rest = 2 * (2 * 32000 * 4096 + 4096)
    for free_gb, least, most in ((139, 32, 32), (79, 20, 21), (6, 1, 1)):
        found = parts.num_layers(config, MixtralForCausalLM, free_gb << 30)
        assert least <= found <= most
        assert rest + found * per_layer <= parts.FOR_WEIGHTS * (free_gb << 30)
    with pytest.raises(MemoryError, match="are free"):
        parts.num_layers(config, MixtralForCausalLM, 1 << 30)


def test_a_test_that_fails_says_so_at_once(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("def test_bad():\n    assert 1 == 2\n\n\ndef test_good():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "bench.gpu.said", "--rootdir", tmp_path]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, test], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    [(name, found)] = gpu_check.sections(done.stdout).items()
    assert name.endswith("test_bad")
    assert "assert 1 == 2" in found["error"]


SMALL_MODULE = '#include <Python.h>\nextern "C" PyObject* PyInit_x() { return nullptr; }\n'
"""In place of the native scheduler, which takes long to compile."""


@pytest.fixture
def without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no process that starts load torch."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def check_probe(out: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> Any:
    """Walk the part that costs least, and build a module; return the status and the result."""
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setattr(gpu_check, "SCHEDULER", out / "_scheduler.so")
    (out / "csrc").mkdir()
    (out / "csrc" / "module.cpp").write_text(source)
    monkeypatch.setattr(sys, "argv", ["check", "--dry-run", "--parts", "probe"])
    status = gpu_check.main()
    return status, json.loads((out / "results.json").read_text())


def test_a_dry_run_walks_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, found = check_probe(tmp_path, monkeypatch, SMALL_MODULE)
    assert (status, found["ok"]) == (0, True)
    assert found["parts"]["probe"]["status"] == 0
    assert "while" in found["parts"]["probe"]["sections"]
    assert found["machine"]["commit"] is not None
    assert found["scheduler"] == "built"
    assert (tmp_path / "_scheduler.so").exists()
    assert not list(tmp_path.glob("*.log")), "each file counts on the way back"
    with tarfile.open(tmp_path / gpu_check.LOGS) as logs:
        assert logs.getnames() == ["probe.log"]
        log = logs.extractfile("probe.log")
        assert log is not None
        assert gpu_check.MARK.encode() in log.read()


@pytest.mark.parametrize("missing", ["git", "g++"])
@pytest.mark.usefixtures("without_torch")
def test_results_are_there_whatever_is_missing(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    if missing == "g++":
        monkeypatch.setenv("CXX", "no-such-compiler")
    says = f"print({gpu_check.MARK + json.dumps({'section': 'a'})!r})"
    monkeypatch.setattr(gpu_check, "command_of", lambda *_: [sys.executable, "-c", says])
    status, found = check_probe(tmp_path, monkeypatch, SMALL_MODULE)
    assert (status, found["ok"]) == (1, False)
    assert found["parts"]["probe"]["status"] == 0
    assert found["parts"]["probe"]["sections"] == {"a": {}}
    assert found["machine"]["commit"] is None
    assert found["scheduler"].startswith("not built")


def test_the_native_scheduler_is_built_with_the_flags_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "SCHEDULER", tmp_path / "_scheduler.so")
    (tmp_path / "csrc").symlink_to(ROOT / "qllm" / "device" / "csrc")
    assert gpu_check.Build().wait() == "built"
    assert gpu_check.Build().wait() == "there already"


def test_the_ranks_of_the_check_are_compared() -> None:
    """A wrong kernel, and one rank that is late, are errors of their sections."""

    class Wrong:
        def run(self, buffers: gathered.Buffers) -> None:
            for rank in range(buffers.ranks):
                buffers.memory[rank].zero_()

    class Late:
        def run(self, buffers: gathered.Buffers) -> None:
            build.run(buffers)
            buffers.memory[1, buffers.arguments.late] = 1

    with TemporaryDirectory() as folder:
        build = gathered.HostBuild(Path(folder))
        assert gathered.compared(build, "cpu", 2, 2, 4) == {"cases": 2}
        for wrong, said in ((Wrong(), "0 ranks were late"), (Late(), "1 ranks were late")):
            with pytest.raises(AssertionError, match=said):
                gathered.compared(wrong, "cpu", 2, 2, 4)


@pytest.mark.slow  # imports without pydantic: test_launches_are_compiled_and_not_run_...
def test_results_are_there_without_pydantic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pydantic.py").write_text("raise ModuleNotFoundError('no pydantic here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert dry_run(tmp_path, "exact", "engines")["exact"] == {"tokens_mixtral"}


@pytest.mark.parametrize("is_equal", [True, False])
def test_the_exact_part_compares_tokens_with_those_of_generate(
    is_equal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "_, _, _, prompts, new = json.loads(sys.argv[1])"
    rng = random.Random(4)
    prompts = [[rng.randrange(families.VOCAB) for _ in range(n)] for n in (40, 7, 90, 23)]
    model = families.make_model("mixtral")
    wanted = [
        model.generate(
            torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None
        )[0, len(ids) :].tolist()
        for ids in prompts
    ]  # fmt: skip
    wanted[3][-1] ^= not is_equal
    says = f"import json, sys\n{asked}\nassert (prompts, new) == ({prompts}, 8)\n"
    says += f"print(json.dumps(['mixtral', {wanted}]), flush=True)"
    monkeypatch.setattr(exact, "REFERENCE", says)
    monkeypatch.setattr(exact, "LAYERS", {})
    exact.exact(Part(dry=True))
    (found,) = gpu_check.sections(capsys.readouterr().out).values()
    if is_equal:
        assert "error" not in found, found
        assert found["streams"] == 100
    else:
        assert found["error"].startswith("AssertionError: alone equal: False"), found


def test_results_are_there_where_memory_is_not(tmp_path: Path) -> None:
    """No part can load torch."""
    check = f"{sys.executable} -m bench.gpu.check --dry-run --parts kernels exact"
    command = f"ulimit -v 400000; exec {check}"
    env = os.environ | {"OUT": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    found = json.loads((tmp_path / "results.json").read_text())
    assert (done.returncode, found["ok"]) == (1, False)
    assert list(found["parts"]) == ["kernels", "exact"]
    for part in found["parts"].values():
        assert part["status"] not in (0, "out of time")
        assert part["tail"]


def test_a_model_that_does_not_fit_ends_a_section_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(part: Part, which: str) -> Any:
        raise MemoryError("a layer has 9 bytes, and 3 are free")

    monkeypatch.setattr(parts, "make_model", make)
    parts.big(Part(dry=True), "mixtral")
    said = gpu_check.sections(capsys.readouterr().out)
    assert said["model"]["error"] == "MemoryError: a layer has 9 bytes, and 3 are free"


def test_what_was_compiled_beforehand_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("TRITON_CACHE_DIR", "XDG_CACHE_HOME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpu_check, "PREPARED", tmp_path)
    assert not set(names) & set(gpu_check.environment(gpu_check.Part(1)))
    (tmp_path / "prepared.json").write_text("{}")
    found = gpu_check.environment(gpu_check.Part(1))
    assert [found[name] for name in names] == [str(tmp_path / "triton"), str(tmp_path)]


COMPILE = """
import json, sys
sys.modules["pydantic"] = None
import torch
from bench.gpu import exact, kernels, loop, parts, prepare
from qllm.kernels.triton import norm
from triton.runtime.jit import JITFunction

count = prepare.compile_only()
x = torch.empty(4, 64, device="meta", dtype=torch.bfloat16)
for _ in range(2):
    norm.rms_norm(x, x[0], 1e-6)
compiled, launched = count(), set()
JITFunction.run = lambda self, *args, grid, warmup, **how: launched.add(self.fn.__name__)
every = prepare.models
prepare.models = lambda: [model for model in every() if model[0] == "tiny mixtral"]
print(json.dumps([compiled, prepare.stages(), sorted(launched)]))
"""


def test_launches_are_compiled_and_not_run_where_there_is_no_gpu(tmp_path: Path) -> None:
    """One kernel is compiled, and each that the stages of a model launch is reached.

    The program also imports what the parts import, without pydantic.
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", COMPILE]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled, stages, launched = json.loads(done.stdout.splitlines()[-1])
    assert compiled == 1
    [cubin] = tmp_path.rglob("_rms_norm.cubin")
    [about] = tmp_path.rglob("_rms_norm.json")
    assert cubin.stat().st_size > 1000
    assert json.loads(about.read_text())["target"]["arch"] == 90
    assert stages == {"tiny mixtral": "compiled"}
    assert "_rms_norm" in launched
    assert len(launched) > 5, launched


def dry_run(out: Path, *parts: str) -> dict[str, Any]:
    env = os.environ | {"OUT": str(out), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "bench.gpu.check", "--dry-run", "--parts", *parts]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    errors = {n: s.get("error") for p in found["parts"].values() for n, s in p["sections"].items()}
    assert done.returncode == 0, (done.stdout[-500:], done.stderr[-500:], errors)
    assert list(found["parts"]) == list(parts)
    return {name: set(part["sections"]) for name, part in found["parts"].items()}


@pytest.mark.slow  # one part: the walk above
def test_a_dry_run_walks_every_part(tmp_path: Path) -> None:
    found = dry_run(tmp_path, *gpu_check.PARTS)
    assert found["exact"] == {"tokens_mixtral"}
    assert found["qwen3"] == BIG | PEERS
    assert found["mixtral"] == BIG | LOADS
    assert found["bits"] == set(bits.ORDER)
    assert found["ranks"] == {"virtual_2", "virtual_4", "virtual_8"}
    assert {"ceilings", "attention_1x1", "experts_qwen3_1", "sample_top_p_0.9_1"} <= found[
        "kernels"
    ]


PREPARE = """
import json
from bench.gpu import prepare

prepare.compile_only()
every = prepare.models
prepare.models = lambda: [model for model in every() if model[0] == "tiny mixtral"]
print(json.dumps(prepare.stages()))
"""


@pytest.mark.slow  # in the short lane they are reached: test_launches_are_compiled_and_not_run_...
def test_stages_are_compiled_where_there_is_no_gpu(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", PREPARE]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"tiny mixtral": "compiled"}
    assert list(tmp_path.rglob("*.cubin"))


@pytest.mark.usefixtures("without_torch")
def test_without_a_gpu_the_real_run_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["check"])
    assert gpu_check.main() == 1
    assert "no CUDA device; use --dry-run" in capsys.readouterr().out
