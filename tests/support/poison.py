"""Requests with extremes in every field, and innocent ones beside them, on every way in.

Each `..._case` makes one poison request from a random generator; each `through_...` sends some
beside innocent requests and counts what became of those; `tests/long/poison.py` sends 1,000.
"""

import json
import random
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx
import numpy as np

from qllm import QLLMEngine, SamplingParams
from qllm.errors import InvalidRequestError, RequestFailedError
from qllm.frontend.handle import Handle
from qllm.ingress import Submission, codec, layout
from qllm.ingress.layout import NUMBER_BITS
from qllm.types import NS_PER_MS, FinishReason, Priority, Slo
from tests.support.ring_world import SHIPPED, world
from tests.support.serving import Serving

LS, BE = Priority.LS, Priority.BE
INF, NAN = float("inf"), float("nan")
POWERS = [2**n + d for n in (7, 8, 15, 16, 20, 31, 32, 53, 62, 63, 64) for d in (-1, 0, 1)]
INTS: list[Any] = [0, 1, -1, *POWERS, *(-n for n in POWERS), 10**19, 10**30, 10**400, 10**5000]
FLOATS: list[Any] = [-0.0, 0.5, 5e-324, -5e-324, 1e-300, 1e9, 1e9 + 1, 1e13, 1e300, 1e308, -1e308]
FLOATS += [INF, -INF, NAN]
TEXTS: list[Any] = [
    "",
    "\0",
    "x" * 100_000,
    "\ud800",
    "a\udfffb",
    "\U0010ffff",
    "\u202e",
    "{}",
    "%s%n",
]
OTHERS: list[Any] = [None, True, False, b"x", [], {}, [[[[]]]], {"a": {"b": {}}}, object()]
ANY = [*INTS, *FLOATS, *TEXTS, *OTHERS]
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
PROMPTS = ["def f(x):", "import json, sys\n" * 8, "class A:\n"]
"""Prompts of the innocent requests; the last is LS."""
LENGTH = 40


class Outcome(NamedTuple):
    """What became of a number of poison requests and of the innocent ones beside them."""

    poison: int
    """Poison requests sent."""
    refused: int
    """How many were refused or ended in `error` with a message."""
    raw: int
    """How many were answered with an error that is not one of ours."""
    innocent: int
    """Requests beside them."""
    lost: int
    """How many innocent requests were not finished."""
    changed: int
    """How many had other tokens than without poison."""

    def plus(self, other: "Outcome") -> "Outcome":
        """Both together."""
        return Outcome(*map(sum, zip(self, other, strict=True)))


NOTHING = Outcome(0, 0, 0, 0, 0, 0)


def deep(depth: int) -> Any:
    """A list in a list in a list."""
    nested: Any = []
    for _ in range(depth):
        nested = [nested]
    return nested


# -- through Python

OF_SAMPLING = sorted(SamplingParams.__dataclass_fields__)
OF_SUBMIT = ["prompt", "priority", "max_tokens", "stop", "ttft_ms", "tpot_ms", "timeout_s"]
OF_SUBMIT += ["request_id", "slo"]


def value_of(rng: random.Random, name: str) -> Any:
    """An extreme for a field: of its type or of any other, alone or in what holds several."""
    value = rng.choice([rng.choice(INTS), rng.choice(FLOATS), rng.choice(TEXTS), rng.choice(ANY)])
    if name == "logit_bias":
        key = rng.choice([0, 5, rng.choice(INTS), rng.choice(ANY[:60])])
        return {key if key.__hash__ else 0: value}
    if name in ("stop", "stop_token_ids", "prompt") and rng.random() < 0.7:
        return [value] * rng.choice([1, 1, 9, 300])
    if name == "prompt" and rng.random() < 0.3:
        return [{"role": value, "content": rng.choice(ANY)}]
    return value


def submit_poison(engine: QLLMEngine, rng: random.Random) -> Handle:
    """Submit a request in which one field, or two, are extremes."""
    values: dict[str, Any] = {
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "priority": rng.choice([LS, BE]),
    }
    sampling: dict[str, Any] = {"temperature": rng.choice([0, 1]), "seed": 1}
    slo: dict[str, Any] = {}
    for name in rng.sample([*OF_SAMPLING, *OF_SUBMIT, "ttft_ms", "tpot_ms"], rng.choice([1, 1, 2])):
        value = value_of(rng, name)
        target = slo if name in ("ttft_ms", "tpot_ms") else values
        (sampling if name in OF_SAMPLING and name != "stop" else target)[name] = value
    if slo:
        values["slo"] = Slo(**slo)
    values["sampling"] = SamplingParams(**sampling)
    return engine.submit(values.pop("prompt"), **values)


