"""The writer of a package with a plug-in of the user, from templates, ready to install."""

import keyword
import re
from collections.abc import Collection
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import NamedTuple

from qllm.errors import ConfigError


class Package(NamedTuple):
    """The templates of a package, and what they need to know."""

    kind: str
    """Kind of the plug-in, such as `policy`."""
    group: str
    """Group of the entry point."""
    description: str
    source: str
    test: str
    readme: str
    known: Collection[str]
    """Names of this kind that are in use."""


def write_package(name: str, package: Package, out: Path) -> Path:
    """Write a package: module, entry point, tests and README.

    Args:
        name: Name of the module, like `my_policy`. The plug-in's name is then `my-policy`.
        package: Templates of the package.
        out: Folder in which the folder of the package is made.

    Returns:
        The new folder.

    Raises:
        ConfigError: The name cannot be used, or the folder exists.
    """
    module = name.replace("-", "_")
    class_name = "".join(word.capitalize() for word in module.split("_"))
    _check_name(name, module, class_name, package)
    folder = out / module
    if folder.exists():
        raise ConfigError(f"{folder} exists and is left as it is; choose another name or --out")
    words = {
        "module": module,
        "name": module.replace("_", "-"),
        "class_name": class_name,
        "group": package.group,
        "description": package.description,
    }
    for path, text in (
        (f"{module}.py", package.source),
        (f"tests/test_{module}.py", package.test),
        ("pyproject.toml", template("pyproject.toml")),
        ("README.md", package.readme),
    ):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(text).substitute(words))
    return folder


def template(name: str) -> str:
    """Return the text of a template."""
    return (files("qllm.cli") / "templates" / f"{name}.txt").read_text()


def _imported(source: str) -> set[str]:
    lines = (line for line in source.splitlines() if line.startswith(("from", "import")))
    return set(re.findall(r"\w+", " ".join(lines)))


def _check_name(name: str, module: str, class_name: str, package: Package) -> None:
    example = f"my_{package.kind}"
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", module):
        raise ConfigError(
            f"name={name!r} must be lower-case words of letters and digits with _ or - between "
            f"them, a letter first, like {example}"
        )
    plugin = module.replace("_", "-")
    if plugin in package.known:
        raise ConfigError(f"a {package.kind} {plugin!r} is installed already; choose another name")
    in_use = _imported(package.source + package.test)
    if keyword.iskeyword(module) or class_name in in_use or find_spec(module) is not None:
        raise ConfigError(
            f"name={name!r} would hide a word or a module that Python or qllm uses; choose "
            f"another, like {example}"
        )
