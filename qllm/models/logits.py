"""Rules that families apply to the logits of their output head."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class LogitRule(NamedTuple):
    """A rule for the output head's logits, whose operations run in the order of the fields."""

    divisor: float | None = None
    factor: float | None = None
    cap: float | None = None
    """Cap c of c * tanh(logits / c)."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the logits that are sampled, of any shape."""
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.factor is not None:
            logits = logits * self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def logit_rule_of(model: Any, config: Any) -> LogitRule | None:
    """Return the rule of a known family: Granite divides, Cohere multiplies, Gemma caps."""
    found = (
        getattr(config, "logits_scaling", None),
        getattr(model, "logit_scale", None),
        getattr(config, "final_logit_softcapping", None),
    )
    values = [None if value is None else float(value) for value in found]
    return None if values == [None] * 3 else LogitRule(*values)
