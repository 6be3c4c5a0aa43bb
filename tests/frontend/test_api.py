# Over 500 lines: one promise of the API per test, with the tables of bad input.
"""The promises of the Python API, through the public interface, on tiny random models."""

import asyncio
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import qllm
from qllm import Priority, QLLMEngine, QueueFull, SamplingParams, Slo
from qllm.errors import ConfigError, EngineClosedError, InvalidRequestError
from qllm.frontend.handle import Handle
from qllm.frontend.prompts import asked_sampling
from qllm.plan import Plan
from qllm.policy import View
from qllm.types import Cap, FinishReason, RequestStatus
from tests.support.byte_models import engine_of, ids
from tests.support.families import VOCAB, make_model
from tests.support.inside import loop_of, runner_of
from tests.support.waiting import wait_for

GREEDY = SamplingParams(temperature=0, logprobs=0)
LETTERS = dict.fromkeys((ord(c) for c in "abcdefgh"), 60.0)


@pytest.fixture(scope="module")
def recorded() -> Iterator[QLLMEngine]:
    with engine_of(record=True) as made:
        yield made


class Gate:
    """A policy that plans nothing until it is opened; then everything, one by one."""

    needs = Cap.NONE

    def __init__(self) -> None:
        self.open = threading.Event()

    def plan(self, view: View) -> Plan:
        from qllm.policy import next_row

        if not self.open.is_set():
            return Plan(wait_until_ns=view.now_ns + 2_000_000)
        for r in view.requests:
            row = next_row(r, view, view.max_step_tokens)
            if view.blocks_needed(row) <= view.num_free_blocks:
                return Plan(rows=(row,))
        return Plan(wait_until_ns=view.now_ns + 2_000_000)


# -- the handle


def test_every_way_to_wait_gives_the_same_answer(recorded: QLLMEngine) -> None:
    sampling = SamplingParams(temperature=0.8, seed=3, logit_bias=LETTERS, logprobs=2)
    want = recorded.submit("hello", max_tokens=9, sampling=sampling).result(300)
    assert len(want.text) == 9
    assert want.finish_reason is FinishReason.LENGTH
    assert want.prompt_token_ids == tuple(b"hello")
    assert len(want.logprobs or ()) == 9

    pieces = list(recorded.submit("hello", max_tokens=9, sampling=sampling))
    assert "".join(p.text for p in pieces) == want.text
    assert tuple(t for p in pieces for t in p.token_ids) == want.token_ids
    assert tuple(x for p in pieces for x in p.logprobs) == want.logprobs

    async def both() -> tuple[str, Any, Any]:
        a = recorded.submit("hello", max_tokens=9, sampling=sampling)
        b = recorded.submit("hello", max_tokens=9, sampling=sampling)
        text = "".join([piece.text async for piece in a])
        return text, await b, await a

    text, awaited, again = asyncio.run(both())
    assert text == want.text
    for result in (awaited, again):
        assert (result.token_ids, result.text) == (want.token_ids, want.text)
        assert len(result.logprobs) == 9  # two in one batch: other bits than alone


def test_a_handle_can_be_read_twice_and_after_the_end(recorded: QLLMEngine) -> None:
    handle = recorded.submit("abc", max_tokens=5, sampling=GREEDY)
    first = handle.result(300)
    for _ in range(2):
        assert tuple(t for p in handle for t in p.token_ids) == first.token_ids
        assert handle.result(0) == first
    assert handle.finish_reason is FinishReason.LENGTH
    assert handle.status is RequestStatus.FINISHED
    assert "finished" in repr(handle)


def test_an_abandoned_async_iteration_harms_no_other_request(recorded: QLLMEngine) -> None:
    handles = []

    async def leave_early() -> None:
        handle = recorded.submit("abc", max_tokens=200, sampling=SamplingParams(ignore_eos=True))
        handles.append(handle)
        async for _ in handle:
            break

    asyncio.run(leave_early())
    assert len(handles[0].result(300).token_ids) == 200