def through_python(engine: QLLMEngine, count: int, seed: int) -> Outcome:
    """Send poison through `submit`, in between innocent requests."""
    rng = random.Random(seed)
    wanted = [handle.result(300).token_ids for handle in innocents(engine)]
    found = NOTHING
    while found.poison < count:
        beside = innocents(engine)
        tried = [attempt(engine, rng) for _ in range(min(20, count - found.poison))]
        refused = raw = 0
        for handle, is_ours in tried:
            raw += not is_ours
            refused += handle is None or not ended_well(handle)
        got = [tokens_of(handle) for handle in beside]
        lost = sum(tokens is None for tokens in got)
        changed = sum(a not in (None, b) for a, b in zip(got, wanted, strict=True))
        found = found.plus(Outcome(len(tried), refused, raw, len(beside), lost, changed))
    return found


def innocents(engine: QLLMEngine) -> list[Handle]:
    """The requests that nothing may touch."""
    return [
        engine.submit(text, LS if text is PROMPTS[-1] else BE, LENGTH, sampling=GREEDY)
        for text in PROMPTS
    ]


def attempt(engine: QLLMEngine, rng: random.Random) -> tuple[Handle | None, bool]:
    """A poison request if it was taken, and whether it was refused by an error of ours if not."""
    try:
        return submit_poison(engine, rng), True
    except InvalidRequestError as error:
        return None, len(str(error)) < 2000
    except Exception:  # noqa: BLE001 - a raw error of Python is what is looked for
        return None, False


def ended_well(handle: Handle) -> bool:
    try:
        handle.result(300)
    except RequestFailedError:
        return False
    return True


def tokens_of(handle: Handle) -> tuple[int, ...] | None:
    """The tokens of a request; None if it was not served to its end."""
    try:
        result = handle.result(300)
    except (RequestFailedError, TimeoutError):
        return None
    return result.token_ids if result.finish_reason is FinishReason.LENGTH else None


