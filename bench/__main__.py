"""Run a bench by its name: `python -m bench shapes --quick` is `bench/models/shapes.py`."""

import ast
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def named() -> dict[str, Path]:
    """Return every module here that has a `main`; a folder's module has the folder's name."""
    found = {}
    for path in sorted(HERE.rglob("*.py")):
        own = path.name == "__main__.py"
        if (path.parent != HERE or not own) and "\ndef main(" in path.read_text():
            found[path.parent.name if own else path.stem] = path
    return found


def listed(benches: dict[str, Path]) -> str:
    """Return the names with the first line of each module's docstring."""
    lines = {}
    for name, path in benches.items():
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        lines[name] = text.partition("\n")[0]
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {line}" for name, line in lines.items())


def main() -> None:
    """Run the named bench with the other arguments; without a name, list all."""
    benches = named()
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(f"python -m bench NAME [arguments]\n\n{listed(benches)}")
        return
    name = sys.argv[1]
    if name not in benches:
        print(f"no bench is called {name!r}; there are\n\n{listed(benches)}", file=sys.stderr)
        raise SystemExit(2)
    del sys.argv[1]
    module = benches[name].relative_to(HERE.parent).with_suffix("")
    runpy.run_module(".".join(module.parts), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