def test_submit_works_from_any_thread(recorded: QLLMEngine) -> None:
    results: dict[int, tuple[int, ...]] = {}

    def one(n: int) -> None:
        sampling = SamplingParams(temperature=1, seed=n)
        results[n] = (
            recorded.submit(ids(5, n), ["LS", "BE", 3][n % 3], 6, sampling=sampling)
            .result(300)
            .token_ids
        )

    threads = [threading.Thread(target=one, args=(n,)) for n in range(9)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert sorted(results) == list(range(9))
    assert all(len(tokens) == 6 for tokens in results.values())


def test_result_times_out_and_the_request_goes_on() -> None:
    gate = Gate()
    with engine_of(policy=gate) as engine:
        handle = engine.submit("abc", max_tokens=3)
        assert handle.status is RequestStatus.WAITING
        with pytest.raises(TimeoutError, match=r"waiting after 0\.05 s"):
            handle.result(timeout=0.05)
        assert handle.finish_reason is None
        gate.open.set()
        assert len(handle.result(300).token_ids) == 3


def test_cancel_before_the_start_in_the_middle_and_after_the_end() -> None:
    gate = Gate()
    with engine_of(policy=gate) as engine:
        early = engine.submit("abc", max_tokens=300)
        early.cancel()
        early.cancel()
        assert early.status is RequestStatus.FINISHED
        result = early.result(300)
        assert (result.finish_reason, result.token_ids, result.text) == ("cancelled", (), "")
        gate.open.set()
        middle = engine.submit("abc", max_tokens=500)
        seen = [piece for piece, _ in zip(middle, range(3), strict=False)]
        middle.cancel()
        middle.cancel()
        result = middle.result(300)
        assert result.finish_reason is FinishReason.CANCELLED
        assert 3 <= len(result.token_ids) < 500
        assert result.token_ids[:3] == tuple(t for p in seen for t in p.token_ids)[:3]
        late = engine.submit("abc", max_tokens=2)
        done = late.result(300)
        late.cancel()
        assert late.result(0) == done
        assert done.finish_reason is FinishReason.LENGTH
        assert engine.stats()["num_live"] == 0


def _watched(engine: QLLMEngine, look: Any, handle: Handle) -> Handle:
    """Called on the engine's thread, so that nothing runs before it watches."""
    runner_of(engine).on_segment = lambda *args: look(handle, *args)
    return handle


def test_status_passes_through_its_states() -> None:
    with engine_of(policy="qllm2") as engine:
        seen = set()
        states: list[RequestStatus] = []
        hits = []

        def look(handle: Handle, program: Any, index: Any, begin: int, end: int) -> None:
            if 0 in program.request_ids:
                seen.add(handle.status)
                if index.pos and not hits:
                    hits.append(engine.submit(ids(4), "LS", 1))
            elif hits:
                states.append(handle.status)

        object.__setattr__(runner_of(engine).backend.costs, "range_ns", 0.5)
        handle = engine.call(lambda: _watched(engine, look, engine.submit(ids(64), "BE", 2)))
        handle.result(300)
        runner_of(engine).on_segment = None
        assert seen == {RequestStatus.RUNNING}
        assert set(states) == {RequestStatus.PARKED}
        assert handle.status is RequestStatus.FINISHED


# -- prompts, limits, defaults


def test_text_messages_and_ids_are_prompts(recorded: QLLMEngine) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    want = tuple(b"u:Hi|a:")
    for prompt in (messages, "u:Hi|a:", list(want), want, [np.int64(i) for i in want]):
        assert recorded.submit(prompt, max_tokens=1).result(300).prompt_token_ids == want
    numbers = recorded.submit("a", np.int64(4), np.int32(3), sampling=GREEDY).result(300)
    assert len(numbers.token_ids) == 3
    assert numbers.metrics.priority == 4


def test_default_max_tokens_is_the_setting_cut_to_what_fits() -> None:
    with engine_of(default_max_tokens=11, max_kv_tokens=64) as engine:
        sampling = SamplingParams(temperature=0)
        assert len(engine.submit(ids(4), sampling=sampling).result(300).token_ids) == 11
        assert len(engine.submit(ids(60), sampling=sampling).result(300).token_ids) == 4
        assert len(engine.submit(ids(60), max_tokens=4).result(300).token_ids) == 4


def test_without_a_tokenizer_ids_are_served() -> None:
    made = QLLMEngine.from_model(make_model("mixtral"), conformance=False, threads=1)
    with made as engine:
        result = engine.submit(ids(4), max_tokens=3).result(300)
        assert (len(result.token_ids), result.text) == (3, "")
        for prompt in ("text", [{"role": "user", "content": "x"}]):
            with pytest.raises(InvalidRequestError, match="without a tokenizer"):
                engine.submit(prompt)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="need a tokenizer"):
            engine.submit(ids(4), stop="x")


