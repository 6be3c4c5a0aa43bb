"""The rings: layout, records, and what a reader may never see."""

import random
import subprocess
import sysconfig
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qllm.ingress import Cancel, Submission, codec, layout, ring
from qllm.ingress.ends import PYTHON_ENDS, Ends, native_ends
from qllm.ingress.layout import HEADER, LINE, STRUCTS, TRAILER
from qllm.ingress.ring import OVERHEAD, Record, RingError, RingWriter, record_bytes
from qllm.record.metrics import RequestMetrics
from qllm.types import FinishReason, Logprobs, Sampled, SamplingParams, Slo
from qllm.types import StructuredOutputs as Form

# -- the layout


def test_a_c_compiler_sees_the_same_sizes_and_offsets(tmp_path: Path) -> None:
    lines, want = [], []
    for name, dtype in STRUCTS.items():
        lines.append(f'printf("%zu\\n", sizeof(struct {name}));')
        want.append(dtype.itemsize)
        for field in dtype.names or ():
            lines.append(f'printf("%zu\\n", offsetof(struct {name}, {field}));')
            want.append(dtype.fields[field][1])  # type: ignore[index]
    lines.append('printf("%llu\\n", QLLM_MAGIC);')
    want.append(layout.MAGIC)
    (tmp_path / "rings.h").write_text(layout.emit_header())
    body = "\n".join(lines)
    (tmp_path / "main.c").write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "rings.h"\n'
        f"int main(void) {{\n{body}\n}}"
    )
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    command = [compiler, "-std=c99", "-Wall", "-Werror", "main.c", "-o", "main"]
    subprocess.run(command, cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True)
    assert [int(line) for line in printed.stdout.split()] == want


def test_fields_lie_at_multiples_of_their_size_and_writers_share_no_line() -> None:
    for dtype in STRUCTS.values():
        assert dtype.itemsize % 8 == 0
        for field in dtype.names or ():
            base, offset = dtype.fields[field][:2]  # type: ignore[index]
            assert offset % min(8, (base.subdtype or (base,))[0].itemsize) == 0
    for block in ("qllm_control", "qllm_front_end"):
        assert STRUCTS[block].itemsize % LINE == 0
    engine, ours = ("progress", "ls_tail", "be_tail", "cancel_tail"), ("token_tail",)
    lines = [
        {layout.cell(layout.FRONT_END, name) * 8 // LINE for name in names}
        for names in (engine, ours)
    ]
    assert not lines[0] & lines[1]
    assert HEADER.itemsize + TRAILER.itemsize == OVERHEAD


def test_every_reason_has_a_number() -> None:
    assert {FinishReason(reason) for reason in layout.REASONS} == set(FinishReason)


# -- one ring


NATIVE_ENDS = native_ends()
BOTH = pytest.mark.parametrize("ends", [PYTHON_ENDS, NATIVE_ENDS], ids=["python", "native"])
"""Ends in Python, and in C++."""


class Pair:
    """A ring in plain memory with both its ends."""

    def __init__(self, capacity: int, ends: Ends = PYTHON_ENDS) -> None:
        self.data = bytearray(capacity)
        self.tail = memoryview(bytearray(8)).cast("Q")
        self.ends = ends
        self.writer: Any = ends.writer(memoryview(self.data), self.tail)
        self.reader: Any = ends.reader(memoryview(self.data), self.tail)
        self.num_read = 0

    def read(self) -> Record | None:
        """The next record."""
        record: Record | None = self.reader.read()
        self.num_read += record is not None
        return record

    def reader_of(self, data: bytes) -> Any:
        """A reader at the same place that sees `data` instead."""
        reader: Any = self.ends.reader(
            memoryview(bytearray(data)), memoryview(bytearray(8)).cast("Q")
        )
        if self.ends is PYTHON_ENDS:
            reader._at, reader._seq = self.tail[0], self.num_read
        else:
            reader._end["at"], reader._end["seq"] = self.tail[0], self.num_read
        return reader


class Journal:
    """Stands for the ring's bytes and notes the stores of a writer in their order."""

    def __init__(self, data: bytearray) -> None:
        self.data = data
        self.stores: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self.data)

    def cast(self, _: str) -> "_Words":
        return _Words(self)

    def __setitem__(self, key: slice, value: bytes) -> None:
        self.store(key.start or 0, bytes(value))

    def store(self, start: int, value: bytes) -> None:
        self.stores.append((start, value))
        self.data[start : start + len(value)] = value


