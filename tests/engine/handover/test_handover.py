# Over 500 lines: one way to leave or to be refused per test, with the table of bad parcels.
"""A request goes on in another engine, with its KV: the tokens and bits of one that stayed."""

import copy
import json
import mmap
import random
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qllm import QLLMEngine, SamplingParams
from qllm.block_file import checksum_of
from qllm.config import engine_config
from qllm.engine.handover import arrivals as handed
from qllm.engine.handover import format as parcel
from qllm.engine.handover.format import header_bytes
from qllm.engine.handover.handover import Choose, Counts
from qllm.engine.handover.outbox import KEEP_S, Outbox
from qllm.errors import MOVED, CheckpointError, ConfigError
from qllm.frontend.handle import Handle, Result
from qllm.ingress import CONTROL, Submission
from qllm.ingress.messages import Source
from qllm.models.loader import load
from qllm.record.trace import Event, Finished
from qllm.scheduler.program import Index, OpKind, Program
from qllm.types import FinishReason, StructuredOutputs
from tests.support import tiny_configs
from tests.support.draft_models import MTP, SAME, WITH_MTP, drafting, saved
from tests.support.drafters import always_draft, maker, model_of, next_of, poison_rejected
from tests.support.families import DTYPES, VOCAB, make_model
from tests.support.hybrids import make_hybrid
from tests.support.inside import runner_of
from tests.support.waiting import wait_for

