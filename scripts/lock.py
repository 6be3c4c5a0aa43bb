"""Write the locks: pinned packages of an install, so that pip installs them without resolving.

    locks/run.txt       to serve, measure and draw: the extras `server` and `bench`
    locks/frontend.txt  for a front end without an engine: `server` and `rdma`, no torch
    locks/gguf.txt      for `make talk`, in addition to `run`: the extra `gguf`
    locks/ray.txt       to serve on Ray, in addition to `run`: the extra `ray`
    locks/dev.txt       for the tests, in addition to `run`: the extra `dev`

It reads the packages of this environment; their versions must be those of constraints.txt.
Ray has its own environment: `.venv/ray/bin/python scripts/lock.py` writes its lock too.
"""

from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCKS = {
    "run": ("bench", "server"),
    "frontend": ("rdma", "server"),
    "gguf": ("gguf",),
    "ray": ("ray",),
    "dev": ("dev",),
}
WHOLE = ("run", "frontend")
"""Locks that stand alone; the others leave out the packages of `run`."""
OF_ENGINES = frozenset({"accelerate", "torch"})
"""Packages that a process without a model does not need."""
BUILD = "setuptools"
"""Package that builds our package."""
HEAD = "# Written by scripts/lock.py: `pip install --no-deps -r locks/run.txt -e .`\n"


def closure(extras: tuple[str, ...], without: frozenset[str] = frozenset()) -> dict[str, str]:
    """Return names and versions of the packages that `qllm-runtime` needs with some extras."""
    found = {BUILD: distribution(BUILD).version}
    todo, seen = [("qllm-runtime", frozenset(extras))], set()
    while todo:
        if (place := todo.pop()) in seen:
            continue
        seen.add(place)
        name, wanted = place
        if name in without:
            continue
        dist = distribution(name)
        if name != "qllm-runtime":
            found[canonicalize_name(dist.name)] = dist.version.partition("+")[0]
        for text in dist.requires or ():
            need = Requirement(text)
            if need.marker is None or any(
                need.marker.evaluate({"extra": extra}) for extra in ("", *wanted)
            ):
                todo.append((canonicalize_name(need.name), frozenset(need.extras)))
    return found


def lock(name: str) -> str:
    """Return the text of one lock."""
    found = closure(LOCKS[name], OF_ENGINES if name == "frontend" else frozenset())
    if name not in WHOLE:
        for other in closure(LOCKS["run"]):
            found.pop(other, None)
    return HEAD + "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))


if __name__ == "__main__":
    for each in LOCKS:
        if each == "ray" and find_spec("ray") is None:
            continue
        (ROOT / "locks" / f"{each}.txt").write_text(lock(each))
