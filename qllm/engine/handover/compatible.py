"""Conditions under which KV from another engine can be used here."""

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from qllm.engine.handover.format import Header, TensorPart
from qllm.engine.storage.file import Layout
from qllm.errors import CheckpointError
from qllm.ingress import Submission


class Carried(NamedTuple):
    """Description of a request's KV in a parcel."""

    committed: int
    """Tokens whose KV is present in every layer."""
    kept: tuple[int, int, int] | None
    """First token, end and next layer of a row that is part-way through the layers."""
    pages: tuple[str, ...]
    """Names of the first pages, in hex."""

    @property
    def hi(self) -> int:
        """Number of tokens whose KV is present in some layer."""
        return self.committed if self.kept is None else self.kept[1]


class Terms(NamedTuple):
    """Conditions of this engine for foreign KV: the same bits, in the same shape as its own KV."""

    identity: Mapping[str, str]
    """Names and values of everything that decides the bits of KV, except the tokens."""
    layout: Layout | None
    """Layout of a page; None if some layer runs without our kernels, which read KV by address."""
    page_size: int
    num_layers: int
    num_kv_layers: int
    width: int
    """Width of a hidden state."""

    def check(self, header: Header, item: Submission) -> Carried:
        """Return a parcel's description, if the parcel fits the request and this engine.

        Raises:
            CheckpointError: The parcel does not match; the text names the difference.
        """
        says = header.says
        theirs = says.get("identity")
        if theirs != self.identity:
            theirs = theirs if isinstance(theirs, dict) else {}
            wrong = [name for name in self.identity if theirs.get(name) != self.identity[name]]
            raise CheckpointError(f"the KV is of an engine with another {', '.join(wrong)}")
        if says.get("tokens") != digest_of(item.token_ids):
            raise CheckpointError("the KV is of other tokens")
        carried = self._carried(says, len(item.token_ids))
        if header.parts.keys() != self._names(header, carried):
            raise CheckpointError("the KV is not that of all layers")
        for name, part in header.parts.items():
            self._check_shape(name, part, carried)
        owes_prompt = item.sampling.prompt_logprobs is not None and not item.num_output_tokens
        if owes_prompt and carried.committed and "last_hidden" not in header.parts:
            raise CheckpointError("the prompt's log-probabilities are owed, and not all has come")
        return carried

    def _carried(self, says: Mapping[str, Any], num_tokens: int) -> Carried:
        try:
            committed, kept, pages = says["committed"], says["kept"], tuple(says["pages"])
            lo, hi, layer = (committed, committed, 1) if kept is None else kept
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"KV whose header makes no sense: {error!r:.100}") from error
        numbers = (committed, lo, hi, layer)
        if not (
            all(type(n) is int for n in numbers)
            and all(type(name) is str for name in pages)
            and 0 <= lo == committed <= hi <= num_tokens
            and committed < num_tokens
            and (kept is None) is (lo == hi)
            and 0 < layer <= self.num_layers
            and len(pages) * self.page_size <= committed
            and (committed or kept)
        ):
            raise CheckpointError(f"KV whose header makes no sense: {numbers}")
        return Carried(committed, None if kept is None else (lo, hi, layer), pages)

    def _names(self, header: Header, carried: Carried) -> set[str]:
        """Return the names of a request's tensors. They depend on the layers that have states."""
        states = {name for name in header.parts if name.startswith("state.")}
        layers = {name.split(".")[1] for name in states}
        for layer in layers if carried.committed else ():
            start = f"state.{layer}.{carried.committed}."
            if not any(name.startswith(start) for name in states):
                raise CheckpointError(f"the state of layer {layer} is not that of what is computed")
        found = set(states)
        if carried.pages or not layers or any(name.startswith("k.") for name in header.parts):
            attend = {str(layer) for layer in range(self.num_kv_layers)} - layers
            found |= {f"{kind}.{layer}" for kind in "kv" for layer in attend}
        found |= {name for page in range(len(carried.pages)) for name in page_parts(page)}
        if carried.kept is not None:
            found.add("hidden")
        return found | (header.parts.keys() & {"last_hidden"})

    def _check_shape(self, name: str, part: TensorPart, carried: Carried) -> None:
        kind = name.split(".")[0]
        rows = {"hidden": carried.hi - carried.committed, "last_hidden": carried.committed}
        if kind in rows:
            is_ours = part.shape == (rows[kind], self.width)
        elif kind == "state":
            return
        elif self.layout is not None:
            whole = self.layout.k if name[-1] == "k" or kind == "k" else self.layout.v
            layers, num_tokens = self._extent(kind, whole[0], carried)
            expected = (layers, whole[1], num_tokens, whole[3])
            is_ours = (part.shape, part.dtype) == (expected, self.layout.dtype)
        else:
            layers, num_tokens = self._extent(kind, part.shape[0] if part.shape else 0, carried)
            is_ours = part.shape[:1] + part.shape[2:3] == (layers, num_tokens)
            is_ours = is_ours and len(part.shape) == 4
        if not is_ours:
            raise CheckpointError(f"{name!r:.40} of another shape: {part.shape}")

    def _extent(self, kind: str, num_layers: int, carried: Carried) -> tuple[int, int]:
        """Return layers and tokens of a page, or of the KV of a layer outside whole pages."""
        if kind == "page":
            return num_layers, self.page_size
        return 1, carried.hi - len(carried.pages) * self.page_size


def page_parts(page: int) -> tuple[str, str]:
    """Return the names of the keys and of the values of a page."""
    return f"page.{page}.k", f"page.{page}.v"


def digest_of(token_ids: Sequence[int]) -> str:
    """Return a digest that identifies the tokens of a parcel."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=16).hexdigest()