SETTINGS: dict[str, Any] = {
    "conformance": False,
    "threads": 1,
    "max_kv_tokens": 2048,
    "swap_kv_tokens": 2048,
    "max_segment_ms": 0.4,
    "handover_gib": 0.01,
}
GREEDY = SamplingParams(temperature=0, ignore_eos=True, logprobs=1)
SAMPLED = SamplingParams(
    temperature=1.3, seed=7, top_k=60, repetition_penalty=1.1, logprobs=2, ignore_eos=True
)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is late, however busy the machine is."""
    monkeypatch.setattr(handed, "SLACK_NS", 600 * 10**9)


def prompt_of(n: int, seed: int = 1) -> list[int]:
    rng = random.Random(1000 * n + seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def engine_of(family: str, dtype: str = "bf16", **settings: Any) -> QLLMEngine:
    model = make_model(family, DTYPES[dtype])
    return in_pieces(QLLMEngine.from_model(model, **{**SETTINGS, **settings}))


def in_pieces(engine: QLLMEngine) -> QLLMEngine:
    """Cut every operator as finely as can be, however fast the machine is."""
    object.__setattr__(runner_of(engine).backend.costs, "range_ns", 0.5)
    return engine


@dataclass
class Way:
    """How parcels go from one engine to the other in this process."""

    engine: QLLMEngine
    change: Callable[[bytearray], object] = lambda _: None
    asked: list[int] = field(default_factory=list)
    fetched: int = 0

    def pull(
        self,
        source: Source,
        allow: Callable[[int], None],
        choose: Choose,
        wanted: Callable[[], bool],
    ) -> mmap.mmap:
        sealed = core_of(self.engine).handover.outbox.read(source.ticket)
        if sealed is None:
            raise CheckpointError("no such ticket")
        data = bytearray(memoryview(sealed))
        self.change(data)
        self.asked.append(len(data))
        allow(len(data))
        memory = mmap.mmap(-1, max(1, len(data)))
        memory[: len(data)] = bytes(len(data))
        start = header_bytes(data[:24])
        memory[:start] = data[:start]
        for at, size in choose(memoryview(memory)[:start], len(data)):
            memory[at : at + size] = data[at : at + size]
            self.fetched += size
        return memory


def core_of(engine: QLLMEngine) -> Any:
    return engine._client._core  # type: ignore[attr-defined]


def connect(a: QLLMEngine, b: QLLMEngine) -> Way:
    way = Way(a)
    core_of(b).handover._pull = way.pull
    return way


Wanted = Callable[[Program | None, Index, int], bool]


@dataclass
class Left:
    """A request that has left an engine."""

    handle: Handle
    submission: Submission
    ticket: str
    where: str
    kv: list[torch.Tensor]


def leave(engine: QLLMEngine, wanted: Wanted, beside: int = 0, **spec: Any) -> Left:
    """Submit a request, with others beside it, and have it leave at the first wanted boundary."""
    client, core = engine._client, core_of(engine)
    reached, found = threading.Event(), []
    box: dict[str, Any] = {}
    count = 0

    def watch(program: Program, index: Index, begin: int, end: int) -> None:
        nonlocal count
        number = box.get("number")
        if found or number not in program.request_ids:
            return
        count += 1
        if wanted(program, index, count):
            found.append(f"{program.ops[index.op].kind.name} {index} of {len(program.rows)} rows")
            reached.set()
            wait_for(lambda: client.ingress.stop.word == CONTROL)

    def submit() -> list[Handle]:
        client.runner.on_segment = watch
        others = [engine.submit(prompt_of(9 + i, 50 + i), "BE", 12) for i in range(beside)]
        handle = engine.submit(**spec)
        box["number"] = handle.number
        return [handle, *others]

    def give() -> str | None:
        live = core.loop.live[box["number"]]
        box["submission"] = live.submission
        kv = core.runner.requests[box["number"]].kv
        box["kv"] = (
            [
                t.clone()
                for i in range(len(kv.slabs))
                if i not in kv.states.layers
                for t in kv.read(i, 0, kv.committed)
            ]
            if kv.committed
            else []
        )
        return core.handover.give(box["number"])

    handle, *others = engine.call(submit)
    assert reached.wait(60), "the boundary was never reached"
    ticket = engine.call(give)
    assert ticket is not None
    for other in others:
        other.result(300)
    engine.call(core.loop.scheduler.check)
    wait_for(lambda: handle.has_ended)
    assert handle.finish_reason is FinishReason.ERROR
    return Left(handle, box["submission"], ticket, found[0], box["kv"])


def go_on(engine: QLLMEngine, left: Left, ticket: str | None = None) -> Result:
    """Have the request go on as a front end does that replays it, and put its output together."""
    client, core = engine._client, core_of(engine)
    done = left.handle.token_ids
    item = left.submission
    with client.admission_lock:
        number = client.new_number()
        prompt = item.token_ids[: item.num_prompt_tokens]
        handle = engine._handle(number, None, prompt, item.sampling)
        for sampled in left.handle._sampled:
            handle.on_token(sampled)
        rest = replace(
            item,
            request_id=number,
            token_ids=(*prompt, *done),
            num_output_tokens=len(done),
            arrival_ns=client.now_ns(),
        )
        if ticket := left.ticket if ticket is None else ticket:
            core.handed.expect(number, Source("there:1", ticket))
        client.submit(rest, handle)
    result = handle.result(300)
    engine.call(core.loop.scheduler.check)
    assert number not in core.runner.requests
    return result


def same(found: Result, wanted: Result) -> bool:
    return (
        found.token_ids == wanted.token_ids
        and found.logprobs == wanted.logprobs
        and found.prompt_logprobs == wanted.prompt_logprobs
        and found.finish_reason == wanted.finish_reason
    )


def taken(engine: QLLMEngine) -> tuple[int, int]:
    stats = engine.stats()["handover"]
    return stats["taken"], stats["missed"]


def in_experts(program: Program | None, index: Index, count: int) -> bool:
    assert program is not None
    op = program.ops[min(index.op, len(program.ops) - 1)]
    return op.kind is OpKind.EXPERTS and op.layer >= 1 and index.pos > 0


def in_attention(program: Program | None, index: Index, count: int) -> bool:
    """Between two tokens of a layer, where one carries a state to the next."""
    assert program is not None
    ops = program.ops[max(0, index.op - 1) : index.op + 1]
    return all(op.kind is OpKind.ATTN and op.layer >= 1 for op in ops) and program.rows[0].lo == 0


def decoding(program: Program | None, index: Index, count: int) -> bool:
    assert program is not None
    return program.rows[0].lo >= 75


def after(least: int) -> Wanted:
    return lambda program, index, count: count >= least


FAMILIES = ["mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe", "granitemoe"]


@pytest.mark.sampled
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_request_that_moves_anywhere_gets_the_tokens_of_one_that_stayed(
    family: str, dtype: str
) -> None:
    rng = random.Random(f"{family} {dtype}")
    exact = {"exactness": "batch-invariant"}
    with engine_of(family, dtype, **exact) as a, engine_of(family, dtype, **exact) as b:
        connect(a, b)
        moves = 0
        for sampling in (GREEDY, SAMPLED):
            spec = {"prompt": prompt_of(150), "max_tokens": 14, "sampling": sampling}
            stayed = a.submit(priority="BE", **spec).result(300)
            assert len(set(stayed.token_ids)) > 1
            places = (in_experts, after(rng.randrange(1, 60)), after(rng.randrange(60, 150)))
            for wanted in places:
                a.reset_prefix_cache()
                b.reset_prefix_cache()
                left = leave(a, wanted, rng.choice((0, 2)), priority="BE", **spec)
                found = go_on(b, left)
                assert same(found, stayed), left.where
                moves += bool(left.ticket)
                assert taken(b) == (moves, 0), left.where
                there, here = core_of(a).handover.counts, core_of(b).handover.counts
                assert here.taken_tokens == there.given_tokens
        assert moves


@pytest.mark.parametrize("at", [1, 17, 60])
@pytest.mark.parametrize(
    ("family", "drafter"),
    [("mixtral", "half"), ("mixtral", "exit:1"), ("mixtral", "exit:2"), ("qwen3_next", "half")],
)
def test_a_row_that_verifies_drafts_stays_behind(
    family: str, drafter: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV of known tokens goes along, and the other engine drafts on."""
    poison_rejected(monkeypatch)
    exact, seen = {"exactness": "batch-invariant"}, []
    spec: dict[str, Any] = {"prompt": prompt_of(150), "max_tokens": 20, "sampling": SAMPLED}

    def verifying(program: Program | None, index: Index, count: int) -> bool:
        assert program is not None
        seen.extend(num > 1 or bool(program.exits) for num in program.samples)
        return sum(seen) >= at

    how = {**SETTINGS, **exact}
    a, b = (in_pieces(QLLMEngine.from_model(model_of(family), **how)) for _ in range(2))
    with a, b:
        connect(a, b)
        stayed = a.submit(priority="BE", **spec).result(300)
        a.reset_prefix_cache()
        right = next_of({tuple(spec["prompt"]): stayed.token_ids})
        for engine in (a, b):
            always_draft(engine, maker(drafter, right, VOCAB))
        left = leave(a, verifying, priority="BE", **spec)
        sent = core_of(a).handover.outbox._left[left.ticket].says
        assert sent["kept"] is None or drafter != "half"
        assert sent["committed"] == 150 + len(left.handle.token_ids) - 1
        tensors = core_of(a).handover.outbox._left[left.ticket].tensors
        states = {int(name.split(".")[2]) for name in tensors if name.startswith("state.")}
        assert states == ({sent["committed"]} if family == "qwen3_next" else set())
        found = go_on(b, left)
        assert same(found, stayed), left.where
        assert taken(b) == (1, 0), left.where
        assert found.metrics.num_accepted_drafts > 0 or drafter != "half"
        assert found.metrics.num_rejected_drafts > 0


