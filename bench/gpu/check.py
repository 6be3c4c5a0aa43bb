"""Everything that needs a GPU, in one command: tests, equality, kernels, speed. Under 8 minutes.

Each part is a process with a time budget and prints one JSON line per section; what a part said
before it failed or ran out of time is kept. results.json is written anew after every part, under
$OUT where that is set, else under .benchmarks. Uses this machine's own python3 and packages, with
the repository in place: build/in-place holds what an install would add to the path.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "in-place"
MARK = "gpu-check-section "
BUDGETS_S = {"tests": 75, "exact": 50, "kernels": 40, "probe": 15, "qwen3": 140, "engines": 60}
BUDGETS_S |= {"mixtral": 95}
"""Together less than 8 minutes."""
ENGINES = "tests/test_loops_gpu.py"
"""Its tests make engines, each in a process of its own: a part by itself."""
BUILD_S = 60
"""For the extensions, before the parts."""
DRY_PATIENCE = 10
"""Times the budget in a dry run: a busy CPU is no finding."""


def write_site() -> None:
    """Make what an install would add to the path, and nothing else."""
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


def build_extensions() -> str:
    """Build the extensions in place where they are missing: the loop's blocks need one."""
    if list((ROOT / "qllm" / "device").glob("_scheduler*.so")):
        return "there already"
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S)
    except subprocess.TimeoutExpired:
        return f"not built in {BUILD_S} s"
    built = bool(list((ROOT / "qllm" / "device").glob("_scheduler*.so")))
    return "built" if built else f"not built: {(done.stdout + done.stderr)[-500:]}"


def environment() -> dict[str, str]:
    """Variables of every part: the repository in place, eager module loading, no network."""
    path = os.pathsep.join([str(ROOT), str(SITE), os.environ.get("PYTHONPATH", "")])
    more = {"PYTHONPATH": path, "CUDA_MODULE_LOADING": "EAGER", "HF_HUB_OFFLINE": "1"}
    return os.environ | more


def describe_machine() -> dict[str, str | None]:
    """Name what the result depends on; None for what is not there."""
    machine: dict[str, str | None] = {"python": platform.python_version()}
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    machine["commit"] = git.stdout.strip() if git.returncode == 0 else None
    for package in ("torch", "transformers", "triton"):
        try:
            machine[package] = str(__import__(package).__version__)
        except ImportError:
            machine[package] = None
    import torch

    machine["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return machine


def sections(text: str) -> dict[str, Any]:
    """What a part said, by section; a line that was cut off is left out."""
    found = {}
    for line in text.splitlines():
        if line.startswith(MARK):
            try:
                section = json.loads(line.removeprefix(MARK))
            except ValueError:
                continue
            found[section.pop("section")] = section
    return found


def run_part(name: str, command: list[str], budget_s: float) -> dict[str, Any]:
    """Run one part; never raises."""
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), timeout=budget_s,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        out, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        out, status = late.stdout or b"", "out of time"
    text = out.decode(errors="replace")
    seconds = round(time.monotonic() - begin, 1)
    part = {"status": status, "seconds": seconds, "budget_s": budget_s, "sections": sections(text)}
    if status != 0:
        part["tail"] = text[-3000:]
    print(f"{name}: {status} after {seconds} s", flush=True)
    return part


def command_of(name: str, dry: bool) -> list[str]:
    """How a part is run."""
    if name not in ("tests", "engines"):
        return [sys.executable, "-m", "bench.gpu.parts", name, *(["--dry-run"] if dry else [])]
    # Warnings of packages we did not pin are no errors here. Exit 5 (nothing ran) is a failure.
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default"]
    if name == "engines":
        return [*pytest, *(["--collect-only"] if dry else []), ENGINES]
    return [*pytest, *(["--collect-only", "tests/test_triton.py"] if dry else gpu_tests())]


def gpu_tests() -> list[str]:
    """The files with such tests, without the engines': others import what is not there."""
    files = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests").glob("test_*.py"))
    marked = ("mark.gpu", "from interpret import")
    texts = {f: (ROOT / f).read_text() for f in files if f != ENGINES}
    return [f for f, text in texts.items() if any(mark in text for mark in marked)]


def is_ok(part: dict[str, Any]) -> bool:
    """A part that ended well, and all of its sections."""
    failed = [s for s in part["sections"].values() if "error" in s]
    return part["status"] == 0 and not failed


def main() -> int:
    """Run the parts in order, and fail if one did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--parts", nargs="+", choices=BUDGETS_S, default=list(BUDGETS_S))
    asked = parser.parse_args()
    write_site()
    out = Path(os.environ.get("OUT") or ROOT / ".benchmarks")
    out.mkdir(parents=True, exist_ok=True)
    result = {"check": "gpu", "dry_run": asked.dry_run, "machine": describe_machine(), "parts": {}}
    if not asked.dry_run and result["machine"]["gpu"] is None:
        print("torch sees no CUDA device; use --dry-run to walk the parts on a CPU")
        return 1
    result["extensions"] = build_extensions()
    for name in asked.parts:
        budget_s = BUDGETS_S[name] * (DRY_PATIENCE if asked.dry_run else 1)
        part = run_part(name, command_of(name, asked.dry_run), budget_s)
        result["parts"][name] = part
        (out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    result["ok"] = all(is_ok(part) for part in result["parts"].values())
    (out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"ok": result["ok"], "results": str(out / "results.json")}))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