def test_integer_priorities_are_classes_and_smaller_is_sooner() -> None:
    gate = threading.Event()
    with engine_of(policy="priority", max_num_seqs=1, record=True) as engine:
        engine.call(lambda: None)
        order = [10, -5, 3, 0, 7]

        def submit_all() -> list[Any]:
            return [engine.submit(ids(4), p, 3) for p in order]

        handles = engine.call(submit_all)
        results = [h.result(300) for h in handles]
        gate.set()
        first = {r.metrics.priority: r.metrics.ttft_ms for r in results}
        assert sorted(first, key=lambda p: first[p] or 0) == sorted(order)
        assert engine.submit("a", Priority.BE, 1).result(300).metrics.priority == 10
        assert engine.submit("a", "be", 1).result(300).metrics.priority == 10
        assert engine.submit("a", "LS", 1).result(300).metrics.priority == 0


def test_queue_full_is_raised_at_max_waiting_and_passes() -> None:
    gate = Gate()
    with engine_of(policy=gate, max_waiting=3) as engine:
        handles = [engine.submit("abc", max_tokens=2) for _ in range(3)]
        with pytest.raises(QueueFull, match="max_waiting=3"):
            engine.submit("abc", max_tokens=2)
        handles[0].cancel()
        handles[0].result(300)
        handles.append(engine.submit("abc", max_tokens=2))
        gate.open.set()
        assert all(len(h.result(300).token_ids) == 2 for h in handles[1:])
        results = engine.generate(
            ["ab", "abc", "a", "abcd", "x", "yy"], max_tokens=2, progress=False
        )
        assert [len(r.prompt_token_ids) for r in results] == [2, 3, 1, 4, 1, 2]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "empty"),
    ({"prompt": []}, r"prompt=\[\] must be a non-empty"),
    ({"prompt": None}, "prompt=None must be"),
    ({"prompt": b"abc"}, "prompt=b'abc' must be"),
    ({"prompt": 5}, "prompt=5 must be"),
    ({"prompt": [1, "a"]}, "holds 'a'.*only token ids"),
    ({"prompt": ["a", "b"]}, "holds 'a'.*only token ids"),
    ({"prompt": [1, 2.5]}, "holds 2.5"),
    ({"prompt": [1, True]}, "holds True"),
    ({"prompt": [1, {"role": "user", "content": "x"}]}, "holds {'role'.*only messages"),
    ({"prompt": [{"role": "user", "content": "x"}, 1]}, "message 1 must be a mapping"),
    ({"prompt": [{"role": "user"}]}, "message {'role': 'user'} must be.*role and content"),
    ({"prompt": [{"content": "x"}]}, "role and content"),
    ({"prompt": [{}]}, "role and content"),
    ({"prompt": [{"role": "user", "content": 5}]}, "message.*5.*must have a string"),
    ({"prompt": [{"role": None, "content": "x"}]}, "message.*None.*must have a string"),
    ({"prompt": [0, VOCAB]}, rf"token id {VOCAB} must be in \[0, {VOCAB}\)"),
    ({"prompt": [-1]}, r"token id -1 must be in \[0, "),
    ({"prompt": [2**70]}, r"must be in \[0, "),
    ({"prompt": [1] * 512}, "512 tokens.*shorter than 512"),
    ({"prompt": "x" * 5000}, "5000 characters; 512 tokens"),
    ({"max_tokens": 0}, "max_tokens=0 must be an integer >= 1"),
    ({"max_tokens": -3}, "max_tokens=-3 must be an integer >= 1"),
    ({"max_tokens": True}, "max_tokens=True must be an integer"),
    ({"max_tokens": 2.0}, "max_tokens=2.0 must be an integer"),
    ({"max_tokens": "5"}, "max_tokens='5' must be an integer"),
    ({"priority": "urgent"}, "priority='urgent' is unknown; use 'LS', 'BE' or an integer"),
    ({"priority": True}, "priority=True is unknown"),
    ({"priority": None}, "priority=None is unknown"),
    ({"priority": 1.5}, "priority=1.5 is unknown"),
    ({"priority": 2**40}, "priority=1099511627776 is unknown.*1048576"),
    ({"slo": "fast"}, "slo='fast' must be an Slo"),
    ({"slo": {"ttft_ms": 5}}, "must be an Slo"),
    ({"slo": (5, 5)}, "must be an Slo"),
    ({"slo": Slo(ttft_ms=math.nan)}, "ttft_ms must be a number of milliseconds in"),
    ({"slo": Slo(tpot_ms=-1)}, "tpot_ms must be a number of milliseconds in"),
    ({"slo": Slo(ttft_ms="1")}, "ttft_ms must be a number of milliseconds in"),  # type: ignore[arg-type]
    ({"slo": Slo(tpot_ms=math.inf)}, "tpot_ms must be a number of milliseconds in"),
    ({"timeout_s": 0}, "timeout_s=0 must be a number of seconds in"),
    ({"timeout_s": -1.0}, "timeout_s=-1.0 must be"),
    ({"timeout_s": math.nan}, "timeout_s=nan must be"),
    ({"timeout_s": math.inf}, "timeout_s=inf must be"),
    ({"timeout_s": "1"}, "timeout_s='1' must be"),
    ({"timeout_s": True}, "timeout_s=True must be"),
    ({"stop": 5}, "stop=5 must be a string"),
    ({"stop": [""]}, "stop=.* must be a non-empty string"),
    ({"stop": ""}, "stop=.* must be a non-empty string"),
    ({"stop": ["a", 1]}, "stop=.* must be"),
    ({"sampling": {"temperature": 0}}, "sampling=.* must be SamplingParams"),
    ({"sampling": SamplingParams(stop_token_ids=(VOCAB,))}, f"token id {VOCAB} in sampling"),
    ({"sampling": SamplingParams(logit_bias={VOCAB + 4: 1.0})}, f"token id {VOCAB + 4} in"),
    ({"request_id": ""}, "request_id='' must be a non-empty string"),
    ({"request_id": 7}, "request_id=7 must be"),
    ({"prompt": "ab\ud800"}, r"the prompt holds '\\ud800' at position 2, half of a surrogate"),
    ({"prompt": [{"role": "user", "content": "\udfff"}]},
     r"messages\[0\]\['content'\] holds '\\udfff' at position 0"),
    ({"prompt": [{"role": "a\ud800", "content": "x"}]}, r"messages\[0\]\['role'\] .*position 1"),
    ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
     r"messages\[0\]\['content'\]\[0\]\['text'\] holds"),
    ({"prompt": [{"role": "user", "content": "x", "\ud800": 1}]}, r"a key of messages\[0\] holds"),
    ({"stop": ["a", "b\ud800"]}, r"stop\[1\] holds '\\ud800' at position 1"),
    ({"stop": "\ud800"}, r"stop\[0\] holds"),
    ({"request_id": "n\ud800"}, r"request_id holds '\\ud800' at position 1"),
    ({"priority": "\ud800"}, r"priority='\\ud800' is unknown"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), BAD, ids=[str(b[0])[:50] for b in BAD])