@pytest.mark.parametrize("at", [64, 81])
@pytest.mark.parametrize(("family", "seed"), [("mixtral", SAME), (WITH_MTP, MTP)])
def test_a_draft_model_stays_behind_and_another_one_drafts_on(
    family: str, seed: int, at: int, tmp_path: Path
) -> None:
    def reached(program: Program | None, index: Index, count: int) -> bool:
        assert program is not None
        return program.rows[0].lo >= at

    spec: dict[str, Any] = {"prompt": prompt_of(60), "max_tokens": 40, "sampling": GREEDY}
    how = {**SETTINGS, "exactness": "batch-invariant"}
    with QLLMEngine.from_model(load(saved(tmp_path, family)).model, **how) as alone:
        stayed = alone.submit(priority="BE", **spec).result(300)
    a, b = (in_pieces(drafting(tmp_path, family, seed, **how)) for _ in range(2))
    with a, b:
        connect(a, b)
        left = leave(a, reached, priority="BE", **spec)
        assert a.stats()["drafts"]["model"]["requests"] == 0
        found = go_on(b, left)
        assert same(found, stayed), left.where
        assert taken(b) == (1, 0), left.where
        assert found.metrics.num_accepted_drafts > 0


@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "minimax"])
def test_layers_with_states_go_along(family: str) -> None:
    dtype = torch.bfloat16 if family == "qwen3_next" else torch.float32
    cut_alike = {"max_segment_ms": 0.001}  # bits depend on it
    how = {**SETTINGS, **cut_alike, "handover_gib": 0.1}
    model = tiny_configs.tiny_model(family).to(dtype)
    a, b = (in_pieces(QLLMEngine.from_model(copy.deepcopy(model), **how)) for _ in range(2))
    with a, b:
        connect(a, b)
        ids = [i % tiny_configs.VOCAB for i in prompt_of(70)]
        spec = {"prompt": ids, "max_tokens": 20, "sampling": GREEDY}
        stayed = a.submit(priority="BE", **spec).result(300)
        for n, wanted in enumerate((in_experts, in_attention, decoding), 1):
            left = leave(a, wanted, priority="BE", **spec)
            sent = core_of(a).handover.outbox._left[left.ticket]
            states = [name for name in sent.tensors if name.startswith("state.")]
            assert all(int(name.split(".")[2]) >= sent.says["committed"] for name in states)
            assert states or wanted is not decoding
            assert same(go_on(b, left), stayed), left.where
            assert taken(b) == (n, 0), left.where


