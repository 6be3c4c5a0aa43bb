"""What the native server does not serve, and records that no front end of ours writes."""

import random
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qllm.ingress import codec, layout
from qllm.ingress.layout import NUMBER_BITS
from qllm.sim.world import LIMITS
from qllm.types import MAX_TIME_MS, NS_PER_MS, FinishReason, Priority, SamplingParams
from tests.support.ring_world import MAX_TOTAL, SHIPPED, RingWorld, tokens_alone, world
from tests.support.shm_rig import submission

LS, BE = Priority.LS, Priority.BE


# -- what is not served


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sampling": SamplingParams(repetition_penalty=1.1)}, "penalties are not served"),
        ({"sampling": SamplingParams(prompt_logprobs=0)}, "prompt_logprobs are not served"),
        ({"sampling": SamplingParams(presence_penalty=-0.5)}, "penalties are not served"),
        ({"sampling": SamplingParams(frequency_penalty=0.5)}, "penalties are not served"),
        ({"sampling": SamplingParams(logit_bias={3: 1.0})}, "logit_bias is not served"),
        ({"sampling": SamplingParams(logprobs=0)}, "logprobs are not served"),
        ({"stop_ids": frozenset(range(9))}, "more stop ids than"),
        ({"token_ids": (5, 97, 5)}, "not in the vocabulary"),
        ({"token_ids": (5, 2**32 - 1)}, "not in the vocabulary"),
        ({"token_ids": ()}, "no tokens"),
        ({"max_tokens": 0}, "no tokens"),
        ({"max_tokens": MAX_TOTAL - 4}, "exceed max_total_tokens"),
        ({"max_tokens": 2**32 - 1}, "exceed max_total_tokens"),
        ({"max_tokens": 60}, "exceed the KV"),
    ],
)
def test_what_is_not_served_ends_at_once_and_says_why(changes: dict[str, Any], says: str) -> None:
    with world("qllm2", True, replace(LIMITS, num_blocks=4)) as w:
        seed = {"sampling": replace(changes["sampling"], seed=1)} if "sampling" in changes else {}
        good = w.submit(0, BE, 5, 3)
        bad = w.submit(1, BE, 5, 3, **{**changes, **seed})
        w.run(2)
        assert w.reasons() == {good: FinishReason.LENGTH, bad: FinishReason.ERROR}
        assert says in w.ends()[bad].error
        assert w.ends()[bad].metrics.queue_ms is None
        assert w.tokens(bad) == []


def test_what_is_sampled_by_and_stopped_on_reaches_the_runner() -> None:
    sampling = SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=2**62 + 1)
    with world() as w:
        seen: list[Any] = []
        w.runner.add = lambda *args: seen.append(args)
        item = replace(sampling, stop_token_ids=(90, 91, 92))  # they are among the stop ids
        w.submit(0, BE, 4, 3, sampling=item, stop_ids=frozenset({3, 90}))
        w.arrive()
        w.loop._take()
        assert seen == [(0, [0, 1, 2, 3], sampling, 4, 7)]
        x = w.server.memory.array("serving")[w.server.find(0)]
        assert sorted(x["stop_ids"][: x["num_stop_ids"]].tolist()) == [3, 90]


# -- attacks


def test_a_broken_ring_cuts_its_front_end_off() -> None:
    with world(num_front_ends=2) as w:
        ids = [w.submit(n, BE, 9, 30, front_end=1) for n in range(3)]
        w.submit(0, BE, 9, 400)
        w.step()
        ring, _ = w.blocks[0].rings["ls"]
        w.submit(1, LS, 9, 3, at_ns=w.clock.at_ns)
        w.arrive()
        ring[100] ^= 1
        for _ in range(200):
            w.step()
        assert w.broken == []
        w.clock.at_ns += 2_000_000_000
        w.step()
        assert w.broken == [(0, "a record of a ring has had a wrong checksum for too long")]
        w.run(3)
        assert [len(w.tokens(i)) for i in ids] == [30] * 3
        assert w.server.memory.get("num_held") == 0


def write_raw(w: RingWorld, ring: str, kind: int, flags: int, body: bytes) -> None:
    """What an attacker in the place of front end 1 writes."""
    writers = {
        "ls": w.front_ends[1].ls,
        "be": w.front_ends[1].be,
        "cancel": w.front_ends[1].cancels,
    }
    writers[ring].write(kind, flags, body)
    w.front_ends[1]._ring()