def test_bad_input_is_refused_at_submit(
    recorded: QLLMEngine, wrong: dict[str, Any], message: str
) -> None:
    before = recorded.stats()["num_waiting"]
    with pytest.raises(InvalidRequestError, match=message):
        recorded.submit(**{"prompt": "abc", "max_tokens": 3, **wrong})
    assert recorded.stats()["num_waiting"] == before == 0
    with pytest.raises(ValueError, match=message):  # it is also a ValueError
        recorded.submit(**{"prompt": "abc", "max_tokens": 3, **wrong})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": math.nan}, "temperature=nan must be a number in"),
        ({"temperature": -1}, "temperature=-1 must be"),
        ({"temperature": "hot"}, "temperature='hot' must be"),
        ({"temperature": math.inf}, "temperature=inf must be"),
        ({"top_p": 0}, "top_p=0 must be"),
        ({"top_p": math.nan}, "top_p=nan"),
        ({"top_k": -1}, "top_k=-1 must be"),
        ({"top_k": 1.5}, "top_k=1.5 must be"),
        ({"min_p": 2}, "min_p=2 must be"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 must be"),
        ({"presence_penalty": 3}, "presence_penalty=3 must be"),
        ({"frequency_penalty": math.nan}, "frequency_penalty=nan must be"),
        ({"seed": -1}, "seed=-1 must be"),
        ({"seed": True}, "seed=True must be"),
        ({"logprobs": 21}, "logprobs=21 must be"),
        ({"logprobs": True}, "logprobs=True must be"),
        ({"stop": ("",)}, "stop="),
        ({"stop": "\ud800"}, r"stop\[0\] holds"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids="),
        ({"ignore_eos": 1}, "ignore_eos=1 must be"),
        ({"logit_bias": {1: math.nan}}, "logit_bias="),
        ({"logit_bias": {"a": 1}}, "logit_bias="),
        ({"logit_bias": [1]}, "logit_bias="),
    ],
)
def test_bad_sampling_is_refused_when_it_is_made(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**wrong)