def test_states_of_our_kernels_migrate_with_pages_of_the_layers_that_attend() -> None:
    """The first layer carries a state, and has no keys and values."""
    model, how = make_hybrid("qwen3_next"), {**SETTINGS, "exactness": "batch-invariant"}
    a, b = (in_pieces(QLLMEngine.from_model(copy.deepcopy(model), **how)) for _ in range(2))
    with a, b:
        connect(a, b)
        spec = {"prompt": prompt_of(70), "max_tokens": 20, "sampling": GREEDY}
        stayed = a.submit(priority="BE", **spec).result(300)
        for n, wanted in enumerate((in_experts, decoding), 1):
            left = leave(a, wanted, priority="BE", **spec)
            sent = core_of(a).handover.outbox._left[left.ticket].tensors
            assert "page.0.k" in sent
            assert any(name.startswith("state.0.") for name in sent)
            assert same(go_on(b, left), stayed), left.where
            assert taken(b) == (n, 0), left.where


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[QLLMEngine, QLLMEngine]]:
    with engine_of("mixtral") as a, engine_of("mixtral") as b:
        yield a, b


@pytest.fixture
def way(pair: tuple[QLLMEngine, QLLMEngine]) -> Way:
    for engine in pair:
        engine.reset_prefix_cache()
        core_of(engine).handover.counts = Counts()
    return connect(*pair)


SPEC: dict[str, Any] = {"prompt": prompt_of(150), "max_tokens": 80, "sampling": GREEDY}
MID = after(150)
"""In the middle of the answer."""


@pytest.fixture(scope="module")
def stayed(pair: tuple[QLLMEngine, QLLMEngine]) -> Result:
    return pair[0].submit(priority="BE", **SPEC).result(300)


def test_no_bit_of_kv_changes(
    pair: tuple[QLLMEngine, QLLMEngine], way: Way, stayed: Result
) -> None:
    """What came is what left, and what follows is what the request computes where it stays."""
    a, b = pair
    left = leave(a, MID, priority="BE", **SPEC)
    assert 0 < len(left.handle.token_ids) < 80
    came: list[torch.Tensor] = []
    handover = core_of(b).handover
    enter = handover.enter

    def seen(item: Submission, request: Any) -> bool:
        kv = handover.brought[item.request_id].kv
        came.extend(t.clone() for i in range(3) for t in kv.read(i, 0, kv.committed))
        return bool(enter(item, request))

    core_of(b).loop.newcomers = type("Seen", (), {"enter": staticmethod(seen)})
    try:
        assert same(go_on(b, left), stayed)
    finally:
        core_of(b).loop.newcomers = handover
    assert len(came) == len(left.kv) == 6
    assert all(map(torch.equal, came, left.kv))
    a.reset_prefix_cache()
    a.submit(priority="BE", **SPEC).result(300)
    kept, expected = (core_of(engine).loop.prefix.store for engine in (b, a))
    assert kept._pages.keys() == expected._pages.keys()
    assert len(kept) == 3
    for name in expected._pages:
        assert all(map(torch.equal, kept.read(name), expected.read(name)))


def test_pages_that_are_there_are_not_fetched(
    pair: tuple[QLLMEngine, QLLMEngine], way: Way, stayed: Result
) -> None:
    a, b = pair
    left = leave(a, MID, priority="BE", **SPEC)
    again = leave(a, MID, priority="BE", **SPEC)
    assert same(go_on(b, left), stayed)
    whole = way.fetched
    assert same(go_on(b, again), stayed)
    assert way.fetched - whole < whole / 2
    assert (
        b.stats()["handover"]["found_tokens"] == len(again.handle.token_ids + (0,) * 149) // 64 * 64
    )


