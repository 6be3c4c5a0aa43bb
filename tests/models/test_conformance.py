"""The start-up check: never a right model refused, no wrong one accepted; threads as they come.

The other tests run with one thread of torch (`scripts/test`); here the models start with two, and
once, in a process of its own, with as many as the machine gives.
"""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from qllm import QLLMEngine
from qllm.errors import ModelError
from qllm.models.discover import discover
from qllm.models.replaced import replaced
from qllm.runner import reference
from qllm.runner.conformance import BEYOND_WINDOW, NUM_PROMPT, _Probe, _tokens, check
from qllm.runner.cpu import cpu_runner
from qllm.runner.layers.drivers import Routed
from qllm.runner.reference import LayerPass, Routing
from tests.support import startup
from tests.support.families import DTYPES, FAMILIES, make_model
from tests.support.files import ROOT
from tests.support.startup import WRONG

SAMPLE = [8 * (i % 6) + 3 * i % 8 for i in range(12)]
"""Every family, every dtype with one thread and with two."""


@pytest.mark.parametrize("number", SAMPLE)
def test_a_right_model_is_accepted_and_a_wrong_one_is_refused(number: int) -> None:
    """`tests/long/startup_check.py` does this with 300 models."""
    case = startup.case_of(number)
    with startup.threads_of(case):
        model = startup.make(case)
        assert startup.refusal(model, startup.runner_of(case, model)) is None, case.name
        names = iter(WRONG[number % len(WRONG) :] + WRONG)
        runner = None
        while runner is None:
            name = next(names)
            runner = startup.wrong_runner(name, case, model)
        assert startup.refusal(model, runner), f"{case.name}: {name}"


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", WRONG)
def test_every_part_that_is_wrong_is_seen_in_bf16(name: str) -> None:
    """In the first family that has the part; 16 bits hide most."""
    for number in range(8, 16):
        case = startup.case_of(number)
        model = startup.make(case)
        runner = startup.wrong_runner(name, case, model)
        if runner is not None:
            assert case.dtype == "bf16"
            assert startup.refusal(model, runner)
            return
    raise AssertionError(f"no family has {name}")


def test_the_sample_has_every_family_dtype_and_number_of_threads() -> None:
    cases = [startup.case_of(number) for number in SAMPLE]
    assert {case.family for case in cases} == set(FAMILIES)
    assert len({(case.dtype, case.threads) for case in cases}) == 6


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_starts_with_two_threads_and_with_cuts(family: str, name: str) -> None:
    model = make_model(family, DTYPES[name])
    with QLLMEngine.from_model(model, threads=2, max_kv_tokens=256):
        pass
    with QLLMEngine.from_model(model, threads=1, max_kv_tokens=256, max_segment_ms=0.1):
        pass


DEFAULT_THREADS = """
import os, sys, torch
assert "OMP_NUM_THREADS" not in os.environ
sys.path.insert(0, sys.argv[1])
from tests.support.families import DTYPES, make_model
from qllm import QLLMEngine, SamplingParams
assert torch.get_num_threads() > 1 or os.cpu_count() == 1, torch.get_num_threads()
greedy = SamplingParams(temperature=0, ignore_eos=True)
prompts = [[(7 * i + n) % 256 for i in range(n)] for n in (40, 7, 23)]
for family in sys.argv[2:]:
    for name in ("fp32", "bf16") if family in ("mixtral", "deepseek_v3") else ("fp32",):
        model = make_model(family, DTYPES[name])
        out = [
            model.generate(
                torch.tensor([ids]), max_new_tokens=6, do_sample=False, eos_token_id=None,
            )[0, len(ids):].tolist() for ids in prompts
        ]
        with QLLMEngine.from_model(model, max_kv_tokens=512) as engine:  # with the check
            kinds = zip(prompts, ("BE", "LS", "BE"))
            handles = [engine.submit(ids, kind, 6, sampling=greedy) for ids, kind in kinds]
            found = [list(handle.result(300).token_ids) for handle in handles]
        if name == "fp32":
            assert found == out, (family, found, out)
print("done")
"""


@pytest.mark.parametrize(
    "families",
    [
        pytest.param(("mixtral", "deepseek_v3"), id="two"),
        # tests of cases and of cuts above start every family with two threads
        pytest.param(tuple(FAMILIES), id="all", marks=pytest.mark.slow),
    ],
)
def test_families_start_and_answer_with_the_machines_own_threads(families: tuple[str]) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env["OMP_WAIT_POLICY"] = "passive"  # as many threads, which spin less beside other tests
    here = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DEFAULT_THREADS, here, *families],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["done"], done.stderr[-2000:]


@pytest.mark.parametrize(("num_unclear", "num_clear", "is_refused"), [(5, 1, False), (0, 2, True)])
def test_near_ties_of_a_router_may_be_decided_either_way(
    num_unclear: int, num_clear: int, is_refused: bool
) -> None:
    """Tokens whose choice is not clear, and one in 24 of the others."""
    model = make_model("mixtral")
    ids, weights = torch.arange(4).expand(24, 4), torch.full((24, 4), 0.25)
    clear = torch.arange(24) >= num_unclear
    routing = Routing(ids, weights, clear, torch.full((24,), 1e-7))
    layer = LayerPass(torch.zeros(24, 64), routing=routing)
    found = ids.clone()
    found[: num_unclear + num_clear, 3] = 7
    probe = _Probe(model, cpu_runner(model))
    if is_refused:
        with pytest.raises(ModelError, match="here: other experts or weights for 2 of 24 tokens"):
            probe._compare_routing(found, weights, layer, "here")
    else:
        probe._compare_routing(found, weights, layer, "here")
    with pytest.raises(ModelError, match="24 of 24" if is_refused else "19 of 24"):
        probe._compare_routing(ids, weights * 1.001, layer, "here")