class _Words:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def __setitem__(self, index: int, value: int) -> None:
        self._journal.store(8 * index, value.to_bytes(8, "little"))


def body_of(record: Record | None, size: int) -> bytes | None:
    """What was written, without the zeros behind it."""
    if record is None:
        return None
    assert not any(record.body[size:])
    return record.body[:size]


def after_laps(capacity: int, laps: int, seed: int, ends: Ends = PYTHON_ENDS) -> Pair:
    """A ring full of old records, at some place in it."""
    pair, rng = Pair(capacity, ends), random.Random(seed)
    while pair.tail[0] < laps * capacity:
        assert pair.writer.write(2, 3, rng.randbytes(rng.randrange(200)))
        assert pair.read() is not None
    return pair


@BOTH
@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 300), max_size=60), rng=st.randoms(use_true_random=False))
def test_what_goes_in_comes_out_in_order(sizes: list[int], rng: random.Random, ends: Ends) -> None:
    pair, waiting = Pair(1024, ends), deque[bytes]()
    refused = 0
    for size in sizes:
        body = rng.randbytes(size)
        used = pair.writer.num_used
        if pair.writer.write(7, 1, body):
            waiting.append(body)
        else:
            refused += 1
            assert used + record_bytes(size) + LINE > 1024
            assert pair.writer.num_used == used
        while waiting and rng.random() < 0.45:
            want = waiting.popleft()
            record = pair.read()
            assert body_of(record, len(want)) == want
            assert record is not None
            assert (record.kind, record.flags) == (7, 1)
    for want in waiting:
        assert body_of(pair.read(), len(want)) == want
    assert pair.read() is None
    assert pair.writer.num_used == 0


def test_both_write_the_same_bytes() -> None:
    pairs, rng = [Pair(1024, PYTHON_ENDS), Pair(1024, NATIVE_ENDS)], random.Random(0)
    for number in range(300):
        body, flags = rng.randbytes(rng.randrange(300)), rng.randrange(1 << 16)
        assert [pair.writer.write(number, flags, body) for pair in pairs] == [True, True]
        assert pairs[0].data == pairs[1].data
        assert pairs[0].read() == pairs[1].read() is not None


@BOTH
def test_a_slow_reader_loses_nothing(ends: Ends) -> None:
    pair = Pair(64 * LINE, ends)
    count = 0
    while pair.writer.write(1, 0, count.to_bytes(8, "little")):
        count += 1
    assert count == 63  # one line stays free for the zero behind the last record
    for _ in range(3):
        assert not pair.writer.write(1, 0, bytes(8))
    for n in range(count):
        assert body_of(pair.read(), 8) == n.to_bytes(8, "little")
    assert pair.writer.write(1, 0, bytes(8))


@BOTH
def test_a_record_larger_than_the_ring_is_refused(ends: Ends) -> None:
    pair = Pair(4 * LINE, ends)
    assert pair.writer.write(1, 0, bytes(3 * LINE - OVERHEAD))
    with pytest.raises(ValueError, match="a record of 256 bytes exceeds a ring of 256"):
        pair.writer.write(1, 0, bytes(3 * LINE - OVERHEAD + 1))