def attack(rng: random.Random) -> tuple[str, int, int, bytes]:
    """A record that passes the checksum: a request or cancel with something wrong, or noise."""
    number = rng.randrange(6)
    item = submission(1 << NUMBER_BITS | number, rng.choice([0, 10]), rng.randint(1, 40), 5)
    flags, body = codec.encode_submission(replace(item, max_tokens=rng.randint(1, 5)))
    ring, kind, how = rng.choice(["ls", "be"]), layout.REQUEST_KIND, rng.randrange(8)
    data = bytearray(body)
    if how == 0:
        return (
            ring,
            rng.choice([kind, 2, 9]),
            rng.getrandbits(16),
            rng.randbytes(rng.randint(0, 900)),
        )
    if how == 1:
        return ring, kind, flags, body[: rng.randrange(len(body))]
    if how == 2:
        request_id = rng.choice([1 << NUMBER_BITS | rng.randrange(8), rng.getrandbits(64)])
        cancel = struct.pack("<QII", request_id, rng.choice([0, 2, 4, 5, 2**32 - 1]), 0)
        return "cancel", rng.choice([2, 2, 2, 1]), 0, cancel
    if how < 7:
        names = [
            name for name in layout.REQUEST.names or () if name not in ("header", "request_id")
        ]
        name = rng.choice(names)
        field, at = layout.REQUEST.fields[name][:2]  # type: ignore[index]
        wild = [b"\xff" * 8, bytes(8), b"\xff" * 7 + b"\x7f", rng.randbytes(8), b"\x07" + bytes(7)]
        data[at - 16 : at - 16 + field.itemsize] = rng.choice(wild)[: field.itemsize]
        flags = rng.choice([flags, layout.HAS_DEADLINE])
    return ring, kind, flags, bytes(data)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("number", range(40))
def test_no_record_of_an_attacker_harms_another_front_end(number: int) -> None:
    rng = random.Random(number)
    policy = SHIPPED[number % len(SHIPPED)]
    requests = [(LS, 30, 5), (BE, 200, 20), (BE, 7, 60)]
    with world(policy, num_front_ends=2, capacity=24, max_front_ends=2) as w:
        ids = [w.submit(n, *request) for n, request in enumerate(requests)]
        for _ in range(rng.choice([1, 10, 60])):
            record = attack(rng)
            w.at(rng.randrange(40 * NS_PER_MS), lambda r=record: write_raw(w, *r))
        for _ in range(3000):
            w.step()
            if (
                not w.due
                and all(i in w.ends() for i in ids)
                and not w.server.memory.get("num_held")
            ):
                break
        assert [w.tokens(i) for i in ids] == tokens_alone(policy, *requests)
        assert all(w.reasons()[i] is FinishReason.LENGTH for i in ids)
        assert w.server.memory.get("num_held") == 0
        assert w.runner.requests == {}
        assert all(n == 1 for n, _ in w.broken)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_prompt": 41}, "no request or cancel"),
        ({"num_prompt": 2**32 - 1}, "no request or cancel"),
        ({"num_stop_ids": 2**31}, "no request or cancel"),
        ({"num_stop_ids": 2**31, "num_stop_token_ids": 2**31}, "no request or cancel"),
        ({"num_stop_bytes": 2**32 - 1}, "no request or cancel"),
        ({"request_id": 7}, "id of another front end"),
        ({"request_id": 1 << NUMBER_BITS}, "id twice"),
    ],
)
@pytest.mark.parametrize("native", [False, True], ids=["python", "native"])
def test_a_record_that_no_front_end_writes_cuts_its_writer_off(
    native: bool, change: dict[str, Any], why: str
) -> None:
    with world("qllm2", native, num_front_ends=2) as w:
        w.submit(0, BE, 5, 60, front_end=1)
        w.step()
        write_raw(w, "ls", layout.REQUEST_KIND, 0, changed(1 << NUMBER_BITS | 9, **change))
        w.step()
        assert [(n, why in text or not native) for n, text in w.broken] == [(1, True)]
        assert not native or w.server.memory.get("num_held") == 0


