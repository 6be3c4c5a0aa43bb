"""Write the locks: what an install needs, pinned, so that pip installs it without resolving.

    locks/run.txt   to serve, measure and draw: the extras `server` and `bench`
    locks/gguf.txt  what `make talk` needs beside it: the extra `gguf`
    locks/dev.txt   what the tests need beside it: the extra `dev`

It reads what is installed in this environment, whose versions must be those of constraints.txt.
"""

from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCKS = {"run": ("bench", "server"), "gguf": ("gguf",), "dev": ("dev",)}
BUILD = "setuptools"
"""What builds the package itself."""
HEAD = "# Written by scripts/lock.py: `pip install --no-deps -r locks/run.txt -e .`\n"


def closure(extras: tuple[str, ...]) -> dict[str, str]:
    """Names and versions of all that `qllm-runtime` with some extras needs on this machine."""
    found = {BUILD: distribution(BUILD).version}
    todo, seen = [("qllm-runtime", frozenset(extras))], set()
    while todo:
        if (place := todo.pop()) in seen:
            continue
        seen.add(place)
        name, wanted = place
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
    """The text of one lock; all others leave out what `run` has."""
    found = closure(LOCKS[name])
    if name != "run":
        for other in closure(LOCKS["run"]):
            found.pop(other, None)
    return HEAD + "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))


if __name__ == "__main__":
    for each in LOCKS:
        (ROOT / "locks" / f"{each}.txt").write_text(lock(each))
