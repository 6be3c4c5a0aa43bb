"""Write the locks: what an install needs, pinned, so that pip installs it without resolving.

    locks/run.txt       to serve, measure and draw: the extras `server` and `bench`
    locks/frontend.txt  all of a front end of an engine elsewhere: `server` and `rdma`, no torch
    locks/gguf.txt      what `make talk` needs beside `run`: the extra `gguf`
    locks/ray.txt       to serve on Ray, beside `run`: the extra `ray`
    locks/dev.txt       what the tests need beside `run`: the extra `dev`

It reads what is installed in this environment, whose versions must be those of constraints.txt.
Ray has an environment of its own: `.venv/ray/bin/python scripts/lock.py` writes its lock too.
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
"""These stand alone; the others leave out what `run` has."""
OF_ENGINES = frozenset({"accelerate", "torch"})
"""What a process without a model needs nothing of."""
BUILD = "setuptools"
"""What builds the package itself."""
HEAD = "# Written by scripts/lock.py: `pip install --no-deps -r locks/run.txt -e .`\n"


def closure(extras: tuple[str, ...], without: frozenset[str] = frozenset()) -> dict[str, str]:
    """Names and versions of all that `qllm-runtime` with some extras needs on this machine."""
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
    """The text of one lock."""
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
