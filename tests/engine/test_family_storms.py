"""Every family with experts under a storm: its tokens are those of the replay of its schedule.

Tiny random models. Requests are parked at every kind of boundary, evicted and moved out; streams of
layers that carry a state are among them.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from qllm import QLLMEngine
from qllm.runner.cpu import cpu_runner
from tests.long import families as all_families
from tests.support import tiny_configs
from tests.support.all_families import MOE
from tests.support.storms import Chaos, Storm, assert_replayed, fine, same, show

POLICIES = ("chaos", "qllm2")


def settings_of(model: Any, policy: str, seed: int) -> dict[str, Any]:
    """Room for the KV of 160 tokens, and for the states of four requests."""
    runner = cpu_runner(model, kernels="reference")
    states = runner.shape.state_tokens
    runner.close()
    swap = {"swap_kv_tokens": 4096 + 8 * states} if seed % 3 == 0 else {}
    made = Chaos(seed) if policy == "chaos" else policy
    return {"policy": made, "max_kv_tokens": 160 + 4 * states, "max_step_tokens": 96, **swap}


LONGEST = {"kimi_linear", "granitemoehybrid"}
"""Their modules in transformers take 50 to 90 s of processor time for a storm; others take 3."""


@pytest.mark.sampled(8)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "family", [pytest.param(x, marks=pytest.mark.slow) if x in LONGEST else x for x in MOE]
)
def test_a_storm_equals_the_replay_of_its_schedule(family: str, policy: str) -> None:
    seed = 1 + MOE.index(family) * len(POLICIES) + POLICIES.index(policy)
    model = tiny_configs.tiny_model(family)
    fresh = copy.deepcopy(model)
    settings = settings_of(model, policy, seed)
    with QLLMEngine.from_model(
        model, threads=1, conformance=False, record=True, kernels="reference", **settings
    ) as engine:
        fine(engine)
        storm = Storm(engine, seed, vocab=tiny_configs.VOCAB)
        results = storm.run()
        events = list(engine.trace.events)
    assert_replayed(storm, results, events, cpu_runner(fresh, kernels="reference"))


DELTA_NETS = ("qwen3_next", "qwen3_5_moe_text")


def in_bf16(family: str) -> Any:
    return tiny_configs.tiny_model(family).bfloat16()


@pytest.mark.sampled
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", DELTA_NETS)
def test_a_storm_of_delta_nets_leaves_every_stream_equal_to_its_solo_run(
    family: str, policy: str
) -> None:
    """Our kernel carries their states, so that no bit depends on passes and neighbours."""
    seed = 1 + DELTA_NETS.index(family) * len(POLICIES) + POLICIES.index(policy)
    model = in_bf16(family)
    settings = {**settings_of(model, policy, seed), "exactness": "batch-invariant"}
    with QLLMEngine.from_model(
        model, threads=1, conformance=False, record=True, **settings
    ) as engine:
        assert "of 4 layers" in engine.kernels["state"]
        fine(engine)
        storm = Storm(engine, seed, vocab=tiny_configs.VOCAB)
        results = storm.run()
        solo = {
            h.number: engine.submit(priority="BE", **storm.specs[h.number]).result(300)
            for h, _ in storm.handles
        }
        events = [type(e).__name__ for e in engine.trace.events]
    pairs = [(r, solo[h.number]) for (h, _), r in zip(storm.handles, results, strict=True)]
    show(
        f"{family} {policy}: {len(pairs)} streams, {events.count('Split')} splits, "
        f"{sum(r.metrics.evictions for r in results)} evictions, "
        f"distinct {[len(set(r.token_ids)) for r in results]}"
    )
    assert all(same(result, alone) for result, alone in pairs)
    assert len(results) > 8


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "minimax"])
def test_a_checkpoint_keeps_states(family: str, tmp_path: Path) -> None:
    """States and keys of a request that is in the middle of its answer go on in another engine."""
    how: dict[str, Any] = {"threads": 1, "conformance": False, "max_kv_tokens": all_families.MANY}
    prompt, model = all_families.prompts()[0], tiny_configs.tiny_model(family)
    with QLLMEngine.from_model(copy.deepcopy(model), **how) as engine:
        expected = engine.submit(prompt, "BE", 60, sampling=all_families.GREEDY).result(300)
    with QLLMEngine.from_model(copy.deepcopy(model), **how) as engine:
        handle = engine.submit(prompt, "BE", 60, sampling=all_families.GREEDY)
        next(iter(handle))
        handle.update(paused=True)
        engine.checkpoint(tmp_path / "saved")
        num_tokens = len(handle.token_ids)
    with safe_open(tmp_path / "saved", framework="pt") as file:
        assert any(".state." in f".{name}" for name in file.keys())  # noqa: SIM118
    with QLLMEngine.from_model(model, **how) as engine:
        (handle,) = engine.restore(tmp_path / "saved")
        handle.update(paused=False)
        found = handle.result(300)
    assert 0 < num_tokens < 60
    assert found.token_ids == expected.token_ids