def test_kv_that_can_never_fit_is_refused() -> None:
    too_long = pytest.raises(InvalidRequestError, match=r"64.*shorter than 64 .max_kv_tokens")
    with engine_of(max_kv_tokens=64) as engine, too_long:
        engine.submit(ids(64))


def test_max_tokens_are_a_ceiling() -> None:
    with engine_of(max_kv_tokens=64) as engine:
        for asked in (4, 5, 65536, 2**70):
            result = engine.submit(ids(60), max_tokens=asked, ignore_eos=True).result(300)
            assert (len(result.token_ids), result.finish_reason) == (4, FinishReason.LENGTH)
        grown = engine.open("LS", "a" * 40).send(10**9, ignore_eos=True).result(300)
        assert len(grown.prompt_token_ids) + len(grown.token_ids) == 64


def test_max_tokens_beyond_the_context_are_refused_where_that_is_set() -> None:
    with engine_of(max_kv_tokens=64, clamp_max_tokens=False) as engine:
        with pytest.raises(InvalidRequestError, match=r"exceed 64 .max_kv_tokens.*at most 4"):
            engine.submit(ids(60), max_tokens=5)
        assert len(engine.submit(ids(60), max_tokens=4).result(300).token_ids) == 4


def test_submit_after_close_is_refused() -> None:
    engine = engine_of()
    handle = engine.submit("abc", max_tokens=2)
    handle.result(300)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosedError, match="closed"):
        engine.submit("abc")
    with pytest.raises(EngineClosedError, match="closed"):
        engine.checkpoint("/nowhere")
    assert len(handle.result(0).token_ids) == 2


def test_unknown_names_list_the_known_ones(recorded: QLLMEngine) -> None:
    model, threads = runner_of(recorded).model, set(threading.enumerate())
    with pytest.raises(ConfigError, match=r"'max_num_seq'.*did you mean max_num_seqs.*block_size"):
        QLLMEngine.from_model(model, max_num_seq=3)
    with pytest.raises(ConfigError, match=r"unknown policy 'qllm3'; installed: .*fcfs.*qllm2"):
        QLLMEngine.from_model(model, policy="qllm3")
    with pytest.raises(ConfigError, match=r"has no parameter 'x'; it has: .*ride_frac"):
        QLLMEngine.from_model(model, policy="qllm2", policy_settings={"x": 1})
    with pytest.raises(qllm.QllmError, match=r"mixtrall.*mixtral"):
        QLLMEngine.from_pretrained("mixtrall")
    with pytest.raises(ConfigError, match=r"preempt_at='row'.*step, layer, expert"):
        QLLMEngine.from_model(model, preempt_at="row")
    with pytest.raises(ConfigError, match=r"exactness='bits'.*order, batch-invariant"):
        QLLMEngine.from_model(model, exactness="bits")
    with pytest.raises(ConfigError, match="block_size=12 must be a power of two"):
        QLLMEngine.from_model(model, block_size=12)
    for name in ("max_num_seqs", "max_kv_tokens", "max_step_tokens", "max_waiting"):
        for value in (0, -1, True, 1.5, "8"):
            with pytest.raises(ConfigError, match=f"{name}={value!r} must be an integer in"):
                QLLMEngine.from_model(model, **{name: value})
    for value in (0, -1, math.nan, "5"):
        with pytest.raises(ConfigError, match="max_segment_ms="):
            QLLMEngine.from_model(model, max_segment_ms=value)
    with pytest.raises(ConfigError, match="device='tpu'"):
        QLLMEngine.from_pretrained("tiny", device="tpu")
    assert set(threading.enumerate()) <= threads


