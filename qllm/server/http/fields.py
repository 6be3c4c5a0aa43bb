"""Base classes of request bodies: which fields a body may have."""

import json
import pickle
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    model_validator,
)

from qllm.errors import brief, check_text
from qllm.server.http.unknown import Unserved, found

_Item = TypeVar("_Item")
Items = Annotated[list[_Item], Field(fail_fast=True)]
"""A list whose check stops at the first wrong item.

A body may hold a million items, and listing a million errors would stall other requests.
"""
MOST_FIELDS = 200
"""Most fields of one object. Each unknown field would be its own error, so more are refused."""


def _all_of(kinds: type | tuple[type, ...], what: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        for name, x in value.items() if isinstance(value, dict) else ():
            if not isinstance(x, kinds) or isinstance(x, bool):
                raise ValueError(f"the value of {brief(name)} is {brief(x)}; it must be {what}")
        return value

    return BeforeValidator(check)


Texts = Annotated[dict[str, str], _all_of(str, "text")]
Numbers = Annotated[dict[str, float], _all_of((int, float), "a number")]


Seed = Annotated[int | None, Field(ge=-(2**63), lt=2**63)]


class Body(BaseModel):
    """A JSON body: no unknown fields, no conversion between types; null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    ids: ClassVar[tuple[str, ...]] = ()
    """Fields that may be long lists of token ids; see `bodies.packed`."""
    packs: ClassVar[tuple[str, ...]] = ()
    """Fields that may be long lists of messages."""
    _num_bytes: int = PrivateAttr(0)

    @property
    def num_bytes(self) -> int:
        """Size of the body in bytes; 0 for a short body, which is read at once."""
        return self._num_bytes

    @num_bytes.setter
    def num_bytes(self, value: int) -> None:
        self._num_bytes = value

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data  # the wrong type: pydantic reports it
        if len(data) > MOST_FIELDS:
            text = f"{len(data)} fields are more than any object here has; at most {MOST_FIELDS}"
            raise ValueError(text)
        if all(map(_is_plain, data)) and all(map(_is_plain, data.values())):
            return data
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            check_text("the body", data)  # reports the place
        return data

    @model_validator(mode="before")
    @classmethod
    def _null_says_nothing(cls, data: Any) -> Any:
        """Replace null by the default, for fields whose default is not null."""
        if not isinstance(data, dict) or None not in data.values():
            return data
        names = _with_defaults(cls)
        return {name: x for name, x in data.items() if x is not None or name not in names}


def _is_plain(value: Any) -> bool:
    """Return True if the value can hold only ASCII text."""
    return value.isascii() if isinstance(value, str) else not isinstance(value, dict | list)


@cache
def _with_defaults(model: type[BaseModel]) -> frozenset[str]:
    """Return the names, as in bodies, of the fields with a default that is not null."""
    return frozenset(
        field.alias or name
        for name, field in model.model_fields.items()
        if not field.is_required() and field.get_default(call_default_factory=True) is not None
    )


class Packed(NamedTuple):
    """A list that stays pickled in the server's process: unpickling a million objects stalls it."""

    data: bytes
    num: int
    """Number of items."""

    def opened(self) -> list[Any]:
        """Return the items, unpickled."""
        found: list[Any] = pickle.loads(self.data)
        return found


class Open(Body):
    """A part of a request that may have unknown fields; see `unknown`."""

    model_config = ConfigDict(extra="allow")
    shows_all: ClassVar[bool] = False
    """True if the model sees the unknown fields."""
    may_hold: ClassVar[bool] = True
    """True if an unknown field could constrain or end the answer."""

    def unserved(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each field whose value has no effect, and what to do about it."""
        yield from ()


class LeftOut(Body):
    """A tool that this server does not run. The model does not see it."""

    model_config = ConfigDict(extra="ignore")
    type: str

    def unserved(self) -> Iterator[tuple[str, str]]:
        """Yield the tool's type, and the advice for the client."""
        yield self.type, f"tools of type {brief(self.type)} are not run here; leave it out"


def kind_of(value: Any) -> Any:
    """Return the `type` of a part of a body, parsed or not."""
    return value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)


class Asked(Open):
    """The body of a request for an answer."""

    may_be_lossy: ClassVar[bool] = False
    """True for bodies of routes that serve lossy answers."""
    lossy: bool | None = None
    """True to allow answers of models that are cut, which may be worse (docs/guides/depths.md)."""
    _unserved: list[Unserved] = PrivateAttr(default_factory=list)

    @property
    def all_unserved(self) -> list[Unserved]:
        """All unserved parts of the request. The route accepts, refuses or reports each."""
        return self._unserved

    @model_validator(mode="after")
    def _find_unserved(self) -> Self:
        if self.lossy and not self.may_be_lossy:
            raise ValueError(
                "lossy=true is served by /v1/chat/completions and /v1/completions alone; leave it "
                "out, or name a model that is cut (GET /v1/models lists depths)"
            )
        self._unserved = found(self)
        return self


class SentBack(Open):
    """A part of an answer that a client sends back, possibly with unknown fields."""

    may_hold = False
