"""Conditions for a prefix cache, and the copies of a runner's pages."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qllm.config import EngineConfig
from qllm.errors import ConfigError
from qllm.models.hybrid import kv_shapes
from qllm.runner.kv import RequestKV
from qllm.runner.runner import TorchRunner
from qllm.types import RequestId


class SlabTarget:
    """A `LoadTarget` that stores KV in slabs.

    Args:
        kv: Empty KV of the request.
        page_size: Tokens of a page.
    """

    def __init__(self, kv: RequestKV, page_size: int) -> None:
        self.kv, self._page_size = kv, page_size

    def put(self, number: int, page: tuple[Tensor, Tensor]) -> None:
        """Store a page. The page is committed when the request arrives."""
        with torch.inference_mode():
            for layer, (k, v) in enumerate(zip(*page, strict=True)):
                self.kv.write(layer, k.unsqueeze(0), v.unsqueeze(0), number * self._page_size)


class KvPages:
    """The `Keeper` of a runner, for pages of one size in tokens."""

    def __init__(self, runner: TorchRunner, page_size: int) -> None:
        self._runner, self._page_size = runner, page_size

    def load_target(self, num_tokens: int) -> SlabTarget:
        """Make slabs for a request. Memory is allocated as pages arrive."""
        return SlabTarget(self._runner.backend.new_kv(num_tokens), self._page_size)

    def adopt(self, request_id: RequestId, target: SlabTarget, num_tokens: int) -> None:
        """Give the slabs to the request, unless the request has them from before an error."""
        request = self._runner.requests[request_id]
        if request.kv is not target.kv:
            request.kv = target.kv
            request.kv.committed = num_tokens

    def kv_of(self, request_id: RequestId) -> RequestKV:
        """Return the KV of a request."""
        return self._runner.requests[request_id].kv

    def copy_out(self, kv: RequestKV, lo: int, hi: int) -> Any:
        """Return a copy of a page, see `RequestKV.copy_out`."""
        with torch.inference_mode():
            return kv.copy_out(lo, hi)

    def refer(self, request_id: RequestId, table: Sequence[int], num_tokens: int) -> None:
        """Assign all blocks to a request, unless the request has them from before an error."""
        kv = self._runner.requests[request_id].kv
        if not kv.committed:
            kv.refer(table, num_tokens)

    def copy_in(self, request_id: RequestId, lo: int, hi: int, page: Any) -> None:
        """Copy in KV of tokens [lo, hi). Do nothing if the KV is there from before an error."""
        kv = self._runner.requests[request_id].kv
        if kv.committed < hi:
            with torch.inference_mode():
                kv.copy_in(lo, page)

    def mark(self, request_id: RequestId, positions: frozenset[int]) -> None:
        """Set the positions whose states are to be stored, see `States.marks`."""
        self._runner.requests[request_id].kv.states.marks = positions

    def lend(self, request_id: RequestId, position: int) -> dict[int, Any] | None:
        """Return the states at a position, see `States.lend`."""
        return self._runner.requests[request_id].kv.states.lend(position)

    def borrow(self, request_id: RequestId, position: int, states: Mapping[int, Any]) -> None:
        """Continue from lent states, see `States.borrow`."""
        kv = self._runner.requests[request_id].kv
        if kv.committed == position:
            kv.states.borrow(position, states)

    def kv_regime(self, num_prompt_tokens: int, num_tokens: int) -> str:
        """Return the rope regime, see `Switch.regime`."""
        switch = self._runner.rope.switch
        return "" if switch is None else switch.regime(num_prompt_tokens, num_tokens)


STATES_IN_FILE = "layers carry a state, and the file holds pages of keys and values alone"
STATES_ON_DEVICE = "layers carry a state, and those are kept on a CPU alone"


STATES_GROW = "what its layers keep beside keys and values grows with every token"
NO_ATTENTION = "no layer attends, so pages have no KV"
SHAPES = "the keys and values of its layers have different shapes, and a page holds those of one"


def num_states(config: EngineConfig, runner: TorchRunner) -> int:
    """Return how many states of whole requests the prefix cache keeps."""
    return config.kept_state_bytes // runner.charge.state_bytes


def why_not(config: EngineConfig, runner: TorchRunner) -> str | None:
    """Return the reason why an engine has no prefix cache; None if it has one.

    Raises:
        ConfigError: The settings select a prefix cache that is not possible, or not exact.
    """
    asked = config.prefix_cache
    if asked is False:
        return "prefix_cache=False"
    if runner.parts.around is not None:
        reason, allowed = STATES_GROW, "use 'auto' or False"
    elif runner.parts.has_states and runner.parts.like.device.type != "cpu":
        reason, allowed = STATES_ON_DEVICE, "use 'auto' or False"
    elif runner.charge.state_bytes and not num_states(config, runner):
        reason = (
            f"states of a request take {runner.charge.state_bytes} bytes, and "
            f"prefix_states_gib={config.prefix_states_gib} has no room for that"
        )
        allowed = "raise prefix_states_gib, or use 'auto' or False"
    elif not runner.parts.attentions:
        reason, allowed = NO_ATTENTION, "use 'auto' or False"
    elif len(kv_shapes(runner.parts.attentions)) > 1:
        reason, allowed = SHAPES, "use 'auto' or False"
    else:
        why = runner.backend.why_inexact
        if not why or asked == "approximate":
            return None
        reason = f"{why}, and a hit could change tokens"
        allowed = "use 'approximate' to have it all the same, or 'auto'"
    if asked != "auto":
        raise ConfigError(f"prefix_cache={asked!r} is not possible here: {reason}; {allowed}")
    return reason
