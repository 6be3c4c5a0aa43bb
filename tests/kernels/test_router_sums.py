"""Weights of a router do not depend on the number of tokens that are chosen for together."""

import pytest
import torch

from qllm.kernels import reference
from qllm.kernels.routing import Groups, Rule, RuleKind
from qllm.kernels.triton import choose as kernels
from qllm.kernels.triton.choose import FEW, choose
from tests.support.hopper import matrix_unit
from tests.support.interpret import DEVICES
from tests.support.triton_cases import Noise

EXPERTS, TOP_K = 32, 6
TOKENS = (1, 2, 3, 7, 33, FEW, FEW + 1, 2080)
"""Numbers of tokens. Up to `FEW` one program chooses for all of them, above one for 16."""
RULES = ["softmax", "renormalised", "sparse_mixer", "sigmoid", "sigmoid_renormalised"]


def rule_of(name: str, device: str) -> Rule:
    kind = RuleKind[name.removesuffix("_renormalised").upper()]
    correction = Noise(3, device)(EXPERTS) * 0.1
    groups = Groups(correction, 4, 2, name.endswith("_renormalised"), 2.5)
    return Rule(kind, 0.3, groups if kind is RuleKind.SIGMOID else None)


def weights_of(logits: torch.Tensor, rule: Rule) -> torch.Tensor:
    num = torch.tensor([len(logits)], device=logits.device)
    hits = torch.zeros(1, dtype=torch.int64, device=logits.device)
    return choose(logits, rule, TOP_K, num, hits, torch.float32)[1]


@DEVICES
@pytest.mark.parametrize("name", RULES)
def test_weights_of_a_token_are_equal_in_any_batch(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted, floats are added in an order that depends on all tokens of a program."""
    monkeypatch.setattr(kernels, "route", lambda ids, *_: ids)  # it sorts, and weighs nothing
    logits, rule = Noise(5, device)(max(TOKENS), EXPERTS) * 4, rule_of(name, device)
    with matrix_unit(90):
        found = {num: weights_of(logits[:num], rule) for num in TOKENS}
    whole = found[max(TOKENS)]
    differing = {num: int((each != whole[:num]).sum()) for num, each in found.items()}
    assert differing == dict.fromkeys(TOKENS, 0)


@DEVICES
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("scale", [0.1, 4.0, 60.0])
def test_weights_are_those_of_the_definition(device: str, name: str, scale: float) -> None:
    """Sums of whole numbers are as exact as sums of floats, with flat and with steep logits."""
    logits, rule = Noise(6, device)(FEW, EXPERTS) * scale, rule_of(name, device)
    num = torch.tensor([FEW], device=device)
    hits = torch.zeros(1, dtype=torch.int64, device=device)
    wanted = reference.choose(logits, rule, TOP_K, num, hits, torch.float32)[1]
    torch.testing.assert_close(weights_of(logits, rule), wanted, rtol=2e-6, atol=1e-12)


@DEVICES
@pytest.mark.parametrize("name", ["softmax", "renormalised", "sparse_mixer"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of inf - inf
def test_a_logit_that_has_no_weight_leaves_other_tokens_alone(
    device: str, name: str, bad: float
) -> None:
    logits, rule = Noise(7, device)(3, EXPERTS), rule_of(name, device)
    wanted = weights_of(logits, rule)
    logits[1, 4] = bad
    found = weights_of(logits, rule)
    assert torch.equal(found[::2], wanted[::2])
    assert found[1].isnan().any()