# -- over HTTP

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def f(", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}
COMMON = ["model", "n", "seed", "stream", "stop", "temperature", "top_p", "frequency_penalty"]
COMMON += ["presence_penalty", "logit_bias", "service_tier", "top_k", "min_p", "max_tokens"]
COMMON += ["repetition_penalty", "stop_token_ids", "min_tokens", "priority", "slo", "metadata"]
COMMON += ["user", "logprobs", "stream_options"]
FIELDS = {
    "/v1/completions": [*COMMON, "prompt", "echo", "suffix", "best_of"],
    "/v1/chat/completions": [*COMMON, "messages", "top_logprobs", "tools", "chat_template_kwargs"],
}


def json_value(rng: random.Random, name: str) -> Any:
    """An extreme that JSON, as Python writes it, can hold."""
    choices = [x for x in ANY if not isinstance(x, bytes) and type(x) is not object]
    value = rng.choice([rng.choice(INTS[:-1]), rng.choice(FLOATS), rng.choice(choices)])
    if value == 10**5000:
        value = 10**400
    if name == "slo":
        return {rng.choice(["ttft_ms", "tpot_ms"]): value}
    if name == "logit_bias":
        return {str(rng.choice(INTS[:-1])): value}
    if name == "messages":
        return [{"role": rng.choice(["user", value]), "content": value}]
    if name in ("stop", "stop_token_ids", "prompt") and rng.random() < 0.5:
        return [value]
    return deep(rng.choice([5, 500])) if rng.random() < 0.05 else value


def body_case(rng: random.Random) -> tuple[str, bytes]:
    """A path and the body of a request with one extreme or two."""
    path = rng.choice(sorted(BODIES))
    body = dict(BODIES[path])
    for name in rng.sample([*FIELDS[path], "slo", "slo"], rng.choice([1, 1, 2])):
        body[name] = json_value(rng, name)
    return path, json.dumps(body, ensure_ascii=rng.random() < 0.8).encode("utf-8", "surrogatepass")


def over_http(served: Serving, engine: QLLMEngine, count: int, seed: int) -> Outcome:
    """Send poison over HTTP, in between innocent requests."""
    rng = random.Random(seed)
    wanted = [handle.result(300).token_ids for handle in innocents(engine)]
    found = NOTHING
    with httpx.Client(base_url=served.url, timeout=60) as client:
        while found.poison < count:
            beside = innocents(engine)
            cases = [body_case(rng) for _ in range(min(20, count - found.poison) - 1)]
            late = {**BODIES["/v1/completions"], "slo": {"ttft_ms": 1e308}}
            cases.insert(0, ("/v1/completions", json.dumps(late).encode()))
            codes = Counter(
                client.post(
                    path, content=data, headers={"content-type": "application/json"}
                ).status_code
                for path, data in cases
            )
            got = [tokens_of(handle) for handle in beside]
            raw = sum(n for code, n in codes.items() if code >= 500)
            lost = sum(tokens is None for tokens in got)
            changed = sum(a not in (None, b) for a, b in zip(got, wanted, strict=True))
            refused = sum(n for code, n in codes.items() if code >= 400)
            found = found.plus(Outcome(len(cases), refused, raw, len(beside), lost, changed))
    return found


# -- as records in rings

BITS = [bytes(8), b"\xff" * 8, b"\xff" * 7 + b"\x7f", bytes(7) + b"\x80", b"\x01" + bytes(7)]
BITS += [struct.pack("<d", x) for x in FLOATS] + [struct.pack("<q", n) for n in POWERS if n < 2**63]
LENGTHS = {"num_stop_ids", "num_stop_token_ids", "num_logit_bias", "num_prompt", "num_stops"}
LENGTHS |= {"num_name_bytes", "num_stop_bytes", "num_output"}
"""Fields whose extremes make a record that is not whole: its writer is cut off."""
OF_RECORD = [n for n in layout.REQUEST.names or () if n not in LENGTHS | {"header", "request_id"}]


def record_case(rng: random.Random, request_id: int) -> tuple[str, int, bytes]:
    """A ring, flags and body: a whole request, in which one number or two are extremes."""
    item = Submission(
        request_id=request_id,
        name="x",
        priority=rng.choice([LS, BE]),
        token_ids=tuple(range(rng.randint(1, 40))),
        sampling=SamplingParams(seed=1),
        stop_ids=frozenset({3}),
        max_tokens=rng.randint(1, 5),
        slo=Slo(),
        arrival_ns=0,
        deadline_ns=None,
    )
    flags, body = codec.encode_submission(item)
    record = np.frombuffer(bytes(16) + body, layout.REQUEST, 1).copy()
    for name in rng.sample([*OF_RECORD, "slo_ttft_ms", "slo_tpot_ms"], rng.choice([1, 1, 2])):
        field, _ = layout.REQUEST.fields[name][:2]  # type: ignore[index]
        record[name] = np.frombuffer(rng.choice(BITS)[: field.itemsize], field)[0]
    fixed = record.tobytes()[16:]
    flags = rng.choice([flags, flags, layout.HAS_DEADLINE, layout.IGNORE_EOS])
    return rng.choice(["ls", "be"]), flags, fixed + body[len(fixed) :]


def in_rings(native: bool, count: int, seed: int) -> Outcome:
    """Write poison records into the rings of a front end that has innocent requests too."""
    rng = random.Random(seed)
    policy = SHIPPED[seed % len(SHIPPED)]
    requests = [(LS, 30, 5), (BE, 200, 20), (BE, 7, 60)]
    settings: dict[str, Any] = {"capacity": 24, "max_front_ends": 2} if native else {}
    with world(policy, False, num_front_ends=2) as w:
        ids = [w.submit(n, *x, front_end=f) for f in (0, 1) for n, x in enumerate(requests)]
        w.run(len(ids))
        wanted = {i: w.tokens(i) for i in ids}
    with world(policy, native, num_front_ends=2, **settings) as w:
        for f in (0, 1):
            for n, request in enumerate(requests):
                w.submit(n, *request, front_end=f)
        bad = [1 << NUMBER_BITS | 100 + n for n in range(count)]

        def write(request_id: int, ring: str, flags: int, body: bytes) -> None:
            front_end = w.front_ends[1]
            if not getattr(front_end, ring).write(layout.REQUEST_KIND, flags, body):
                again = w.clock.at_ns + NS_PER_MS
                w.at(again, lambda: write(request_id, ring, flags, body))
            front_end._ring()

        for request_id in bad:
            case = record_case(rng, request_id)
            at_ns = rng.randrange(200 * NS_PER_MS)
            w.at(at_ns, lambda i=request_id, case=case: write(i, *case))
        for _ in range(200 * count + 4000):
            w.step()
            if len(w.ends()) == len(bad) + len(ids) or w.broken:
                break
        reasons = w.reasons()
        done = [i for i in wanted if reasons.get(i) is FinishReason.LENGTH]
        changed = sum(w.tokens(i) != wanted[i] for i in done)
        refused = sum(reasons.get(i) is FinishReason.ERROR for i in bad)
        raw = sum(i not in reasons for i in bad) + len(w.broken)
        return Outcome(count, refused, raw, len(ids), len(ids) - len(done), changed)


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """All of them."""
    found = NOTHING
    for outcome in outcomes:
        found = found.plus(outcome)
    return found
