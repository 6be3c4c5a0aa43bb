"""Everything that needs a GPU, in one command: kernels, equality, tests, speed. Under 8 minutes.

Each part is a process with a time budget, its own log and one JSON line per section. The lines of a
part that failed or ran out of time are kept. After an error that stays (an illegal address, say)
the rest of a part continues in a new process. results.json is written first, and again after every
part, under $OUT if that is set, else under .benchmarks. The check uses the machine's own python3
and packages, with the repository in place: build/in-place holds the files that an install would add
to the path.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "in-place"
PREPARED = ROOT / "build" / "gpu"
"""Folder with the files that `bench.gpu.prepare` has compiled."""
SCHEDULER = ROOT / "qllm" / "device" / "_scheduler.abi3.so"
RINGS = ROOT / "qllm" / "ingress" / "csrc"
"""Folder of the rings' headers, which its sources include."""
MARK = "gpu-check-section "
LOGS = "logs.tar.gz"
"""Archive with the logs of the parts, made at the end."""
BEGAN = "GPU_CHECK_BEGAN"
"""Variable of the parts: start of the check, in seconds since the epoch. A server takes every name
that begins with QLLM_ for a setting."""
STICKY = 77
"""Exit status of a part whose device does not answer: its other sections need a new process."""


class Part(NamedTuple):
    """One process, or more after errors that stay."""

    budget_s: float
    runs_loop: bool = False
    """True if a loop runs on the device, so that kernels must be loaded before it."""
    is_timed: bool = True
    """True if the part measures, so that it runs alone; the other parts run side by side."""


PARTS = {
    "bits": Part(60),
    "kernels": Part(35),
    "exact": Part(80, is_timed=False),
    "tests": Part(110, runs_loop=True, is_timed=False),
    "engines": Part(100, runs_loop=True, is_timed=False),
    "sanitizer": Part(100, is_timed=False),
    "probe": Part(20),
    "ranks": Part(40),
    "qwen3": Part(150, runs_loop=True),
    "mixtral": Part(120),
}
"""Parts in order, most useful first; untimed ones run side by side after the first."""
IN_ALL = tuple(name for name in PARTS if name != "bits")
"""Parts that run if none is named. Together they take less than 8 minutes. `bits` is a run of its
own: its answers are wanted before any change of a kernel."""
ENGINES = "tests/device/test_loops_gpu.py"
"""Tests that start engines, each in its own process: a separate part."""
FIRST = ("tests/kernels/test_triton.py", "tests/cuda/test_runner.py")
"""Files that the other tests depend on."""
WORKERS = 12
"""Number of test processes: most of their time is compilation."""
BUILD_S = 60
"""Seconds for the native scheduler, which is built during the first part."""
DRY_PATIENCE = 10
"""Factor on the budget in a dry run: a busy CPU is no failure."""


def write_site() -> None:
    """Make the files that an install would add to the path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    info = SITE / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    link = SITE / "qllm_policies"
    link.unlink(missing_ok=True)
    link.symlink_to(ROOT / "policies")


def relocate() -> None:
    """Change the paths in Triton's prepared files to those of this machine.

    Without this, Triton finds none of them if the repository has another path.
    """
    for note in (PREPARED / "triton").glob("*/__grp__*.json"):
        noted = json.loads(note.read_text())["child_paths"]
        here = {name: str(note.parent / Path(path).name) for name, path in noted.items()}
        if here != noted:
            note.write_text(json.dumps({"child_paths": here}))


class Build:
    """A build of the native scheduler in place, if it is missing, next to other work."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._found = "there already" if self.is_new() else ""
        if self._found:
            return
        source, include = SCHEDULER.parent / "csrc" / "module.cpp", sysconfig.get_path("include")
        self._new = SCHEDULER.with_suffix(f".{os.getpid()}.new")
        flags = ["-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=off", "-pthread", "-fPIC"]
        command = [
            os.environ.get("CXX", "g++"), *flags, "-shared", "-fvisibility=hidden", f"-I{include}",
            str(source), "-o", str(self._new),
        ]  # fmt: skip
        try:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        except OSError as error:
            self._found = f"not built: {error}"

    @staticmethod
    def is_new() -> bool:
        """Return True if it exists and no source is newer."""
        sources = (*(SCHEDULER.parent / "csrc").glob("*"), *RINGS.glob("*"))
        newest = max((file.stat().st_mtime for file in sources), default=0.0)
        return SCHEDULER.exists() and SCHEDULER.stat().st_mtime >= newest

    def wait(self) -> str:
        """Return the result: "there already", "built", or "not built" and the reason."""
        if self._process is not None and not self._found:
            try:
                out, _ = self._process.communicate(timeout=BUILD_S)
                failed = self._process.returncode
                self._found = f"not built: {out[-500:]}" if failed else "built"
                if not failed:
                    self._new.replace(SCHEDULER)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._new.unlink(missing_ok=True)
                self._found = f"not built in {BUILD_S} s"
        return self._found


