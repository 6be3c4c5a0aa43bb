"""Print files over 500 lines, and classes over 300 lines or 20 methods, largest first.

It is a report for a reader, and never fails: a large part may be the right one.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("qllm", "policies", "bench", "tests", "scripts")
MOST_LINES, MOST_CLASS_LINES, MOST_METHODS = 500, 300, 20


def large_classes(source: str) -> list[tuple[str, int, int]]:
    """Return name, lines and number of methods of each large class."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            methods = sum(isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef) for x in node.body)
            if lines > MOST_CLASS_LINES or methods > MOST_METHODS:
                found.append((node.name, lines, methods))
    return found


def main() -> None:
    """Print both lists."""
    files = {
        file.relative_to(ROOT): file.read_text()
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
    }
    lengths = sorted(((text.count("\n"), file) for file, text in files.items()), reverse=True)
    for lines, file in lengths:
        if lines > MOST_LINES:
            print(f"{lines:5} lines  {file}")
    for file, text in files.items():
        for name, lines, methods in large_classes(text):
            print(f"{lines:5} lines, {methods} methods  {name} in {file}")


if __name__ == "__main__":
    main()
