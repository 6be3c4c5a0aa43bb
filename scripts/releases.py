"""Serve the same models with several releases of transformers, and compare drivers and tokens.

    .venv/bin/python scripts/releases.py [--all]

The releases are the lowest that `pyproject.toml` allows, the tested one and the newest in the
package index; with `--all`, every one between. Each has its own environment in `.venv/releases`,
with the packages whose versions differ from `.venv`, and `.venv` behind it. The tested release
writes tiny bf16 models of the eight families, of the hybrids and of the ropes that depend on the
length; then every release serves them from their folders.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RELEASES = ROOT / ".venv" / "releases"
PROMPTS = [list(range(5, 40)), [7, 3, 250, 11, 98, 4, 61, 200], [*range(60, 5, -1)]]
NEW_TOKENS = 24
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
SAME = ("drivers", "kernels", "prefix cache", "evictions", "tokens")
"""Parts of the result of `served` that must be equal."""


def allowed() -> Requirement:
    """Return the requirement of `pyproject.toml`."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return next(r for r in map(Requirement, wanted) if r.name == "transformers")


def published() -> list[Version]:
    """Return all releases that the package index has today."""
    said = subprocess.run(
        [*PIP, "index", "versions", "transformers"], check=True, capture_output=True, text=True
    ).stdout
    listed = re.search(r"^Available versions: (.*)$", said, re.M)
    if listed is None:
        raise SystemExit(f"`pip index versions transformers` lists no versions, but says:\n{said}")
    return [Version(text) for text in listed[1].split(", ")]


def tested() -> Version:
    """Return the release of `constraints.txt`."""
    pinned = re.search(r"^transformers==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    if pinned is None:
        raise SystemExit("constraints.txt has no line `transformers==VERSION`")
    return Version(pinned[1])


def chosen(found: Sequence[Version], *, every: bool) -> list[Version]:
    """Return the releases to compare; the tested one is the first.

    Args:
        found: Releases in any order.
        every: True for all releases that `pyproject.toml` allows, not only lowest and newest.
    """
    fit = sorted(v for v in found if v in allowed().specifier)
    if tested() not in fit:
        raise SystemExit(f"{tested()} of constraints.txt is not among the releases {fit}")
    others = fit if every else [fit[0], fit[-1]]
    return [tested(), *(v for v in dict.fromkeys(others) if v != tested())]


def environment(release: Version) -> Path:
    """Make an environment with a release, if it is not there; return its Python.

    pip sees `.venv` behind it, so it installs only what the release needs in another version.
    """
    folder = RELEASES / str(release)
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    ours = next((ROOT / ".venv").glob("lib/python*/site-packages"))
    (site / "ours.pth").write_text(f"import site; site.addsitedir({str(ours)!r})\n")
    is_behind = metadata.version("transformers") == str(release)
    if not is_behind and not (site / f"transformers-{release}.dist-info").exists():
        print(f"installing transformers {release}", file=sys.stderr)
        of_it = (*PIP, "--python", folder)
        install = ("install", "--quiet", "--no-compile", f"transformers=={release}")
        subprocess.run([*of_it, *install], check=True)
        subprocess.run([*of_it, "check"], check=True, stdout=sys.stderr)  # of our metadata too
    return python


def call(python: Path, *args: object) -> str:
    """Run this script in an environment; return what it prints."""
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [python, __file__, *map(str, args)],
        env={**os.environ, **own, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def write_models(folder: Path) -> None:
    """Write the tiny models."""
    import torch

    from tests.support import families, hybrids, rope

    bf16 = torch.bfloat16
    models = {name: families.make_model(name, bf16) for name in families.FAMILIES}
    models |= {name: hybrids.make_hybrid(name) for name in hybrids.NATIVE}
    models |= {kind: rope.model_of(kind, "bf16") for kind in rope.KINDS}
    for name, model in models.items():
        model.save_pretrained(folder / name)


def served(folder: Path) -> dict[str, Any]:
    """Return the results of the installed release for the model in a folder."""
    from qllm import QLLMEngine

    with QLLMEngine.from_pretrained(folder, max_kv_tokens=2048, run_in="thread") as engine:
        done = engine.generate(PROMPTS * 2, temperature=0, max_tokens=NEW_TOKENS)
        kernels = dict(engine.kernels)
        return {
            "parts": kernels.pop("parts"),
            "drivers": engine.drivers,
            "kernels": kernels,
            "prefix cache": engine.stats()["prefix_cache"].get("off", "on"),
            "evictions": [one.metrics.evictions for one in done],
            "tokens": [list(one.token_ids) for one in done],
        }


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the differences between a release's results for a model and the tested one's.

    The source or trial by which a part is known may differ; that it is known may not.
    """
    said = [
        f"{key}: {found.get(key)}, not {expected[key]}"
        for key in SAME
        if found.get(key) != expected[key]
    ]
    if "its own module" in found["parts"] and "its own module" not in expected["parts"]:
        said.append(f"parts: {found['parts']}")
    return said


def compare(releases: Sequence[Version]) -> int:
    """Serve the models with every release; print and count the differences from the first."""
    pythons = {release: environment(release) for release in releases}
    expected: dict[str, Any] = {}
    num_different = 0
    with tempfile.TemporaryDirectory() as folder:
        call(pythons[releases[0]], "--write", folder)
        for release, python in pythons.items():
            found = json.loads(call(python, "--serve", folder).splitlines()[-1])
            if found.pop("transformers") != str(release) or not found:
                raise SystemExit(f"the environment of {release} serves with another release")
            expected = expected or found
            said = [
                f"  {name}: {text}"
                for name, one in expected.items()
                for text in differences(one, found[name])
            ]
            num_different += len(said)
            same = f"the same drivers, kernels, prefix cache and tokens of {len(found)} models"
            print(f"transformers {release}:", *(said or [same]), sep="\n" if said else " ")
    return num_different


def main() -> int:
    """Compare the releases; return 1 if one differs from the tested one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every release that is allowed")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write is not None:
        write_models(given.write)
        return 0
    if given.serve is not None:
        found: dict[str, Any] = {f.name: served(f) for f in sorted(given.serve.iterdir())}
        print(json.dumps({"transformers": metadata.version("transformers"), **found}))
        return 0
    return int(compare(chosen(published(), every=given.all)) > 0)


if __name__ == "__main__":
    sys.exit(main())
