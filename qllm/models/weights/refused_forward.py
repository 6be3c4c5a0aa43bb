"""The forward of a module of experts whose weights are elsewhere."""

from typing import NoReturn

from qllm.errors import ModelError


class RefusedForward:
    """A forward that raises a ModelError.

    Args:
        path: Path of the module.
        where: Place of its weights.
        advice: What to do instead.
    """

    is_ours = True
    """The mark of forwards that this package replaced."""

    def __init__(self, path: str, where: str, advice: str) -> None:
        self._path, self._where, self._advice = path, where, advice

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise ModelError(
            f"the experts of {self._path} are in {self._where}, so its own forward cannot run; "
            f"{self._advice}"
        )
