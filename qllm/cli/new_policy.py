"""The template of `qllm new-policy`: a package with the user's own policy, ready to install."""

import keyword
import re
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from qllm.errors import ConfigError
from qllm.plugins import installed_policies

KINDS = ("rank", "plan")
"""Kinds of template: a `RankPolicy`, or a full `Policy` that makes its own plans."""
_IMPORT = "from qllm.sim.world import World\n"


def new_policy(name: str, kind: str = "rank", out: Path = Path()) -> Path:
    """Write a package with a policy: module, entry point, tests and README.

    Args:
        name: Name of the module, like `my_policy`. The policy's name is then `my-policy`.
        kind: Member of `KINDS`.
        out: Folder in which the folder `my_policy` is made.

    Returns:
        The new folder.

    Raises:
        ConfigError: The name or the kind cannot be used, or the folder exists.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r} must be one of: {', '.join(KINDS)}")
    module = name.replace("-", "_")
    source = _template(f"{kind}.py")
    class_name = "".join(word.capitalize() for word in module.split("_"))
    test = _template("test.py")
    if kind == "rank":
        test = test.replace(_IMPORT, _IMPORT + "from qllm.device.rank import compile_host\n")
        test += _template("test_rank.py")
    _check_name(name, module, class_name, _imported(source + test))
    folder = out / module
    if folder.exists():
        raise ConfigError(f"{folder} exists and is left as it is; choose another name or --out")
    words = {"module": module, "name": module.replace("_", "-"), "class_name": class_name}
    for path, text in (
        (f"{module}.py", source),
        (f"tests/test_{module}.py", test),
        ("pyproject.toml", _template("pyproject.toml")),
        ("README.md", _template("README.md")),
    ):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(text).substitute(words))
    return folder


def _template(name: str) -> str:
    return (files("qllm.cli") / "templates" / f"{name}.txt").read_text()


def _imported(source: str) -> set[str]:
    lines = (line for line in source.splitlines() if line.startswith(("from", "import")))
    return set(re.findall(r"\w+", " ".join(lines)))


def _check_name(name: str, module: str, class_name: str, in_use: set[str]) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", module):
        raise ConfigError(
            f"name={name!r} must be lower-case words of letters and digits with _ or - between "
            "them, a letter first, like my_policy"
        )
    policy = module.replace("_", "-")
    if policy in installed_policies():
        raise ConfigError(f"a policy {policy!r} is installed already; choose another name")
    if keyword.iskeyword(module) or class_name in in_use or find_spec(module) is not None:
        raise ConfigError(
            f"name={name!r} would hide a word or a module that Python or qllm uses; choose "
            "another, like my_policy"
        )