def test_ls_requests_have_the_targets_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Slo] = []
    with engine_of(ls_slo="ttft=0.5s,tpot=50ms") as engine:
        take = engine._client.submit

        def submit(submission: Any, handle: Any) -> None:
            found.append(submission.slo)
            take(submission, handle)

        monkeypatch.setattr(engine._client, "submit", submit)
        for slo, priority in ((None, "LS"), (Slo(tpot_ms=9.0), "LS"), (None, -1), (None, "BE")):
            engine.submit("abc", priority, max_tokens=1, slo=slo).result(300)
        engine.submit("abc", "BE", max_tokens=1, slo=Slo(ttft_ms=7.0)).result(300)
    both = Slo(500.0, 50.0)
    assert found == [both, Slo(500.0, 9.0), both, Slo(), Slo(7.0, None)]
    for wrong in ("fast", "ttft", "ttft=-1ms", "ttft=1ms,ttft=2ms"):
        with pytest.raises(ConfigError, match=r"slo '.*' must be like ttft=500ms,tpot=50ms"):
            engine_of(ls_slo=wrong)


@pytest.mark.parametrize("threads", [2, None])
def test_torch_leaves_the_cores_to_kernels_that_do_every_layer(threads: int | None) -> None:
    found, elsewhere, before = {}, set(), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for dtype in (torch.bfloat16, torch.float32):
            model = make_model("mixtral", dtype)
            with QLLMEngine.from_model(model, threads=threads, conformance=False) as engine:
                found[dtype] = engine.call(torch.get_num_threads)
                native = engine.kernels["sweep"].startswith("3 of 3")
                assert native == (dtype is torch.bfloat16)
                new = threading.Thread(target=lambda: elsewhere.add(torch.get_num_threads()))
                new.start()
                new.join()
                assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert found == {torch.bfloat16: 1, torch.float32: threads or 3}
    assert elsewhere == {3}, "what threads of the caller compute with"


# -- sampling


def test_greedy_takes_the_most_likely_token(recorded: QLLMEngine) -> None:
    sampling = SamplingParams(temperature=0, logprobs=3)
    a = recorded.submit(ids(8), max_tokens=8, sampling=sampling).result(300)
    b = recorded.submit(ids(8), max_tokens=8).result(300)  # the default of a model without config
    assert a.token_ids == b.token_ids
    assert b.logprobs is None
    assert a.logprobs is not None
    for token, logprobs in zip(a.token_ids, a.logprobs, strict=True):
        assert logprobs.top[0] == (token, logprobs.chosen)
        assert len(logprobs.top) == 3
        assert sorted((x for _, x in logprobs.top), reverse=True) == [x for _, x in logprobs.top]


