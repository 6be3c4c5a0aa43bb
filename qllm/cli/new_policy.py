"""The templates of `qllm new-policy`: a package with the user's own policy."""

from pathlib import Path

from qllm.cli.new_package import Package, template, write_package
from qllm.errors import ConfigError
from qllm.plugins import GROUP, installed_policies

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
    test = template("test.py")
    if kind == "rank":
        test = test.replace(_IMPORT, _IMPORT + "from qllm.device.rank import compile_host\n")
        test += template("test_rank.py")
    package = Package(
        kind="policy",
        group=GROUP,
        description="A scheduling policy for qllm",
        source=template(f"{kind}.py"),
        test=test,
        readme=template("README.md"),
        known=installed_policies(),
    )
    return write_package(name, package, out)
