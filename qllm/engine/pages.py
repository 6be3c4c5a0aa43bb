"""Whether an engine has a prefix cache, and how the pages of a runner are copied."""

import torch
from torch import Tensor

from qllm.config import EngineConfig
from qllm.errors import ConfigError
from qllm.runner.kv import RequestKV
from qllm.runner.runner import TorchRunner
from qllm.types import RequestId


class SlabTarget:
    """A `LoadTarget`: KV in slabs.

    Args:
        kv: Of the request, empty.
        page_size: Tokens of a page.
    """

    def __init__(self, kv: RequestKV, page_size: int) -> None:
        self.kv, self._page_size = kv, page_size

    def put(self, number: int, page: tuple[Tensor, Tensor]) -> None:
        """Take up a page; it is committed once the request is there."""
        with torch.inference_mode():
            for layer, (k, v) in enumerate(zip(*page, strict=True)):
                self.kv.write(layer, k.unsqueeze(0), v.unsqueeze(0), number * self._page_size)


class KvPages:
    """The `Keeper` of a runner, for pages of so many tokens."""

    def __init__(self, runner: TorchRunner, page_size: int) -> None:
        self._runner, self._page_size = runner, page_size

    def load_target(self, num_tokens: int) -> SlabTarget:
        """Slabs for a request; memory is taken as pages come."""
        return SlabTarget(self._runner.backend.new_kv(num_tokens), self._page_size)

    def adopt(self, request_id: RequestId, target: SlabTarget, num_tokens: int) -> None:
        """Let the slabs be the request's, unless they were before an error."""
        request = self._runner.requests[request_id]
        if request.kv is not target.kv:
            request.kv = target.kv
            request.kv.committed = num_tokens

    def copy_out(self, request_id: RequestId, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Copies of the committed keys and values of tokens [lo, hi), each [L, heads, T, H]."""
        with torch.inference_mode():
            return self._runner.requests[request_id].kv.copy_out(lo, hi)

    def copy_in(self, request_id: RequestId, lo: int, hi: int, page: tuple[Tensor, Tensor]) -> None:
        """Take up KV of tokens [lo, hi), unless it was before an error."""
        kv = self._runner.requests[request_id].kv
        if kv.committed < hi:
            with torch.inference_mode():
                kv.copy_in(lo, page)

    def kv_regime(self, num_prompt_tokens: int, num_tokens: int) -> str:
        """See `Switch.regime`."""
        switch = self._runner.rope.switch
        return "" if switch is None else switch.regime(num_prompt_tokens, num_tokens)


def why_not(config: EngineConfig, runner: TorchRunner) -> str | None:
    """Why an engine has no prefix cache; None if it has one.

    Raises:
        ConfigError: The settings ask for one that is not possible, or not exact.
    """
    asked = config.prefix_cache
    if asked is False:
        return "prefix_cache=False"
    reason, advice = None, "use 'auto' or False"
    if runner.parts.lm_head.weight.device.type != "cpu":
        reason = "KV is kept on the CPU only"
    elif any(layer.new_state is not None for layer in runner.parts.layers):
        reason = (
            "layers carry a state, which is no KV of tokens: a request can only go on where its "
            "own state is"
        )
    elif not runner.backend.is_native and asked != "approximate":
        reason = (
            "not every layer runs on our kernels, so the bits of a token's KV depend on how its "
            "prefill was cut and on its batch mates, and a hit could change tokens"
        )
        advice = "use 'approximate' to have it all the same, or 'auto'"
    if reason is not None and asked != "auto":
        raise ConfigError(f"prefix_cache={asked!r} is not possible here: {reason}; {advice}")
    return reason
