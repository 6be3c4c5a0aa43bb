"""Folders that take long to make: each is made once in a process, and copied."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDERS = tempfile.TemporaryDirectory(prefix="qllm-copies-")
MADE: dict[tuple[Any, ...], Path] = {}
"""Folders by what they were made of."""


def copy_into(place: Path, made_of: tuple[Any, ...], make: Callable[[Path], object]) -> None:
    """Copy what `make` writes into a folder. The same things give the same files."""
    if made_of not in MADE:
        folder = Path(FOLDERS.name) / str(len(MADE))
        folder.mkdir()
        make(folder)
        MADE[made_of] = folder
    shutil.copytree(MADE[made_of], place, dirs_exist_ok=True)