@BOTH
@pytest.mark.parametrize("laps", [0, 3])
@pytest.mark.parametrize("size", [0, 32, 33, 150])
def test_a_torn_write_is_never_used(laps: int, size: int, ends: Ends) -> None:
    for seed in range(6):
        pair = after_laps(512, laps, seed, ends)
        before = bytes(pair.data)
        body = random.Random(seed).randbytes(size)
        assert pair.writer.write(9, 4, body)
        after = bytes(pair.data)
        changed = [i for i in range(512) if before[i] != after[i]]
        for k in range(513):
            for seen in (after[:k] + before[k:], before[:k] + after[k:]):
                whole = all(seen[i] == after[i] for i in changed)
                reader = pair.reader_of(seen)
                record = reader.read()
                if whole:
                    assert body_of(record, size) == body
                    assert reader.read() is None
                else:
                    assert record is None or body_of(record, size) == body


@BOTH
@settings(max_examples=200, deadline=None)
@given(size=st.integers(0, 150), seed=st.integers(0, 2**32), data=st.data())
def test_a_write_seen_in_any_order_of_bytes_is_never_misread(
    size: int, seed: int, data: st.DataObject, ends: Ends
) -> None:
    pair = after_laps(512, 2, seed, ends)
    before = bytes(pair.data)
    body = random.Random(seed).randbytes(size)
    assert pair.writer.write(9, 4, body)
    after = bytes(pair.data)
    changed = [i for i in range(512) if before[i] != after[i]]
    missing = data.draw(st.sets(st.sampled_from(changed), max_size=40))
    seen = bytearray(after)
    for i in missing:
        seen[i] = before[i]
    record = pair.reader_of(bytes(seen)).read()
    assert record is None or body_of(record, size) == body
    if not missing:
        assert record is not None


@BOTH
def test_a_writer_that_dies_at_any_byte_leaves_nothing_or_all(ends: Ends) -> None:
    for seed in range(12):
        old = after_laps(512, 2, seed, ends)
        body = random.Random(seed).randbytes(seed * 14)
        journal = Journal(bytearray(old.data))
        writer = RingWriter(journal, old.tail)  # type: ignore[arg-type]
        writer._head, writer._seq = old.writer.head, old.num_read
        assert writer.write(5, 0, body)
        first, last = journal.stores[0], journal.stores[-1]
        assert first[1] == bytes(8), "the word behind the record is zeroed first"
        assert last[1] == writer._seq.to_bytes(8, "little"), "the trailer's number is last"
        total = sum(len(value) for _, value in journal.stores[:-1])
        for died_at in range(total + 1):
            seen, left = bytearray(old.data), died_at
            for start, value in journal.stores[:-1]:
                part = value[:left]
                seen[start : start + len(part)] = part
                left -= len(part)
            assert old.reader_of(bytes(seen)).read() is None
        assert body_of(old.reader_of(bytes(journal.data)).read(), len(body)) == body


@BOTH
def test_a_prompt_cannot_pass_for_a_record(ends: Ends) -> None:
    """Old bytes that look like the next record, where the reader looks next."""
    pair = Pair(16 * LINE, ends)
    fake = ring.encode(2, 1, 0, b"fake")
    assert pair.writer.write(1, 0, bytes(LINE - HEADER.itemsize) + fake + bytes(400))
    assert pair.read() is not None
    while pair.writer.head % (16 * LINE) != 0:
        assert pair.writer.write(1, 0, b"")
        assert pair.read() is not None
    forged = ring.encode(pair.num_read + 2, 1, 0, b"fake")
    pair.data[LINE : LINE + len(forged)] = forged
    assert pair.writer.write(1, 0, b"true")
    assert body_of(pair.read(), 4) == b"true"
    assert pair.read() is None


@BOTH
def test_an_overwritten_record_is_an_error_in_the_end(
    monkeypatch: pytest.MonkeyPatch, ends: Ends
) -> None:
    pair = Pair(512, ends)
    now_ns = 10**12
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    pair.writer.write(1, 0, b"hello")
    pair.data[HEADER.itemsize] ^= 1
    assert pair.read() is None
    assert pair.read() is None
    now_ns += ring.BROKEN_AFTER_NS
    assert pair.read() is None
    now_ns += 1
    with pytest.raises(RingError, match=r"record 1 .* wrong checksum"):
        pair.read()


