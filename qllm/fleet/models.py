"""The models of one server: their names, their places, and the choice of `model="auto"`."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from qllm.errors import ConfigError, shown
from qllm.fleet.routes import EngineView, RequestView

AUTO = "auto"
"""Name that a request gives to let the server choose among whole models."""
LS_WAIT_S, BE_WAIT_S = 1.0, 60.0
"""Longest estimated times until the first token for which an earlier model is chosen, by class."""

_DEPTH = re.compile(r"(?P<model>.+)@(?P<depth>[0-9]+)", re.DOTALL)


class Named(NamedTuple):
    """A model of a server with several models."""

    name: str
    """Name for clients. Empty for engines that have no name here: then it is their model's."""
    where: str
    """Alias, folder or hub id of the model; or the addresses of its engines, with commas."""
    depth: int | None = None
    """Number of layers to load; None is all."""


def parse_also(text: str) -> Named:
    """Return the model that a text `[NAME=]MODEL[@DEPTH]` names.

    A path that contains `=` before its first slash is written with `./`. The name of a model is by
    default the rest of the text, so a model at another depth has another name.

    Raises:
        ConfigError: The text has no model, or an empty name.
    """
    name, has_name, rest = text.partition("=")
    if not has_name or "/" in name:
        name, rest = "", text
    cut = _DEPTH.fullmatch(rest)
    where, depth = (rest, None) if cut is None else (cut["model"], int(cut["depth"]))
    if not where.strip() or (has_name and not name.strip() and rest is not text):
        raise ConfigError(
            f"also={shown(text)} must be MODEL, MODEL@DEPTH or NAME=MODEL, as tiny@2 or "
            "small=org/model"
        )
    return Named(name.strip() or rest.strip(), where.strip(), depth)


def parse_engines(texts: Iterable[str]) -> list[Named]:
    """Return the models whose engines are at addresses `[NAME=]ADDRESS`.

    Addresses with one name are the engines of one model. An address without a name is the only
    engine of its model.

    Raises:
        ConfigError: A text has no address, or an empty name.
    """
    found: list[Named] = []
    for text in texts:
        name, has_name, address = text.rpartition("=")
        if not address.strip() or (has_name and not name.strip()):
            raise ConfigError(
                f"also={shown(text)} must be an address of an engine, or NAME=ADDRESS, as "
                "10.0.0.2:7700 or small=10.0.0.2:7700"
            )
        before = next((one for one in found if name and one.name == name), None)
        if before is None:
            found.append(Named(name, address))
        else:
            found[found.index(before)] = Named(name, f"{before.where},{address}")
    return found


def refuse_same_names(names: Iterable[str]) -> None:
    """Refuse models of one server that have the same name for clients.

    Raises:
        ConfigError: A name occurs twice.
    """
    seen = set[str]()
    for name in names:
        if name in seen:
            raise ConfigError(
                f"two models are called {shown(name)}; give one of them another name, with "
                "also=NAME=MODEL or served_model_name"
            )
        seen.add(name)


class Candidate(NamedTuple):
    """A model that `auto` may choose."""

    name: str
    engine: EngineView
    """The work and the speed of the model's engines together."""
    longest: int
    """Most tokens of a prompt and its answer together."""
    is_whole: bool
    """True if no layer of the model was left out."""
    serves: bool = True
    """True if an engine of the model serves now."""


def choose_model(request: RequestView, models: Sequence[Candidate]) -> Candidate | None:
    """Choose the model of a request; return None if no model can answer it.

    The order of the models is the order of preference. The first model is chosen that has room for
    the prompt and the answer, and whose first token is expected in `LS_WAIT_S`, or for BE in
    `BE_WAIT_S`. If there is none, the model with the earliest first token is chosen. A model that
    is cut, or that does not serve, is never chosen.
    """
    need = request.num_prompt_tokens + request.max_tokens
    able = [m for m in models if m.is_whole and m.serves and need <= m.longest]
    most_s = LS_WAIT_S if request.is_ls else BE_WAIT_S
    in_time = (m for m in able if _first_token_s(request, m.engine) <= most_s)
    soonest = min(able, key=lambda m: _first_token_s(request, m.engine), default=None)
    return next(in_time, soonest)


def _first_token_s(request: RequestView, engine: EngineView) -> float:
    """Return the seconds until the request's first token, if no other request arrives."""
    waits_s = engine.ls_start_s if request.is_ls else engine.busy_s
    return waits_s + request.num_prompt_tokens * engine.costs.token_s
