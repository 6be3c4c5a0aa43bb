"""Run the GPU tests with this machine's python3 and no venv, qllm imported in place.

build/in-place/ stands in for an install: a link that names policies/ `qllm_policies`, and the
metadata through which entry points are found. The last line of stdout is the result as JSON,
also written to $OUT/gpu-check.json where $OUT is set. Nothing passed is a failure.
"""

import json
import os
import platform
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "in-place"


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


def run_tests() -> dict[str, int | float]:
    """Run `pytest -m gpu`; warnings of packages we did not pin are no errors here."""
    report = SITE / "report.xml"
    report.unlink(missing_ok=True)
    path = os.pathsep.join([str(ROOT), str(SITE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-W", "default", "tests"]
    command += [f"--junitxml={report}", *sys.argv[1:]]
    status = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}).returncode
    suite = ElementTree.parse(report).getroot().find("testsuite") if report.exists() else None
    counts = {} if suite is None else suite.attrib
    failed, errors, skipped = (int(counts.get(k, 0)) for k in ("failures", "errors", "skipped"))
    passed = int(counts.get("tests", 0)) - failed - errors - skipped
    return {
        "passed": passed,
        "failed": failed,
        "errors": errors,
        "skipped": skipped,
        "seconds": float(counts.get("time", 0)),
        "status": status or int(passed == 0),
    }


def describe_machine() -> dict[str, str | None]:
    """Name what the result depends on; None for what is not there."""
    machine: dict[str, str | None] = {"python": platform.python_version()}
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    machine["commit"] = git.stdout.strip() if git.returncode == 0 else None
    try:
        import torch
    except ImportError:
        return machine | {"torch": None, "gpu": None}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return machine | {"torch": torch.__version__, "gpu": gpu}


def main() -> int:
    """Run the tests, report, and fail where they failed."""
    write_site()
    result = {"check": "gpu", **describe_machine(), **run_tests()}
    line = json.dumps(result)
    if out := os.environ.get("OUT"):
        (Path(out) / "gpu-check.json").write_text(line + "\n")
    print(line)
    return int(result["status"] or 0)


if __name__ == "__main__":
    sys.exit(main())
