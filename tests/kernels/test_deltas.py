"""Gated DeltaNet with our kernel: its values, and bits that no cut and no neighbour changes."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from qllm import QLLMEngine
from qllm.errors import InvariantError, ModelError
from qllm.kernels import cpu
from qllm.models.discover import discover
from qllm.models.parts.known import delta_net
from qllm.runner.cpu import cpu_runner
from qllm.runner.kv import SlabKV
from qllm.runner.layers.attention import Span, Step
from qllm.runner.layers.deltas import delta_mixer
from qllm.runner.layers.recurrent import RecurrentMixer
from qllm.runner.states import tensors_of
from tests.support import tiny_configs
from tests.support.deltas import (
    CASES,
    HIDDEN,
    K_HEADS,
    KEY,
    TAPS,
    V_HEADS,
    VALUE,
    mixer_of,
    module_of,
    parts_of,
)

assert cpu.MISSING is None, cpu.MISSING
KINDS = tuple(cpu.native.available())


@pytest.fixture(params=KINDS, autouse=True)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu.native.use(request.param)
    with torch.inference_mode():
        yield request.param
    cpu.native.use(KINDS[0])
    cpu.set_threads(1)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run(mixer: Any, x_TD: Tensor, spans: list[Span], forward: Any = None) -> Tensor:
    step = Step(spans, len(x_TD), latent=False)
    out: Tensor = mixer(forward, hidden_states=x_TD[None], cache_params=step)
    return out[0]


def cut(mixer: Any, x_TD: Tensor, cuts: list[int], forward: Any = None) -> tuple[Tensor, Any]:
    """Output and last state of one request, a pass between every two cuts."""
    kv, outs = SlabKV(2, 400), []
    for lo, hi in pairwise(cuts):
        outs.append(run(mixer, x_TD[lo:hi], [Span(kv, 0, lo, hi)], forward))
        kv.committed = hi
    return torch.cat(outs), tensors_of(kv.states.take(0, cuts[-1], cuts[-1], dict))


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def in_doubles(module: Any, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Output and state of the recurrence in fp64, rounded where the module rounds."""
    num, heads = len(x_TD), V_HEADS
    if hasattr(module, "in_proj_qkvz"):
        given = module.in_proj_qkvz(x_TD)[None], module.in_proj_ba(x_TD)[None]
        q, k, v, z, b, a = module.fix_query_key_value_ordering(*given)
        mixed = torch.cat([t.reshape(num, -1) for t in (q, k, v)], -1)
    else:
        mixed, z, b, a = (getattr(module, f"in_proj_{n}")(x_TD) for n in ("qkv", "z", "b", "a"))
    z, b, a = z.reshape(num, heads, VALUE).double(), b.reshape(num, heads), a.reshape(num, heads)
    filled = F.pad(mixed.double().t(), (TAPS - 1, 0))
    weight = module.conv1d.weight.double()
    summed = rounded(F.conv1d(filled[None], weight, groups=len(filled))[0].t())
    mixed = rounded(F.silu(summed))
    q, k, v = mixed.split([K_HEADS * KEY, K_HEADS * KEY, heads * VALUE], -1)
    q, k = (t.reshape(num, K_HEADS, KEY).repeat_interleave(heads // K_HEADS, 1) for t in (q, k))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    v, q = v.reshape(num, heads, VALUE), q / KEY**0.5
    beta = rounded(b.double().sigmoid())
    decay = (-module.A_log.double().exp() * F.softplus(a.double() + module.dt_bias)).exp()
    state, outs = torch.zeros(heads, KEY, VALUE).double(), []
    for t in range(num):
        state = state * decay[t, :, None, None]
        delta = (v[t] - torch.einsum("hk,hkv->hv", k[t], state)) * beta[t, :, None]
        state = state + k[t, :, :, None] * delta[:, None]
        outs.append(torch.einsum("hk,hkv->hv", q[t], state))
    out = rounded(torch.stack(outs))
    norm = module.norm
    out = rounded(out / (out.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt())
    out = rounded(rounded(norm.weight.double() * out) * F.silu(z))
    return out.reshape(num, -1) @ module.out_proj.weight.double().t(), state


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.sampled(40)
@pytest.mark.parametrize("num", [1, 3, 64, 150])
@pytest.mark.parametrize("how", CASES)
def test_values_are_those_of_the_recurrence(how: str, num: int) -> None:
    module, x = module_of(how), rand(num, HIDDEN)
    out, state = cut(mixer_of(module, how), x, [0, num])
    expected, last = in_doubles(module, x)
    assert distance(out, expected) < 0.004
    assert distance(state["recurrent.0"][0], last) < 0.001


@pytest.mark.parametrize("cuts", [[0, 150], [0, 1, 2, 70, 71, 150], [0, 3, 4, 5, 6]])
@pytest.mark.parametrize("how", CASES)
def test_values_are_those_of_the_module(how: str, cuts: list[int]) -> None:
    module, x = module_of(how), rand(150, HIDDEN)
    theirs = RecurrentMixer(module, parts_of(module, how).new_state)
    out, state = cut(mixer_of(module, how), x, cuts)
    expected, last = cut(theirs, x, cuts, module.forward)
    assert distance(out, expected) < 0.006
    assert state.keys() == last.keys()
    assert torch.equal(state["conv.0"], last["conv.0"])
    assert distance(state["recurrent.0"], last["recurrent.0"]) < 0.004


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("how", CASES)
def test_no_cut_changes_a_bit(how: str, threads: int) -> None:
    mixer, x = mixer_of(module_of(how), how), rand(150, HIDDEN)
    whole, state = cut(mixer, x, [0, 150])
    assert len(set(whole.flatten().tolist())) > 1000
    cpu.set_threads(threads)
    for cuts in ([*range(151)], [0, 1, 2, 5, 64, 65, 129, 150], [0, 63, 149, 150]):
        found, last = cut(mixer, x, cuts)
        assert torch.equal(found, whole)
        assert all(torch.equal(last[name], state[name]) for name in state)


def test_requests_of_a_step_do_not_see_each_other() -> None:
    """Chunks, single tokens and dead rows together; a request may have two spans."""
    mixer = mixer_of(module_of("grouped"), "grouped")
    xs = [rand(90, HIDDEN, seed=seed) for seed in range(5)]
    alone = [cut(mixer, x, [0, 90]) for x in xs]
    kvs = [SlabKV(2, 400) for _ in xs]
    marks = ((0, 7), (0, 80), (0, 1), (0, 64), (0, 89)), ((7, 8), (80, 90), (1, 90), (64, 65))
    for bounds in marks:
        rows, spans, at = [], [], 2
        for kv, x, (lo, hi) in zip(kvs, xs, bounds, strict=False):
            middle = (lo + hi) // 2
            for a, b in ((lo, middle), (middle, hi)):
                if a < b:
                    spans.append(Span(kv, at + a - lo, a, b))
            rows.append(x[lo:hi])
            at += hi - lo
        dead = rand(2, HIDDEN, seed=9)
        out = run(mixer, torch.cat([dead, *rows, dead]), spans)
        assert not out[:2].any()
        assert not out[at:].any()
        at = 2
        for kv, (lo, hi), (expected, _) in zip(kvs, bounds, alone, strict=False):
            assert torch.equal(out[at : at + hi - lo], expected[lo:hi])
            kv.committed, at = hi, at + hi - lo


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("how", CASES)
def test_a_rejection_leaves_the_state_of_the_accepted_tokens(how: str, threads: int) -> None:
    """For each number of them, beside another request, whose tokens come first in the op."""
    cpu.set_threads(threads)
    mixer, x_TD = mixer_of(module_of(how), how), rand(25, HIDDEN)
    for accepted in (11, 14, 18):
        kv, other = SlabKV(2, 40), SlabKV(2, 40)
        run(mixer, x_TD[:10], [Span(kv, 0, 0, 10)])
        kv.committed = 10
        kv.states.begin(11, 18)
        run(mixer, x_TD[7:18], [Span(other, 0, 0, 3), Span(kv, 3, 10, 18)])
        kv.commit(accepted)
        assert list(kv.states._held[0]) == ([10, 18] if accepted == 18 else [10])
        rest = run(mixer, x_TD[accepted:], [Span(kv, 0, accepted, 25)])
        out_TD, state = cut(mixer, x_TD, [0, accepted, 25])
        assert torch.equal(rest, out_TD[accepted:])
        found = tensors_of(kv.states.take(0, 25, 25, dict))
        assert all(torch.equal(found[name], t) for name, t in state.items())


def test_a_pass_that_is_forgotten_leaves_the_committed_state() -> None:
    mixer, x = mixer_of(module_of("split"), "split"), rand(40, HIDDEN)
    whole, _ = cut(mixer, x, [0, 40])
    kv = SlabKV(2, 400)
    run(mixer, x[:30], [Span(kv, 0, 0, 30)])
    kv.committed = 30
    for hi in (33, 40, 31):  # run on, forgotten, and run again with other tokens
        run(mixer, rand(hi - 30, HIDDEN, seed=hi), [Span(kv, 0, 30, hi)])
    assert torch.equal(run(mixer, x[30:35], [Span(kv, 0, 30, 35)]), whole[30:35])
    assert torch.equal(run(mixer, x[35:], [Span(kv, 0, 35, 40)]), whole[35:])


def test_a_saved_state_goes_on_where_it_was() -> None:
    """As in a checkpoint, which may come from a run with the module."""
    module, x = module_of("grouped"), rand(60, HIDDEN)
    mixer, theirs = (
        mixer_of(module, "grouped"),
        RecurrentMixer(module, parts_of(module, "grouped").new_state),
    )
    whole, _ = cut(mixer, x, [0, 60])
    for first in (mixer, theirs):
        kv, other = SlabKV(2, 400), SlabKV(2, 400)
        run(first, x[:30], [Span(kv, 0, 0, 30)], module.forward)
        other.states.restore(kv.states.export())
        kv.committed = other.committed = 30
        outs = [run(mixer, x[30:], [Span(to, 0, 30, 60)]) for to in (kv, other)]
        assert torch.equal(outs[0], outs[1])
        if first is mixer:
            assert torch.equal(outs[0], whole[30:])
        else:
            assert distance(outs[0], whole[30:]) < 0.006


def test_tokens_take_turns_with_two_states() -> None:
    """Nothing is allocated per token, and never more is held than the committed and the next."""
    mixer, x, kv = mixer_of(module_of("split"), "split"), rand(9, HIDDEN), SlabKV(2, 400)
    used = set()
    for at in range(9):
        run(mixer, x[at : at + 1], [Span(kv, 0, at, at + 1)])
        kv.committed = at + 1
        state = kv.states.take(0, at + 1, at, dict)
        used.add(state.recurrent_states[0].data_ptr())
        kv.states.put(0, at + 1, state, at)
    assert len(used) == 2


def test_a_position_without_its_state_is_refused() -> None:
    mixer, x, kv = mixer_of(module_of("split"), "split"), rand(9, HIDDEN), SlabKV(2, 400)
    with pytest.raises(InvariantError, match="no state at position 4"):
        run(mixer, x[:2], [Span(kv, 0, 4, 6)])
    with pytest.raises(InvariantError, match="tokens 5 to 6 do not follow 3"):
        run(mixer, x[:4], [Span(kv, 0, 0, 3), Span(kv, 3, 5, 6)])


def test_what_is_not_known_stays_with_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of("grouped")
    assert delta_mixer(parts_of(module, "grouped"), None) is None
    assert delta_mixer(parts_of(module.float(), "grouped"), cpu.Arena()) is None
    narrow = module_of("split", linear_value_head_dim=24)
    assert delta_mixer(parts_of(narrow, "split"), cpu.Arena()) is None

    class Other(Qwen3NextGatedDeltaNet):
        def forward(self, *args: Any, **given: Any) -> Any:
            return -super().forward(*args, **given)

    module = module_of("grouped")
    module.__class__ = Other
    assert delta_mixer(parts_of(module, "grouped"), cpu.Arena()) is None
    module.__class__ = Qwen3NextGatedDeltaNet
    assert delta_mixer(parts_of(module, "grouped"), cpu.Arena()) is not None
    hook = module.register_forward_hook(lambda *_: None)
    assert delta_mixer(parts_of(module, "grouped"), cpu.Arena()) is None
    hook.remove()
    module.activation = "gelu"
    parts = parts_of(module, "grouped")
    assert delta_net(module, parts.new_state).kind is None
    module.activation = "silu"
    source = Qwen3NextGatedDeltaNet.__module__
    monkeypatch.setattr(f"{source}.l2norm", lambda x, dim=-1, eps=1e-6: x)
    assert delta_net(module, parts.new_state).kind is None


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_the_engine_names_the_drivers_and_passes_its_check(family: str) -> None:
    model = tiny_configs.tiny_model(family).bfloat16()
    with QLLMEngine.from_model(model, threads=1, exactness="batch-invariant") as engine:
        states = sum(parts.new_state is not None for parts in discover(model).layers)
        assert engine.kernels["state"] == f"qllm {cpu.kind()} ({states} of 4 layers)"
    with pytest.raises(ModelError, match="carries a state"):
        cpu_runner(model, batch_invariant=True, kernels="reference")