def environment(part: Part) -> dict[str, str]:
    """Return the variables of a part: the repository in place, no network."""
    path = os.pathsep.join([str(ROOT), str(SITE), os.environ.get("PYTHONPATH", "")])
    more = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    more |= {"CUDA_MODULE_LOADING": "EAGER"} if part.runs_loop else {}
    if (PREPARED / "prepared.json").exists():
        more |= {"TRITON_CACHE_DIR": str(PREPARED / "triton"), "XDG_CACHE_HOME": str(PREPARED)}
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        more["CUDA_HOME"] = str(Path(nvcc).resolve().parents[1])
    return os.environ | more


def said_by(*command: str) -> str | None:
    """Return the first line that a command prints; None if it fails or is missing."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def describe_machine() -> dict[str, str | None]:
    """Return the software and hardware that the result depends on. It uses no GPU memory."""
    machine: dict[str, str | None] = {"python": platform.python_version()}
    machine["commit"] = said_by("git", "describe", "--always", "--dirty", "--match", "")
    for package in ("torch", "transformers", "triton", "pydantic"):
        try:
            machine[package] = version(package)
        except PackageNotFoundError:
            machine[package] = None
    name = "import torch; print(torch.cuda.get_device_name())"
    machine["gpu"] = said_by("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or said_by(
        sys.executable, "-c", name
    )
    return machine


def sections(text: str) -> dict[str, Any]:
    """Return the output of a part by section, without a line that was cut off."""
    found = {}
    for line in text.splitlines():
        if line.startswith(MARK):
            try:
                section = json.loads(line.removeprefix(MARK))
            except ValueError:
                continue
            found[section.pop("section")] = section
    return found


def run_part(name: str, command: list[str], part: Part, log: Path, env: Any = None) -> Any:
    """Run one part, and again for the rest after an error that stays; never raise."""
    begin, found, status = time.monotonic(), {}, None
    while status in (None, STICKY):
        left_s = part.budget_s - (time.monotonic() - begin)
        skip = ["--skip", ",".join(found)] if found else []
        status, text = _run([*command, *skip], left_s, log, env or environment(part))
        new = sections(text)
        if status == STICKY and not new.keys() - found.keys():
            break
        found |= new
    seconds = round(time.monotonic() - begin, 1)
    result = {"status": status, "seconds": seconds, "budget_s": part.budget_s, "sections": found}
    if status != 0:
        result["tail"] = text[-3000:]
    print(f"{name}: {status} after {seconds} s", flush=True)
    return result


def _run(command: list[str], budget_s: float, log: Path, env: Any) -> tuple[int | str, str]:
    """Return status and output of a command; all processes that it started end with it."""
    status: int | str
    with log.open("ab") as out:
        start = out.tell()
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return 127, str(error)
        try:
            status = process.wait(max(0.1, budget_s))
        except subprocess.TimeoutExpired:
            status = "out of time"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with log.open("rb") as back:
        back.seek(start)
        return status, back.read().decode(errors="replace")


def command_of(name: str, dry: bool, layers: int | None = None) -> list[str]:
    """Return the command that runs a part."""
    if name == "bits":
        return [sys.executable, "-m", "bench.gpu.bits", *(["--dry-run"] if dry else [])]
    if name not in ("tests", "engines"):
        more = ["--dry-run"] if dry else []
        more += ["--layers", str(layers)] if layers else []
        return [sys.executable, "-m", "bench.gpu.parts", name, *more]
    # Warnings of unpinned packages are no errors here. Exit 5 (no test ran) is a failure.
    pytest = [
        sys.executable, "-m", "pytest", "-v", "--tb=short", "-m", "gpu", "-W", "default",
        "-p", "bench.gpu.said",
    ]  # fmt: skip
    if name == "engines":
        return [*pytest, *(["--collect-only"] if dry else []), ENGINES]
    if dry:
        return [*pytest, "--collect-only", FIRST[0]]
    at_once = ["-n", str(WORKERS)] if importlib.util.find_spec("xdist") else []
    return [*pytest, *at_once, *gpu_tests()]


def gpu_tests() -> list[str]:
    """Return the files with GPU tests, without the engines'; others import missing packages."""
    files = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py"))
    marked = ("mark.gpu", "from tests.support.interpret import")
    texts = {f: (ROOT / f).read_text() for f in files if f != ENGINES}
    found = [f for f, text in texts.items() if any(mark in text for mark in marked)]
    return sorted(found, key=lambda f: FIRST.index(f) if f in FIRST else len(FIRST))