def test_settings_reach_the_sampler(recorded: QLLMEngine) -> None:
    def run(prompt: Sequence[int] = ids(8), n: int = 12, **settings: Any) -> tuple[int, ...]:
        sampling = SamplingParams(**{"temperature": 0, **settings})
        return recorded.submit(prompt, max_tokens=n, sampling=sampling).result(300).token_ids

    greedy = run()
    assert run(temperature=5, seed=1) == run(temperature=5, seed=1)
    assert run(temperature=5, seed=1) != run(temperature=5, seed=2)
    assert run(temperature=5) != run(temperature=5)  # each draws a seed
    assert run(temperature=5, seed=1, top_k=1) == greedy
    assert run(temperature=5, seed=1, top_p=1e-6) == greedy
    assert run(temperature=5, seed=1, min_p=1.0) == greedy
    assert set(run(logit_bias={7: 500.0})) == {7}
    assert 7 not in run(logit_bias={7: -500.0, greedy[0]: -500.0})
    assert greedy[0] not in run(logit_bias={greedy[0]: -500.0})
    both = {7: 500.0, 8: 500.0}
    assert set(run(logit_bias=both, frequency_penalty=2)) == {7, 8}
    twelve = dict.fromkeys(range(12), 300.0)
    kinds = [
        len(set(run(logit_bias=twelve, temperature=1, seed=1, presence_penalty=p))) for p in (-2, 2)
    ]
    assert kinds[0] < kinds[1]
    twelve = dict.fromkeys(range(12), 100.0)
    assert len(set(run([200], logit_bias=twelve, repetition_penalty=10.0))) == 12


def test_stop_ids_and_stop_strings_end_an_answer(recorded: QLLMEngine) -> None:
    sampling = {"temperature": 1.0, "seed": 5, "logit_bias": LETTERS}
    whole = recorded.submit("q", max_tokens=40, sampling=SamplingParams(**sampling)).result(300)
    assert len(whole.text) == 40
    stop = whole.text[6:8]
    at = whole.text.index(stop)
    for how in ({"stop": stop}, {"stop": [stop, "zzz"]}, {"sampling": "in"}):
        params = SamplingParams(**sampling, stop=stop if "sampling" in how else ())
        more = {k: v for k, v in how.items() if k == "stop"}
        cut = recorded.submit("q", max_tokens=40, sampling=params, **more).result(300)
        assert cut.finish_reason is FinishReason.STOP
        assert cut.text == whole.text[:at]
        assert cut.token_ids == whole.token_ids[: at + len(stop)]
    pieces = [p.text for p in recorded.submit("q", "LS", 40, sampling=params)]
    assert "".join(pieces) == whole.text[:at]  # nothing is taken back
    last = whole.token_ids[9]
    params = SamplingParams(**sampling, stop_token_ids=[last])
    cut = recorded.submit("q", max_tokens=40, sampling=params).result(300)
    assert cut.finish_reason is FinishReason.STOP
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(last) + 1]


def test_every_eos_id_ends_an_answer_unless_ignored() -> None:
    model = make_model("mixtral")
    sampling = SamplingParams(temperature=1.0, seed=2)
    with QLLMEngine.from_model(model, conformance=False, threads=1) as engine:
        whole = engine.submit(ids(8), max_tokens=30, sampling=sampling).result(300).token_ids
    a, b = whole[4], whole[7]
    model.generation_config.eos_token_id = [b, a]
    with QLLMEngine.from_model(model, conformance=False, threads=1) as engine:
        cut = engine.submit(ids(8), max_tokens=30, sampling=sampling).result(300)
        assert cut.finish_reason is FinishReason.STOP
        assert cut.token_ids == whole[: min(whole.index(a), whole.index(b)) + 1]
        no_a = SamplingParams(temperature=1.0, seed=2, logit_bias={a: -500.0, b: 500.0})
        assert engine.submit(ids(8), max_tokens=30, sampling=no_a).result(300).token_ids == (b,)
        on = SamplingParams(temperature=1.0, seed=2, ignore_eos=True)
        result = engine.submit(ids(8), max_tokens=30, sampling=on).result(300)
        assert result.token_ids == whole
        assert result.finish_reason is FinishReason.LENGTH


def test_defaults_of_the_generation_config_are_honoured() -> None:
    model = make_model("mixtral")
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.5
    model.generation_config.top_k = 1
    with QLLMEngine.from_model(model, conformance=False, threads=1) as engine:
        handle = engine.submit(ids(8), max_tokens=5)
        live = loop_of(engine).live.get(handle.number)
        greedy = SamplingParams(temperature=0)
        want = engine.submit(ids(8), max_tokens=5, sampling=greedy).result(300).token_ids
        assert handle.result(300).token_ids == want
        if live is not None:
            assert live.submission.sampling.temperature == 0.5
        assert asked_sampling(None, {}, engine.sampling_defaults).temperature == 0.5


