"""States count in `max_kv_tokens`: no more requests hold KV than have memory for their states."""

from dataclasses import replace

import pytest
import torch

from qllm.config import EngineConfig
from qllm.errors import ConfigError, ContextLengthError
from qllm.plan import ModelShape
from qllm.plugins import load_policy
from qllm.sim.presets import preset
from qllm.sim.run import simulate
from qllm.sim.world import LIMITS, SHAPE, World
from qllm.types import Cap, FinishReason
from qllm.workloads.spec import RequestSpec
from tests.support import tiny_configs
from tests.support.hybrid_prefix import GREEDY, engine_of, prompt_of, run
from tests.support.hybrids import make_hybrid
from tests.support.inside import loop_of

STATES = 1000
POLICIES = ("fcfs", "qllm2", "chunked", "qllm")


def test_blocks_of_a_request_include_its_states() -> None:
    shape = SHAPE._replace(state_tokens=STATES)
    assert [shape.blocks_for(n, 16) for n in (0, 1, 8, 9, 24, 25)] == [0, 63, 63, 64, 64, 65]
    assert [SHAPE.blocks_for(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert shape.longest(4096) == 4096 - STATES
    assert shape.longest(500) == 0


@pytest.mark.parametrize("num_swap_blocks", [0, 640])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_more_requests_hold_kv_than_have_memory_for_their_states(
    policy: str, num_swap_blocks: int
) -> None:
    caps = LIMITS.capabilities | (Cap.KV_SWAP if num_swap_blocks else Cap(0))
    limits = replace(LIMITS, num_blocks=256, num_swap_blocks=num_swap_blocks, capabilities=caps)
    world, most = World(load_policy(policy), limits, shape=SHAPE._replace(state_tokens=STATES)), 0
    for i in range(10):
        world.submit(1 + i % 2, 40 + 60 * i, 30, at_ns=i * 1_000_000)
    while not world.idle:
        world.step()
        held = [r for r in world.scheduler.requests.values() if r.is_admitted]
        bytes_in_tokens = sum(STATES + r.num_written_tokens for r in held)
        assert bytes_in_tokens <= limits.num_blocks * limits.block_size
        most = max(most, len(held))
    assert most == 3
    assert set(world.finished.values()) == {FinishReason.LENGTH}


def test_the_simulator_refuses_and_admits_as_the_engine_does() -> None:
    def outcome(state_tokens: int) -> tuple[int, float]:
        found = preset("h100", "qwen3-moe")
        shape = found.shape.model_copy(update={"state_tokens": state_tokens})
        costs, sizes = found.model_copy(update={"shape": shape}), [700, 700, 700, 700, 3500]
        specs = [
            RequestSpec(at_s=0.0, priority=1, num_prompt_tokens=n, max_tokens=200) for n in sizes
        ]
        result = simulate(specs, "fcfs", costs, config=EngineConfig(max_kv_tokens=4096))
        return result.refused, max(r.ttft_ms or 0.0 for r in result.summary().requests[:4])

    (refused, at_once), (refused_more, in_turn) = outcome(0), outcome(1000)
    assert (refused, refused_more) == (0, 1)
    assert in_turn > 10 * at_once, "two at once, and then the others"


def test_an_engine_says_what_states_take_and_refuses_what_has_no_room() -> None:
    model = make_hybrid("qwen3_next")
    with engine_of(model) as engine:
        run(engine, prompt_of(100))
        stats = engine.stats()["states"]
        handle = engine.submit(prompt_of(100), "BE", 400)
        next(iter(handle))
        held = engine.stats()["states"]["held_bytes"]
        handle.cancel()
    kv_bytes = 2 * 2 * 2 * 64 * 2  # attention layers, keys and values, heads, width, bf16
    assert stats["bytes_per_request"] == 2 * 2 * (4 * 32 * 32 * 4 + 256 * 4 * 2)
    assert stats["tokens_per_request"] == -(-stats["bytes_per_request"] // kv_bytes)
    assert 0 < held <= stats["bytes_per_request"]
    each = stats["tokens_per_request"]
    with pytest.raises(ConfigError, match=f"as much memory as the KV of {each} tokens"):
        engine_of(model, max_kv_tokens=each)
    with engine_of(model, max_kv_tokens=each + 160) as engine:
        assert len(run(engine, prompt_of(100), 20).token_ids) == 20
        with pytest.raises(ContextLengthError, match="max_kv_tokens"):
            engine.submit(prompt_of(170), "LS", 20)


def test_a_dense_model_is_charged_nothing() -> None:
    assert ModelShape(2, 4, 2, (True, True), 10, 100).state_tokens == 0


# -- states that keys are among: layers that are called as their model calls them

KEYS = ("deepseek_v4", "dots3_note_text", "glm_moe_dsa", "inkling_text", "zaya")
"""Compressed keys, windows, an indexer, windows beside convolutions, recurrences beside keys."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", KEYS)
def test_keys_in_states_take_no_more_than_is_charged(family: str) -> None:
    """At any moment of a prompt in chunks and of decoding."""
    model = tiny_configs.tiny_model(family)
    with engine_of(model, policy="chunked", max_step_tokens=40) as engine:
        stats, loop = engine.stats()["states"], loop_of(engine)
        each, token = stats["bytes_per_request"], stats["bytes_per_token"]
        seen: list[float] = []
        behind = {0}
        """Bytes that tensors keep from being freed, beside their own."""

        def look(*_: object) -> None:
            for number, request in loop.live.items():
                blocks, states = request.request.block_table, loop.runner.requests[number].kv.states
                seen.append(states.num_bytes / (len(blocks) * engine.config.block_size * token))
                kept = [one for at in states._held.values() for one in at.values()]
                values = [v for one in kept for x in one.layers.values() for v in vars(x).values()]
                tensors = [v for v in values if isinstance(v, torch.Tensor)]
                behind.update(t.untyped_storage().nbytes() - t.nbytes for t in tensors)

        engine.call(lambda: setattr(loop.runner, "on_segment", look))
        run(engine, [i % tiny_configs.VOCAB for i in prompt_of(120)], 20)
        engine.call(lambda: setattr(loop.runner, "on_segment", None))
    assert max(behind) == 0
    assert 0.1 < max(seen) <= 1  # what windows have dropped is charged, and a copy at rest
    assert stats["tokens_per_request"] == -(-each // token)


@pytest.mark.parametrize("family", ["zaya", "inkling_text"])
def test_they_are_admitted_as_there_is_room_for_their_states(family: str) -> None:
    model = tiny_configs.tiny_model(family)
    prompts = [[i % tiny_configs.VOCAB for i in prompt_of(28, n)] for n in range(4)]
    with engine_of(model) as engine:
        each = engine.stats()["states"]["tokens_per_request"]
        want = [run(engine, ids, 4).token_ids for ids in prompts]
    assert each > 1
    with pytest.raises(ConfigError, match=f"as much memory as the KV of {each} tokens"):
        engine_of(model, max_kv_tokens=4, block_size=4)
    most, room = 0, 2 * (-(-(32 + each) // 4) * 4)
    with engine_of(model, max_kv_tokens=room, block_size=4, policy="fcfs") as engine:
        loop = loop_of(engine)

        def look(*_: object) -> None:
            nonlocal most
            held = [r for r in loop.scheduler.requests.values() if r.is_admitted]
            most = max(most, len(held))

        engine.call(lambda: setattr(loop.runner, "on_segment", look))
        handles = engine.call(
            lambda: [engine.submit(ids, "BE", 4, sampling=GREEDY) for ids in prompts]
        )
        found = [handle.result(300).token_ids for handle in handles]
        engine.call(lambda: setattr(loop.runner, "on_segment", None))
    assert most == 2
    assert found == want
