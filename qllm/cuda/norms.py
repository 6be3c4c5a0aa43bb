"""RMSNorm modules of a model, which call our kernel while the CUDA backend runs the model.

The kernel supports norms that round before they multiply by their weight, and GPT-OSS's norms,
which round afterwards.
"""

from typing import Any

from torch import Tensor, nn

from qllm.kernels.select import Kernels
from qllm.models.parts.known import norm_kind

WIDE = {"rms": False, "rms_wide": True}
"""`wide` of `rms_norm` for each kind of norm that the kernel supports."""


class Norms:
    """The RMSNorms of a model whose forward is known."""

    def __init__(self, model: nn.Module, kernels: Kernels) -> None:
        self._kernels = kernels
        self.modules: list[Any] = [m for m in model.modules() if norm_kind(m) in WIDE]

    def enter(self) -> None:
        """Let the norms call our kernel."""
        for module in self.modules:
            module.forward = self._of(module)

    def leave(self) -> None:
        """Restore the norms' own forwards."""
        for module in self.modules:
            vars(module).pop("forward", None)

    def _of(self, module: Any) -> Any:
        rms_norm, eps = self._kernels.rms_norm, module.variance_epsilon
        wide = WIDE[str(norm_kind(module))]

        def forward(hidden_states: Tensor) -> Tensor:
            rows = hidden_states.reshape(-1, hidden_states.shape[-1])
            out: Tensor = rms_norm(rows, module.weight, eps, wide)
            return out.view(hidden_states.shape)

        forward.is_ours = True  # type: ignore[attr-defined]
        return forward