def changed(own_id: int, **change: Any) -> bytes:
    """The body of a request record with other numbers in its fixed fields."""
    _, body = codec.encode_submission(submission(own_id, 0, 16, 5))
    record = np.frombuffer(bytes(16) + body, layout.REQUEST, 1).copy()
    for name, value in change.items():
        record[name] = value
    fixed = record.tobytes()[16:]
    return fixed + body[len(fixed) :]


NAN, INF = float("nan"), float("inf")
WRONG_NUMBERS: list[tuple[str, Any]] = [
    *(("temperature", x) for x in (NAN, INF, -1.0, 100.5, 1e308)),
    *(("top_p", x) for x in (NAN, 0.0, -0.0, 1.5, -INF)),
    *(("min_p", x) for x in (NAN, 1.5, -1e-300)),
    *(("repetition_penalty", x) for x in (NAN, 0.0, INF)),
    *(("presence_penalty", x) for x in (NAN, 3.0)),
    *(("frequency_penalty", x) for x in (NAN, -INF)),
    *(("slo_ttft_ms", x) for x in (INF, -INF, 0.0, -0.0, -5.0, 1e308, MAX_TIME_MS * 1.001)),
    *(("slo_tpot_ms", x) for x in (INF, -INF, 0.0, -0.0, -5.0, 1e13, MAX_TIME_MS * 1.001)),
    *(("arrival_ns", x) for x in (2**63 - 1, -(2**63), 2**60)),
    *(("deadline_ns", x) for x in (2**63 - 1, -(2**63), 2**60)),
    *(("priority", x) for x in (2**31 - 1, -(2**31), 2**20 + 1, -(2**20) - 1)),
    ("seed", 2**63),
    ("top_k", 2**64 - 1),
    ("logprobs", 21),
    *(("max_tokens", x) for x in (0, 2**31, 2**32 - 1, 4096 - 15)),
]


@pytest.mark.parametrize("native", [False, True], ids=["python", "native"])
def test_a_wrong_number_in_a_record_ends_its_request_alone(native: bool) -> None:
    with world("qllm2", native, num_front_ends=2) as w:
        mine = [w.submit(n, BE, 40, 20, front_end=1) for n in range(2)]
        other = w.submit(0, LS, 9, 20)
        w.step()
        bad = [1 << NUMBER_BITS | 100 + n for n in range(len(WRONG_NUMBERS))]
        for request_id, (name, value) in zip(bad, WRONG_NUMBERS, strict=True):
            body = changed(request_id, **{name: value})
            write_raw(w, "ls", layout.REQUEST_KIND, layout.HAS_DEADLINE, body)
            w.step()
        w.run(3 + len(bad))
        served = [x for i, x in zip(bad, WRONG_NUMBERS, strict=True) if w.tokens(i)]
        assert served == []
        reasons = w.reasons()
        assert {reasons[i] for i in bad} == {FinishReason.ERROR}
        assert all(w.ends()[i].error for i in bad)
        assert w.broken == []
        assert [len(w.tokens(i)) for i in (*mine, other)] == [20] * 3
        assert all(reasons[i] is FinishReason.LENGTH for i in (*mine, other))
        assert w.runner.requests == {}


@pytest.mark.parametrize("native", [False, True], ids=["python", "native"])
def test_the_largest_numbers_that_are_allowed_are_served(native: bool) -> None:
    edges = {
        "slo_ttft_ms": [5e-324, float(MAX_TIME_MS), NAN],
        "slo_tpot_ms": [5e-324, float(MAX_TIME_MS), NAN],
        "arrival_ns": [1 - 2**60, 2**60 - 1],
        "priority": [2**20, -(2**20)],
        "seed": [0, 2**63 - 1],
        "top_k": [0, 2**63 - 1],
        "temperature": [0.0, -0.0, 5e-324, 100.0],
        "top_p": [5e-324, 1.0],
        "min_p": [0.0, 1.0],
    }
    for policy in SHIPPED:
        with world(policy, native, num_front_ends=2) as w:
            other = [w.submit(n, [LS, BE][n], 60, 12) for n in range(2)]
            pairs = [(name, value) for name, values in edges.items() for value in values]
            for n, (name, value) in enumerate(pairs):
                request_id = 1 << NUMBER_BITS | n
                write_raw(w, "be", layout.REQUEST_KIND, 0, changed(request_id, **{name: value}))
            w.run(2 + len(pairs))
            assert set(w.reasons().values()) == {FinishReason.LENGTH}
            assert [len(w.tokens(i)) for i in other] == [12, 12]
