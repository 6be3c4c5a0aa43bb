"""Choice of a drafter by its name: our own, and those of installed packages."""

from collections.abc import Sequence
from typing import cast

from qllm.drafters.exit import Exit
from qllm.drafters.grammar import Forced
from qllm.drafters.lookup import Lookup
from qllm.drafters.protocol import DraftRequest, MakeDrafter
from qllm.errors import ConfigError, shown
from qllm.plugins import installed, loaded

GROUP = "qllm.drafters"
NONE = "none"
"""Value of the setting `draft` without drafts."""
EXIT = "exit:"
"""Begin of the names of drafts by the model's first layers. A number of layers follows it."""
MODEL = "model:"
"""Begin of the setting `draft` before the path of a draft model."""

MTP = "mtp"
"""Name of drafts by the layer of a checkpoint that predicts further tokens."""


class Auto:
    """The tokens that the grammar forces. If it forces none, the tokens of a `Lookup`."""

    def __init__(self, request: DraftRequest) -> None:
        self._forced, self._lookup = Forced(request), Lookup(request)

    def propose(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """See `Drafter`."""
        return self._forced.propose(token_ids, most) or self._lookup.propose(token_ids, most)


OWN: dict[str, MakeDrafter] = {"auto": Auto, "lookup": Lookup, "grammar": Forced}


def drafters() -> list[str]:
    """Return the names of our own drafters and of those of installed packages."""
    return [*OWN, f"{EXIT}E", f"{MODEL}PATH", MTP, *sorted(installed(GROUP, "drafter"))]


def model_path(name: str) -> str | None:
    """Return the path of the draft model that a name of a drafter has; None if it has none.

    Raises:
        ConfigError: The path is missing.
    """
    if not name.startswith(MODEL):
        return None
    path = name.removeprefix(MODEL)
    if not path.strip():
        raise ConfigError(
            f"draft={name!r} names no model; give a folder, a GGUF file or a hub id, like "
            f"draft='{MODEL}my/small-model'"
        )
    return path


def load_drafter(name: str) -> MakeDrafter | Exit:
    """Return the maker of the drafters of a name, or the layer at which drafts leave the model.

    Raises:
        ConfigError: The name is unknown (the message lists the known ones), or its package is
            broken.
    """
    if name in OWN:
        return OWN[name]
    if name.startswith(EXIT):
        layer = name.removeprefix(EXIT)
        if not (layer.isascii() and layer.isdecimal() and int(layer)):
            raise ConfigError(
                f"draft={name!r} must name the number of layers after which drafts leave the "
                "model, at least 1 and less than the model has, like exit:4"
            )
        return Exit(int(layer))
    point = installed(GROUP, "drafter").get(name)
    if point is None:
        known = ", ".join([NONE, *drafters()])
        raise ConfigError(f"draft={name!r} is unknown; use one of {known}")
    make = loaded(point, "drafter")
    if not callable(make):
        raise ConfigError(
            f"drafter {name!r} at {point.value} is {shown(make)}, which makes no drafters; name a "
            "class, or a function that returns a drafter, in the entry point of its package"
        )
    return cast("MakeDrafter", make)