@BOTH
@settings(max_examples=200, deadline=None)
@given(data=st.binary(min_size=256, max_size=256))
@example(data=ring.encode(1, 1, 0, b"").ljust(256, b"\xff"))
@example(data=(1).to_bytes(8, "little") + b"\xff" * 248)
def test_any_bytes_can_be_read(data: bytes, ends: Ends) -> None:
    reader = ends.reader(memoryview(bytearray(data)), memoryview(bytearray(8)).cast("Q"))
    record = reader.read()
    assert record is None or data.startswith(ring.encode(1, *record))


# -- values


def finite(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


IDS = st.lists(st.integers(0, 2**31), max_size=5).map(tuple)
FORMS = st.sampled_from([Form(choice=["a", "ö"]), Form(regex="a+"), Form(json={"a": [1, "b"]})])
LIMITS = st.builds(dict, structured_outputs=FORMS, ignore_eos=st.just(False))
LIMITS |= st.builds(dict, allowed_token_ids=st.none() | IDS.filter(bool))
LIMITS |= st.builds(dict, draft_tokens=st.none() | st.integers(0, 16), prediction=IDS | st.text())
LIMITS |= st.builds(dict, thinking_token_budget=st.none() | st.integers(0, 2**30))
LIMITS |= st.builds(dict, bad_words=st.lists(st.just("word") | st.just(" é")).map(tuple))
PLAIN = st.builds(
    SamplingParams,
    temperature=finite(0, 100),
    top_k=st.integers(0, 2**62),
    top_p=finite(1e-9, 1),
    min_p=finite(0, 1),
    repetition_penalty=finite(1e-6, 10),
    presence_penalty=finite(-2, 2),
    frequency_penalty=finite(-2, 2),
    seed=st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    stop_token_ids=IDS,
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.dictionaries(st.integers(0, 2**31), finite(-1e300, 1e300), max_size=5),
    min_tokens=st.integers(0, 2**30),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
    confidence=st.booleans(),
)
SAMPLINGS = st.builds(lambda plain, limits: replace(plain, **limits), PLAIN, LIMITS)
MS = st.none() | finite(1e-3, 1e9)
SUBMISSIONS = st.builds(
    Submission,
    request_id=st.integers(0, 2**62),
    name=st.text(min_size=1),
    priority=st.integers(-(1 << 20), 1 << 20),
    token_ids=st.lists(st.integers(0, 2**31), min_size=1, max_size=300).map(tuple),
    sampling=SAMPLINGS,
    stop_ids=st.frozensets(st.integers(0, 2**31), max_size=5),
    max_tokens=st.integers(1, 2**31),
    slo=st.builds(Slo, MS, MS),
    arrival_ns=st.integers(0, 2**60 - 1),
    deadline_ns=st.none() | st.integers(0, 2**60 - 1),
)
REPLAYED = st.builds(
    lambda item: replace(item, num_output_tokens=len(item.token_ids) // 2), SUBMISSIONS
)


@settings(max_examples=150, deadline=None)
@given(SUBMISSIONS | REPLAYED)
def test_a_request_survives_its_record(submission: Submission) -> None:
    flags, body = codec.encode_submission(submission)
    pair = Pair(record_bytes(len(body)) + LINE)
    assert pair.writer.write(layout.REQUEST_KIND, flags, body)
    record = pair.read()
    assert record is not None
    assert codec.decode_submission(record) == submission


@pytest.mark.parametrize(
    "field", [{"skip_special_tokens": False}, {"include_stop_str_in_output": True}]
)
def test_a_setting_of_the_text_alone_is_in_the_record(field: dict[str, bool]) -> None:
    sampling = SamplingParams(seed=1, **field)
    submission = Submission(
        request_id=1, name="a", priority=0, token_ids=(1,), sampling=sampling,
        stop_ids=frozenset(), max_tokens=1, slo=Slo(), arrival_ns=0, deadline_ns=None,
    )  # fmt: skip
    record = Record(layout.REQUEST_KIND, *codec.encode_submission(submission))
    assert codec.decode_submission(record).sampling == sampling


def test_every_sampling_field_is_in_the_record() -> None:
    of_the_call = {"max_tokens", "n"}
    assert set(SamplingParams.__dataclass_fields__) - of_the_call == {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "prompt_logprobs",
        "logit_bias",
        "structured_outputs",
        "allowed_token_ids",
        "bad_words",
        "min_tokens",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "thinking_token_budget",
        "draft_tokens",
        "prediction",
        "confidence",
    }, "a new field of SamplingParams needs a place in layout.REQUEST and in SAMPLINGS here"


@given(st.integers(0, 2**62), st.sampled_from(FinishReason))
def test_a_cancel_survives_its_record(request_id: int, reason: FinishReason) -> None:
    item = Cancel(request_id, reason)
    assert codec.decode_cancel(Record(2, 0, codec.encode_cancel(item))) == item


TOP = st.lists(st.tuples(st.integers(0, 2**31), finite(-1e9, 0)), max_size=20).map(tuple)


@given(
    st.integers(0, 2**62),
    st.integers(0, 2**31),
    st.none() | st.builds(Logprobs, finite(-1e9, 0), TOP),
    st.integers(0, 2**62),
)
def test_a_token_survives_its_record(
    request_id: int, token_id: int, logprobs: Logprobs | None, at_ns: int
) -> None:
    sampled = Sampled(request_id, token_id, logprobs)
    flags, body = codec.encode_token(sampled, at_ns)
    assert codec.decode_token(Record(3, flags, body + bytes(20))) == (sampled, at_ns)
    if logprobs is None:
        assert record_bytes(len(body)) == LINE


def metrics_of(**changes: Any) -> RequestMetrics:
    values: dict[str, Any] = {
        "request_id": 5,
        "name": "mine",
        "priority": 10,
        "arrival_ns": 1_000_000,
        "num_prompt_tokens": 9,
        "num_prefilled_tokens": 8,
        "num_output_tokens": 3,
        "queue_ms": 0.5,
        "ttft_ms": 1.0,
        "tpot_ms": 1.5,
        "itl_ms": (1.0, 2.0),
        "e2e_ms": 4.0,
        "preemptions": 1,
        "parked_ms": 2.5,
        "max_stall_ms": 3.5,
        "evictions": 2,
        "evict_recomputed_tokens": 3,
        "retry_recomputed_tokens": 4,
        "preempt_recomputed_tokens": 5,
        "reason": FinishReason.LENGTH,
    }
    return RequestMetrics(**{**values, **changes})


@pytest.mark.parametrize("error", [None, "", "Wörter: \ud800 \x00", "e" * 20_000])
@pytest.mark.parametrize(
    ("metrics", "token_ns"),
    [
        (None, []),
        (metrics_of(), [2_000_000, 3_000_000, 5_000_000]),
        (
            metrics_of(num_cached_tokens=4, num_accepted_drafts=2, num_rejected_drafts=7),
            [2_000_000, 3_000_000, 5_000_000],
        ),
        (
            metrics_of(open_ms=0.0, num_revisions=1, num_rejected_drafts=7),
            [2_000_000, 3_000_000, 5_000_000],
        ),
        (
            metrics_of(
                queue_ms=None, ttft_ms=None, tpot_ms=None, itl_ms=(), e2e_ms=None,
                num_output_tokens=0,
            ),
            [],
        ),
    ],
)  # fmt: skip
def test_an_end_survives_its_record(
    error: str | None, metrics: RequestMetrics | None, token_ns: list[int]
) -> None:
    for reason in FinishReason:
        flags, body = codec.encode_finish(5, reason, error, metrics)
        end = codec.decode_finish(Record(4, flags, body + bytes(9)))
        assert (end.request_id, end.reason) == (5, reason)
        if error is None or "\ud800" not in error:
            want = None if error is None else error[: codec.MAX_TEXT_BYTES]
            assert end.error == want
        assert (end.metrics is None) == (metrics is None)
        if metrics is not None and end.metrics is not None:
            found = end.metrics.complete(5, "mine", FinishReason.LENGTH, token_ns)
            assert found == metrics