def test_a_seeded_request_is_the_same_alone_and_in_a_mixed_batch() -> None:
    with engine_of(exactness="batch-invariant") as engine:
        settings = [
            SamplingParams(temperature=1.2, seed=1, logprobs=1),
            SamplingParams(temperature=0.7, seed=2, top_k=40, logprobs=0),
            SamplingParams(temperature=0, logprobs=2, repetition_penalty=1.3),
            SamplingParams(temperature=2, seed=4, top_p=0.9, presence_penalty=1, logprobs=0),
        ]

        def submit(i: int) -> Any:
            priority = "LS" if i % 2 else "BE"
            return engine.submit(ids(10 + 7 * i, i), priority, 12, sampling=settings[i])

        alone = [submit(i).result(300) for i in range(4)]
        others = [engine.submit(ids(30, 9 + i), "BE", 20) for i in range(3)]
        torch.manual_seed(99)  # the global generator has no say
        together = [h.result(300) for h in [submit(i) for i in (2, 0, 3, 1)]]
        for i, result in zip((2, 0, 3, 1), together, strict=True):
            assert result.token_ids == alone[i].token_ids
            assert result.logprobs == alone[i].logprobs
        assert len({tuple(r.token_ids) for r in alone}) == 4
        for other in others:
            other.result(300)


# -- results


def test_generate_keeps_the_order(recorded: QLLMEngine) -> None:
    prompts = [ids(n, n) for n in (9, 3, 17, 1, 5)]
    results = recorded.generate(prompts, max_tokens=3, progress=False)
    assert [list(r.prompt_token_ids) for r in results] == prompts
    assert recorded.generate([], progress=False) == []
    assert recorded.generate(["a"], max_tokens=1)[0].prompt_token_ids == (ord("a"),)


def test_generate_leaves_nothing_behind_when_a_prompt_is_refused(recorded: QLLMEngine) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        recorded.generate([ids(9), ids(7), ""], max_tokens=200, progress=False)
    wait_for(lambda: recorded.stats()["num_live"] == 0)


def test_metrics_are_present(recorded: QLLMEngine) -> None:
    result = recorded.submit(ids(9), "BE", 6, request_id="mine").result(300)
    m = result.metrics
    assert result.request_id == m.name == "mine"
    assert (m.priority, m.num_prompt_tokens, m.num_output_tokens) == (10, 9, 6)
    assert m.queue_ms is not None
    assert m.ttft_ms is not None
    assert m.tpot_ms is not None
    assert m.e2e_ms is not None
    assert 0 <= m.queue_ms <= m.ttft_ms <= m.e2e_ms
    assert len(m.itl_ms) == 5
    assert sum(m.itl_ms) == pytest.approx(m.e2e_ms - m.ttft_ms)
    assert m.tpot_ms == pytest.approx(sum(m.itl_ms) / 5)
    assert (m.preemptions, m.evictions, m.preempt_recomputed_tokens) == (0, 0, 0)
    assert m.reason is result.finish_reason is FinishReason.LENGTH
    assert m.parked_ms >= 0
    assert recorded.submit("a", max_tokens=1).result(300).metrics.tpot_ms is None


def test_every_request_finishes_exactly_once(recorded: QLLMEngine) -> None:
    handles = [recorded.submit(ids(5, i), "LS" if i % 2 else "BE", 4) for i in range(8)]
    handles[3].cancel()
    handles[4].cancel()
    for h in handles:
        h.result(300)
    ends = [e.request_id for e in recorded.trace.events if type(e).__name__ == "Finished"]
    begun = [e.request_id for e in recorded.trace.events if type(e).__name__ == "Arrived"]
    assert sorted(ends) == sorted(begun)
    assert len(set(ends)) == len(ends)
    assert {h.number for h in handles} <= set(ends)