def test_a_form_and_what_is_owed_of_the_prompt_go_along(
    pair: tuple[QLLMEngine, QLLMEngine], way: Way
) -> None:
    a, b = pair
    sampling = replace(GREEDY, prompt_logprobs=2)
    spec = {"prompt": prompt_of(150, 3), "max_tokens": 6, "sampling": sampling}
    stayed = a.submit(priority="BE", **spec).result(300)
    assert stayed.prompt_logprobs is not None
    for n, wanted in enumerate((in_experts, after(45), after(75)), 1):
        left = leave(a, wanted, priority="BE", **spec)
        assert same(go_on(b, left), stayed), left.where
        assert taken(b) == (n, 0), left.where


def test_an_answer_in_a_form_moves_in_its_middle() -> None:
    form = StructuredOutputs(regex="[ab]{3}-[0-9]{12}-[xyz]{30}")
    sampling = SamplingParams(temperature=1.0, seed=3, structured_outputs=form)
    a, b = (QLLMEngine.from_pretrained("tiny", run_in="thread", **SETTINGS) for _ in range(2))
    with a, b:
        connect(a, b)
        spec = {"prompt": prompt_of(100), "max_tokens": 60, "sampling": sampling}
        stayed = a.submit(priority="BE", **spec).result(300)
        left = leave(a, lambda program, index, n: program.rows[0].lo >= 115, **spec)
        assert 10 < len(left.handle.token_ids) < 40
        assert go_on(b, left).token_ids == stayed.token_ids
        assert taken(b) == (1, 0)


# -- what is not taken


def flip(at: int, bit: int) -> Callable[[bytearray], object]:
    def change(data: bytearray) -> None:
        data[at % len(data)] ^= 1 << bit

    return change