def test_another_choice_of_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("mixtral", torch.bfloat16)
    runner = cpu_runner(model, kernels="reference")
    driver: Any = runner._drivers[1]
    real = driver.route

    def other(x: Tensor, mid: Tensor) -> Routed:
        routed: Routed = real(x, mid)
        ids = routed.ids_TK
        one = (ids == 0).any(-1, keepdim=True) != (ids == 1).any(-1, keepdim=True)
        return routed._replace(ids_TK=torch.where((ids < 2) & one, 1 - ids, ids))

    monkeypatch.setattr(driver, "route", other)
    with pytest.raises(ModelError, match=r"the router of layer 1 .*: other experts"):
        check(model, runner)


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ("attend", r"the attention of layer 1"),
        ("route", r"the router of layer 1"),
        ("combine", r"first different: layer 1"),
    ],
)
@pytest.mark.parametrize("name", DTYPES)
def test_the_part_that_differs_is_named(
    part: str, where: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("mixtral", DTYPES[name])
    runner = cpu_runner(model, kernels="reference")
    driver: Any = runner._drivers[1]
    real, off = getattr(driver, part), 1 + 64 * reference.unit(DTYPES[name])

    def wrong(*args: Any) -> Any:
        found = real(*args)
        if part == "route":
            return found._replace(weights_TK=found.weights_TK * off)
        return found * off

    if name == "fp32":
        off = 1 + 2e-5
    monkeypatch.setattr(driver, part, wrong)
    with pytest.raises(ModelError, match=where):
        check(model, runner)


def test_a_pass_that_is_parked_must_have_the_bits_of_an_uncut_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounding explains this difference against the model; not between our own passes."""
    model = make_model("mixtral")
    runner = cpu_runner(model)
    driver: Any = runner._drivers[1]
    real, calls, first_of_a = driver.combine, [], 5  # after two passes of each of two records

    def drifting(x: Tensor, *rest: Any) -> Tensor:
        calls.append(1)
        out: Tensor = real(x, *rest)
        return out * (1 + 2**-22) if len(calls) == first_of_a else out

    monkeypatch.setattr(driver, "combine", drifting)
    with pytest.raises(ModelError, match=r"parked .* differ from those of an uncut pass"):
        check(model, runner)


def hooks(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("quiet", [False, True])
def test_the_record_of_a_forward(quiet: bool) -> None:
    """Row 0 is the model's own; a layer's noise and choice stay in it; nothing stays hooked."""
    model, ids = make_model("mixtral"), list(range(10, 30))
    before = hooks(model)
    with torch.inference_mode():
        (found,) = reference.record(model, discover(model), [ids], quiet=quiet)
        assert hooks(model) == before
        plain = model(torch.tensor([ids]), output_hidden_states=True)
    assert found.logits_V is not None
    assert len(found.layers) == 3
    ratio = (found.logits_V - plain.logits[0, -1]).abs().max() / plain.logits.abs().max()
    assert ratio > 0.1 if quiet else ratio < 1e-5
    for i, layer in enumerate(found.layers):
        assert layer.spread_T is not None
        assert layer.out_TD is not None
        assert layer.routing is not None
        assert layer.routing.clear_T.all()  # fp32, random: no near ties
        rms = layer.x_TD.square().mean().sqrt()
        if quiet:
            assert abs(float(rms) / reference.QUIET - 1) < 1e-3
        else:
            assert torch.allclose(layer.x_TD, plain.hidden_states[i][0], atol=1e-5)
        # one rounding of the input moves the output by about one rounding
        relative = layer.spread_T / layer.out_TD.norm(dim=-1) / reference.unit(torch.float32)
        assert 0.1 < float(relative.min()) <= float(relative.max()) < 20


def test_the_head_of_a_record_is_one_product() -> None:
    """torch makes one for every row of a slice, with a copy of the weight each."""
    model, seen = make_model("mixtral"), list[bool]()
    own = model.lm_head.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.is_contiguous())
        return own(x)

    with torch.inference_mode(), replaced({model.lm_head: forward}):
        reference.record(model, discover(model), [list(range(10, 30))], quiet=False)
    assert seen == [True]


def test_the_prompt_is_longer_than_a_short_window() -> None:
    """Also where the runner does not know of it; `WRONG["no window"]` would not show else."""
    model = make_model("gpt_oss")
    assert len(_tokens(model, cpu_runner(model))) == NUM_PROMPT + 1  # its window is 12
    cases = map(startup.case_of, range(4, 900, 8))
    case = next(case for case in cases if case.changes["sliding_window"] == 40)
    model = startup.make(case)
    for runner in (startup.runner_of(case, model), startup.wrong_runner("no window", case, model)):
        assert runner is not None
        assert len(_tokens(model, runner)) == 40 + BEYOND_WINDOW + 1
        assert (startup.refusal(model, runner) is None) == (runner.model is model)


def test_an_expert_that_no_token_of_the_prompt_is_routed_to_is_met() -> None:
    case = startup.case_of(87)
    model = startup.make(case)
    with startup.threads_of(case):
        right = startup.refusal(model, startup.runner_of(case, startup.make(case)))
        runner = startup.wrong_runner("one expert", case, model)
        assert runner is not None
        wrong = startup.refusal(model, runner)
    assert right is None
    assert wrong is not None
    assert "first different: layer 0" in wrong
