"""The templates of `qllm new-drafter`: a package with the user's own drafter."""

from pathlib import Path

from qllm.cli.new_package import Package, template, write_package
from qllm.drafters.choose import GROUP, NONE, drafters


def new_drafter(name: str, out: Path = Path()) -> Path:
    """Write a package with a drafter: module, entry point, tests and README.

    Args:
        name: Name of the module, like `my_drafter`. The drafter's name is then `my-drafter`.
        out: Folder in which the folder `my_drafter` is made.

    Returns:
        The new folder.

    Raises:
        ConfigError: The name cannot be used, or the folder exists.
    """
    package = Package(
        kind="drafter",
        group=GROUP,
        description="A drafter for qllm",
        source=template("drafter.py"),
        test=template("test_drafter.py"),
        readme=template("README_drafter.md"),
        known=[NONE, *drafters()],
    )
    return write_package(name, package, out)