def rewrite(change: Callable[[dict[str, Any]], object]) -> Callable[[bytearray], object]:
    """Change what a header says, and make its sum right again."""

    def rewritten(data: bytearray) -> None:
        start = parcel.header_bytes(data[:24])
        length = parcel.HEAD.unpack(bytes(data[:24]))[1]
        document = json.loads(bytes(data[24 : 24 + length]))
        change(document)
        text = json.dumps(document).encode()
        body = text.ljust(-(-(24 + len(text)) // 64) * 64 - 24, b"\0")
        head = parcel.HEAD.pack(parcel.MAGIC, len(text), 0)
        head = parcel.HEAD.pack(parcel.MAGIC, len(text), checksum_of(head, body))
        data[:start] = head + body

    return rewritten


def says(**values: Any) -> Callable[[bytearray], object]:
    return rewrite(lambda document: document["says"].update(values))


def part(name: str, at: int, value: Any) -> Callable[[bytearray], object]:
    def change(document: dict[str, Any]) -> None:
        (found,) = [p for p in document["parts"] if p[0] == name]
        found[at] = value

    return rewrite(change)


def other_identity(name: str) -> Callable[[bytearray], object]:
    return rewrite(lambda document: document["says"]["identity"].update({name: "other"}))


IDENTITY = ("model", "weights", "software", "kernels", "dtype", "exactness", "page size")
BAD: dict[str, Callable[[bytearray], object]] = {
    "nothing": lambda data: data.clear(),
    "cut in the header": lambda data: data.__delitem__(slice(100, None)),
    "cut at the end": lambda data: data.__delitem__(slice(-64, None)),
    "longer": lambda data: data.extend(bytes(64)),
    "no parcel": lambda data: data.__setitem__(slice(0, 8), b"notours!"),
    "a header of exabytes": lambda data: data.__setitem__(slice(8, 16), b"\xff" * 8),
    "magic": flip(0, 0),
    "header": flip(300, 3),
    "page": flip(5000, 3),
    "last byte": flip(-1, 7),
    **{f"another {name}": other_identity(name) for name in IDENTITY},
    "no identity": says(identity=None),
    "other tokens": says(tokens="0" * 32),
    "more computed": says(committed=10**9),
    "less computed": says(committed=-1),
    "computed": says(committed="7"),
    "true": says(committed=True),
    "a row": says(kept=[0, 1, 1]),
    "a long row": says(kept=[1, 2, 3, 4]),
    "no pages": says(pages=[]),
    "pages": says(pages=7),
    "a tensor less": rewrite(lambda document: document["parts"].pop()),
    "a tensor twice": rewrite(lambda document: document["parts"].append(document["parts"][0])),
    "an unknown dtype": part("k.0", 1, "object"),
    "another dtype": part("k.0", 1, "float16"),
    "a huge tensor": part("k.0", 2, [1, 2, 1 << 39, 32]),
    "more than all memory": part("k.0", 2, [1 << 39, 1 << 39, 1 << 39, 1 << 39]),
    "a negative size": part("k.0", 2, [1, -2, -12, 32]),
    "sizes that are no numbers": part("k.0", 2, [1, 2, 12.0, 32]),
    "many dimensions": part("k.0", 2, [1] * 9),
    "a tensor of another layer": part("k.0", 0, "k.9"),
    "a layer under other names": rewrite(
        lambda document: [p.insert(0, f"o{p.pop(0)}") for p in document["parts"] if p[0][2:] == "2"]
    ),
    "no layers": rewrite(lambda document: document.update(parts=[])),
    "no JSON object": rewrite(lambda document: document.pop("says")),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_damaged_or_foreign_is_computed(
    name: str, pair: tuple[QLLMEngine, QLLMEngine], way: Way, stayed: Result
) -> None:
    a, b = pair
    left = leave(a, MID, priority="BE", **SPEC)
    way.change = BAD[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert same(go_on(b, left), stayed)
    assert taken(b) == (0, 1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "KiB"
    assert core_of(b).handover._num_coming == 0


def test_every_flipped_bit_is_seen() -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "page.0.k": [torch.randn((1, 2, 3, 5), generator=generator).bfloat16() for _ in range(2)],
        "states": [torch.randn((3, 7), generator=generator)],
        "ids": [torch.arange(5)],
        "empty": [torch.empty((1, 0, 4))],
        "scalar": [torch.tensor(2.5)],
    }
    good = parcel.seal({"committed": 3}, tensors)

    def read(data: bytes) -> dict[str, torch.Tensor]:
        memory = mmap.mmap(-1, len(data))
        memory[:] = data
        header = parcel.read_header(memoryview(memory), len(data))
        assert header.says == {"committed": 3}
        return {name: parcel.tensor(memory, part) for name, part in header.parts.items()}

    found = read(good[:])
    assert found.keys() == tensors.keys()
    for name, pieces in tensors.items():
        whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        assert torch.equal(found[name], whole)
        assert found[name].dtype == whole.dtype
    for at in range(len(good)):
        for bit in (0, 5):
            data = bytearray(good[:])
            data[at] ^= 1 << bit
            with pytest.raises(CheckpointError):
                read(bytes(data))
    for length in range(1, len(good)):
        with pytest.raises(CheckpointError):
            read(good[:length])


@pytest.mark.parametrize("ticket", ["0" * 32, "nonsense"])
def test_an_invented_ticket_is_a_miss(
    ticket: str, pair: tuple[QLLMEngine, QLLMEngine], way: Way, stayed: Result
) -> None:
    a, b = pair
    assert same(go_on(b, leave(a, MID, priority="BE", **SPEC), ticket), stayed)
    assert taken(b) == (0, 1)


def test_the_kv_of_another_depth_is_a_miss(tmp_path: Path) -> None:
    make_model("mixtral", DTYPES["bf16"]).save_pretrained(tmp_path)

    def engine_at(depth: int | None) -> QLLMEngine:
        return in_pieces(QLLMEngine.from_model(load(tmp_path, depth=depth).model, **SETTINGS))

    with engine_at(2) as a, engine_at(None) as b, engine_at(1) as c, engine_at(2) as d:
        stayed = a.submit(priority="BE", **SPEC).result(300)
        for other, counts in ((b, (0, 1)), (c, (0, 1)), (d, (1, 0))):
            connect(a, other)
            result = go_on(other, leave(a, MID, priority="BE", **SPEC))
            assert taken(other) == counts
            assert same(result, stayed) is (other is d)


def test_the_kv_of_another_request_is_a_miss(
    pair: tuple[QLLMEngine, QLLMEngine], way: Way, stayed: Result
) -> None:
    a, b = pair
    left = leave(a, MID, priority="BE", **SPEC)
    other = leave(a, MID, priority="BE", **{**SPEC, "prompt": prompt_of(150, 2)})
    assert same(go_on(b, left, other.ticket), stayed)
    assert taken(b) == (0, 1)


def test_kv_that_came_once_may_come_again(
    pair: tuple[QLLMEngine, QLLMEngine], way: Way, stayed: Result
) -> None:
    """Where the first engine that fetched it died: twice is not twice the tokens."""
    a, b = pair
    left = leave(a, MID, priority="BE", **SPEC)
    assert same(go_on(b, left), stayed)
    assert same(go_on(b, left), stayed)
    assert taken(b) == (2, 0)


def test_kv_that_is_late_is_not_waited_for(
    pair: tuple[QLLMEngine, QLLMEngine], way: Way, stayed: Result, monkeypatch: Any
) -> None:
    a, b = pair
    monkeypatch.setattr(handed, "SLACK_NS", 1)
    left = leave(a, MID, priority="BE", **SPEC)
    begun, over = threading.Event(), threading.Event()
    is_ready = handed.HandedIngress._is_ready  # else it may be late before its fetch has begun
    monkeypatch.setattr(
        handed.HandedIngress, "_is_ready", lambda *args: begun.is_set() and is_ready(*args)
    )

    def stands_still(source: Source, allow: Any, choose: Any, wanted: Callable[[], bool]) -> Any:
        begun.set()
        wait_for(lambda: not wanted())
        over.set()
        raise CheckpointError("nobody wants it")

    core_of(b).handover._pull = stands_still
    assert same(go_on(b, left), stayed)
    assert over.wait(60)
    assert taken(b) == (0, 1)


def test_a_request_that_is_cancelled_before_its_kv_is_there(
    pair: tuple[QLLMEngine, QLLMEngine], way: Way
) -> None:
    a, b = pair
    left = leave(a, MID, priority="BE", **SPEC)
    held = threading.Event()

    def stands_still(source: Source, allow: Any, choose: Any, wanted: Callable[[], bool]) -> Any:
        held.set()
        wait_for(lambda: not wanted())
        raise CheckpointError("nobody wants it")

    core_of(b).handover._pull = stands_still
    thread = threading.Thread(target=lambda: held.wait(60) and cancel_all(b))
    thread.start()
    found = go_on(b, left)
    thread.join()
    assert found.finish_reason is FinishReason.CANCELLED
    assert found.token_ids == left.handle.token_ids


def cancel_all(engine: QLLMEngine) -> None:
    for handle in list(engine._client.handles.values()):
        handle.cancel()


# -- room


@pytest.mark.parametrize("swap", [0, 1024])
def test_where_blocks_are_short_it_waits_swapped_out_or_is_computed(swap: int) -> None:
    short = {"max_kv_tokens": 256, "swap_kv_tokens": swap, "prefix_cache": False}
    with engine_of("mixtral") as a, engine_of("mixtral", **short) as b:
        connect(a, b)
        spec = {**SPEC, "max_tokens": 40}
        stayed = a.submit(priority="BE", **spec).result(300)
        left = leave(a, MID, priority="LS", **spec)
        core, full, seen = core_of(b), threading.Event(), threading.Event()

        def watch(*_: object) -> None:
            """Once blocks are short, nothing goes on before the other request is there."""
            if core.loop.scheduler.pool.num_free < 3 and not seen.is_set():
                full.set()
                wait_for(lambda: core.loop.ingress.stop.word < 10)
                seen.set()
            for _, coming in core.handed._held.values():
                coming.work.exception(60)

        b.call(lambda: setattr(core.runner, "on_segment", watch))
        other = b.submit(prompt_of(200, 9), "BE", 50, sampling=GREEDY)
        assert full.wait(60)
        assert same(go_on(b, left), stayed)
        assert taken(b) == ((1, 0) if swap else (0, 1))
        assert other.result(300).finish_reason == "length"
        assert b.stats()["swap"]["blocks_used"] == 0


def test_a_row_longer_than_a_step_is_begun_again() -> None:
    with engine_of("mixtral") as a, engine_of("mixtral", max_step_tokens=32) as b:
        connect(a, b)
        stayed = a.submit(priority="BE", **SPEC).result(300)
        a.reset_prefix_cache()
        left = leave(a, in_experts, priority="BE", **SPEC)
        says = core_of(a).handover.outbox._left[left.ticket].says
        assert (says["committed"], says["kept"]) == (0, [0, 150, 1])
        assert same(go_on(b, left), stayed)
        assert taken(b) == (0, 1)


def test_kv_without_room_stays_behind() -> None:
    with engine_of("mixtral", handover_gib=1e-6) as a, engine_of("mixtral") as b:
        connect(a, b)
        stayed = a.submit(priority="BE", **SPEC).result(300)
        left = leave(a, MID, priority="BE", **SPEC)
        assert left.ticket == ""
        assert same(go_on(b, left), stayed)
        assert taken(b) == (0, 0)
    with engine_of("mixtral") as a, engine_of("mixtral", handover_gib=1e-6) as b:
        connect(a, b)
        assert same(go_on(b, leave(a, MID, priority="BE", **SPEC)), stayed)
        assert taken(b) == (0, 1)


def test_what_waits_is_bounded_in_bytes_and_time_and_can_be_deleted() -> None:
    now = [0.0]
    outbox = Outbox(1000, lambda: now[0])
    four_hundred = {"k": [torch.ones(100)]}
    first, second, third = (outbox.put({}, four_hundred, bytes([i] * 32)) for i in range(3))
    assert outbox.num_bytes == 800
    assert outbox.read(first) is None
    assert outbox.read(second) is not None
    assert outbox.put({}, {"k": [torch.ones(251)]}, bytes(32)) == ""
    outbox.delete(bytes([1] * 16))
    assert outbox.read(second) is None
    assert outbox.read(third) is not None
    now[0] = KEEP_S + 1
    assert outbox.read(third) is None
    assert outbox.num_bytes == 0


# -- who leaves


def test_a_prefill_engine_hands_over_after_the_first_token() -> None:
    """Those that come from another engine stay, so that no request is handed on for ever."""
    with engine_of("mixtral", role="prefill") as a, engine_of("mixtral", role="decode") as b:
        connect(a, b)
        core, given = core_of(a), list[Submission]()
        give = core.handover.give

        def seen(number: int) -> str | None:
            given.append(core.loop.live[number].submission)
            return give(number)

        core.handover.give = seen
        events = list[Event]()
        core.loop.listeners += (events.append,)
        handle = a.submit(priority="LS", **SPEC)
        wait_for(lambda: handle.has_ended)
        assert len(handle.token_ids) == 1
        error = handle._error
        assert error is not None
        assert error.startswith(MOVED)
        left = Left(handle, given[0], error.removeprefix(MOVED), "", [])
        a.call(lambda: None)  # what it does as the request ends is done
        (end,) = [event for event in events if isinstance(event, Finished)]
        assert end.error == "the request goes on elsewhere"
        assert len(left.ticket) == 32
        decoded = go_on(b, left)
        core.handover._pull = connect(a, b).pull
        stayed = go_on(a, left)
        assert len(given) == 1
        assert same(decoded, stayed)
        assert len(decoded.token_ids) == 80
        assert taken(a) == taken(b) == (1, 0)
        assert b.stats()["handover"]["taken_tokens"] == 150
        one = a.submit(prompt_of(20), "LS", 1, sampling=GREEDY).result(300)
        assert (len(one.token_ids), one.finish_reason) == (1, "length")


def test_what_cannot_leave_stays(pair: tuple[QLLMEngine, QLLMEngine], way: Way) -> None:
    a, _ = pair
    give = core_of(a).handover.give
    assert a.call(lambda: give(1 << 40)) is None
    opened = a.open("BE", prompt_of(70))
    wait_for(lambda: core_of(a).loop.live)
    assert a.call(lambda: [give(number) for number in core_of(a).loop.live]) == [None]
    assert opened.send(max_tokens=3, sampling=GREEDY).result(300).finish_reason == "length"


def test_an_engine_without_hand_over_says_so() -> None:
    with engine_of("mixtral", handover_gib=0) as engine:
        assert engine.stats()["handover"] == {}
        with pytest.raises(ConfigError, match="handover_gib"):
            core_of(engine).handed.expect(1, Source("there:1", "0" * 32))
    for name, value in (("handover_gib", -1), ("handover_gib", "much"), ("role", "router")):
        with pytest.raises(ConfigError, match=name):
            engine_config({name: value})