def in_turn(names: Sequence[str]) -> list[list[str]]:
    """Return groups of parts in order; untimed ones run together, with the first of them."""
    untimed = [name for name in names if not PARTS[name].is_timed]
    turns = []
    for name in names:
        if PARTS[name].is_timed:
            turns.append([name])
        elif name == untimed[0]:
            turns.append(untimed)
    return turns


def is_ok(part: dict[str, Any]) -> bool:
    """Return True if a part and all of its sections ended well."""
    failed = [s for s in part["sections"].values() if "error" in s]
    return part["status"] == 0 and not failed


def pack_logs(out: Path) -> None:
    """Replace the parts' logs by one archive: few files come back from the GPU machine."""
    logs = [log for name in PARTS if (log := out / f"{name}.log").exists()]
    with tarfile.open(out / LOGS, "w:gz") as archive:
        for log in logs:
            archive.add(log, log.name)
    for log in logs:
        log.unlink()


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(IN_ALL))
    parser.add_argument("--layers", type=int, help="of the big models at most, for a first walk")
    return parser.parse_args()


def main() -> int:
    """Run the parts in order, and fail if one did."""
    asked = options()
    out, begin = Path(os.environ.get("OUT") or ROOT / ".benchmarks"), time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"check": "gpu", "dry_run": asked.dry_run, "ok": False, "parts": {}}

    def write() -> None:
        (out / "results.json").write_text(json.dumps(result, indent=1) + "\n")

    write()
    began = {BEGAN: str(time.time())}
    build = Build()
    try:
        write_site()
        relocate()
    except OSError as error:
        result["site"] = f"not written: {error}"
    result["machine"] = describe_machine()
    write()
    if not asked.dry_run and result["machine"]["gpu"] is None:
        print("there is no CUDA device; use --dry-run to walk the parts on a CPU")
        return 1

    def run(name: str) -> None:
        part = PARTS[name]
        if asked.dry_run:
            part = part._replace(budget_s=part.budget_s * DRY_PATIENCE)
        log = out / f"{name}.log"
        log.unlink(missing_ok=True)
        command = command_of(name, asked.dry_run, asked.layers)
        result["parts"][name] = run_part(name, command, part, log, environment(part) | began)
        result.setdefault("first_part_ended_s", round(time.monotonic() - begin, 1))

    for number, together in enumerate(in_turn(asked.parts)):
        if number:
            result["scheduler"] = build.wait()
        with ThreadPoolExecutor(max_workers=len(together)) as pool:
            list(pool.map(run, together))
        result["parts"] = {n: result["parts"][n] for n in asked.parts if n in result["parts"]}
        write()
    result["scheduler"] = build.wait()
    is_built = not result["scheduler"].startswith("not built")
    result["ok"] = is_built and all(is_ok(part) for part in result["parts"].values())
    write()
    pack_logs(out)
    print(json.dumps({"ok": result["ok"], "results": str(out / "results.json")}))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
