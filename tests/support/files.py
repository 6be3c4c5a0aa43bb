"""The root of the repository and its Python files."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_files(*folders: str) -> list[str]:
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return sorted(str(file.relative_to(ROOT)) for file in files)
