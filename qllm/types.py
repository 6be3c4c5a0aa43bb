"""Types that the whole project uses: classes of requests, grains, capabilities, sampling.

All types are plain values. All internal time is `int` nanoseconds of the engine's clock, whose zero
is the start of the engine.
"""

import enum
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from json import dumps, loads
from typing import Any, NamedTuple

from qllm.errors import InvalidRequestError, check_text, shown

RequestId = int
"""Id of a request inside the engine. Later requests have larger ids."""
FrameId = int
"""Id of an accepted program and of its tensors."""

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

MAX_TIME_MS = 1_000_000_000
"""Largest time in a request or a setting: 11.6 days. Sums of thousands of such times fit 64
bits."""
MAX_TIME_S = MAX_TIME_MS // 1000
MAX_CLOCK_NS = 1 << 60
"""Largest distance of a time from the start of the engine's clock, before or after: 36 years."""
PRIORITY_LIMIT = 1 << 20
"""Limit of classes, which lie in [-PRIORITY_LIMIT, PRIORITY_LIMIT]."""


class Priority(enum.IntEnum):
    """The two named classes.

    Any other integer is a class of its own. A smaller class is served sooner.
    """

    LS = 0
    """Latency-sensitive: a person waits."""
    BE = 10
    """Best-effort: a batch job, for which no person waits."""


class Grain(enum.IntEnum):
    """Boundaries at which a program may stop, coarse to fine."""

    STEP = 0
    """The end of the program only."""
    LAYER = 1
    """Also between any two layers."""
    EXPERT = 2
    """Also between any two ops, and between any two experts inside a layer."""


class Cap(enum.Flag):
    """Capabilities of an engine that a policy may need.

    The engine refuses missing ones at start (I7).
    """

    NONE = 0
    LAYER_RANGE = enum.auto()
    YIELD_LAYER = enum.auto()
    YIELD_EXPERT = enum.auto()
    KV_SWAP = enum.auto()
    """The engine can swap KV out of the blocks of its request and back in."""


CAPABILITIES = Cap.LAYER_RANGE | Cap.YIELD_LAYER | Cap.YIELD_EXPERT
"""Capabilities of every engine."""


class Evict(enum.Enum):
    """Way in which a victim loses its KV blocks."""

    RECOMPUTE = "recompute"
    """The victim starts again from its first token."""
    SWAP = "swap"
    """The victim's KV is swapped out if there is room for it. Otherwise the victim starts again."""


class FinishReason(enum.StrEnum):
    """Reason for the end of a request. Every request ends with exactly one reason (I13)."""

    STOP = "stop"
    """An EOS id, a stop id or a stop string was produced."""
    LENGTH = "length"
    """`max_tokens` were produced."""
    CANCELLED = "cancelled"
    """The caller cancelled the request, or the engine was closed before the request's end."""
    TIMEOUT = "timeout"
    """`timeout_s` passed."""
    ERROR = "error"
    """The request failed twice, the second time alone, or the engine crashed."""


class RequestStatus(enum.StrEnum):
    """State of a request, as callers see it."""

    WAITING = "waiting"
    """The request is submitted and holds no KV."""
    RUNNING = "running"
    """The request holds KV and takes part in steps."""
    PARKED = "parked"
    """The request is in a frame that was stopped at a boundary."""
    PAUSED = "paused"
    """The caller stopped the request until it is resumed."""
    OPEN = "open"
    """The request waits for the next piece of its prompt."""
    FINISHED = "finished"


class Exactness(enum.StrEnum):
    """The promise about bits (see docs/design/exactness.md): L0 and L1 always hold."""

    ORDER = "order"
    """L1: the bits do not depend on expert order, partition or preemption."""
    BATCH_INVARIANT = "batch-invariant"
    """L2: in addition, the bits do not depend on the other requests in the batch."""


class Driver(enum.StrEnum):
    """The driver of a layer. Every benchmark result names the driver of each layer."""

    FAST = "fast"
    """Our code around the model's own submodules, for a layer whose fingerprint is known."""
    HOOKED = "hooked"
    """Hooks on the unmodified layer, which leave the layer's forward at the router."""
    DENSE = "dense"
    """A layer without experts, which runs whole."""
    AROUND = "around"
    """A layer that runs by the model's own code, with hooks if the layer has experts."""


class Slo(NamedTuple):
    """Latency targets of one request, in milliseconds; None means the policy's default."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class Frontier(NamedTuple):
    """The next work of a request: tokens [lo, hi) from `layer` on."""

    lo: int
    hi: int
    layer: int
    """First unfinished layer. A layer in which a frame is parked is unfinished."""


Message = Mapping[str, Any]
"""One chat message: at least `role` and `content`."""
Prompt = str | Sequence[Message] | Sequence[int]
"""Text, a list of chat messages, or a list of token ids."""


def _check(name: str, value: Any, ok: bool, allowed: str) -> None:
    if not ok:
        raise InvalidRequestError(
            f"{name}={shown(value)} must be {allowed}; change it in SamplingParams"
        )


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequestError(f"{name} has {count} entries; at most {most} are allowed")


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # not NaN, not infinity, and not an int that is too large for a float
    return abs(value) <= sys.float_info.max


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


MOST_DRAFTS = 16
"""Most drafted tokens of a row."""
MOST_STOPS = 256
"""Largest number of stop strings of a request."""
MOST_STOP_CHARS = 16_384
"""Most characters of all stop strings together."""
MOST_STOP_TOKENS = 1024
"""Largest number of stop token ids of a request."""
MOST_BIASES = 4096
"""Most tokens with a bias, and also most allowed token ids."""
MOST_CHOICES = 1024
"""Most answers to choose from."""
MOST_BAD_WORDS, MOST_BAD_CHARS = 256, 16_384
"""Most forbidden words of a request, and most characters of all of them together."""
MOST_MIN_TOKENS = 1 << 30
THINK, THOUGHT = "<think>", "</think>"
"""Marks before and after the reasoning in an answer."""
MOST_ANSWERS = 128
"""Most answers to one prompt."""
NUM_SEEDS = 2**63
"""Limit of seeds, which lie in [0, NUM_SEEDS)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Grammar of an answer. Exactly one of the fields defines the grammar. The names are vLLM's.

    Raises:
        InvalidRequestError: No field or several fields are given, or a field has a wrong type.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema, as a mapping or as text; True allows any JSON value."""
    regex: str | None = None
    """A regular expression for the whole answer, in the syntax of Rust's `regex`."""
    choice: tuple[str, ...] | None = None
    """The answers to choose from."""
    grammar: str | None = None
    """A context-free grammar in llguidance's variant of Lark's syntax, or in llama.cpp's GBNF."""

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        given = [name for name in _FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs names {', '.join(given) or 'nothing'}; give exactly one of "
                f"{', '.join(_FORMS)}"
            )
        kind, value = given[0], getattr(self, given[0])
        if kind == "json":
            self._check_schema()
        elif kind == "choice":
            ok = isinstance(value, tuple) and all(isinstance(x, str) and x for x in value)
            ok = ok and 0 < len(value) <= MOST_CHOICES
            allowed = f"a list of 1 to {MOST_CHOICES} non-empty strings"
            _check("structured_outputs.choice", value, ok, allowed)
        else:
            ok = isinstance(value, str) and bool(value)
            _check(f"structured_outputs.{kind}", value, ok, "a non-empty string")
        check_text(f"structured_outputs.{kind}", value)

    def _check_schema(self) -> None:
        try:
            value = loads(self.text())
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidRequestError(
                f"structured_outputs.json={shown(self.json):.80} is no JSON: {error}"
            ) from error
        ok = isinstance(value, dict) or value is True
        _check("structured_outputs.json", self.json, ok, "a JSON schema: an object, or True")

    @property
    def kind(self) -> str:
        """Name of the given field."""
        return next(name for name in _FORMS if getattr(self, name) is not None)

    def text(self) -> str:
        """Return the value of the given field: a string unchanged, other values as JSON."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else dumps(value)


_FORMS = ("json", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings of the choice of the next token. The names and defaults are those of vLLM.

    Raises:
        InvalidRequestError: A value is not finite or out of its range.
    """

    temperature: float = 1.0
    """Divisor of the logits; 0 is greedy."""
    top_k: int = 0
    """Number of most likely tokens to keep; 0 keeps all."""
    top_p: float = 1.0
    """Probability that the smallest set of kept tokens must reach; 1 keeps all."""
    min_p: float = 0.0
    """Fraction of the highest probability below which tokens are dropped."""
    repetition_penalty: float = 1.0
    """Number that divides positive and multiplies negative logits of earlier tokens. Tokens of the
    prompt count too."""
    presence_penalty: float = 0.0
    """Number that is subtracted once from the logits of tokens already produced."""
    frequency_penalty: float = 0.0
    """Number that is subtracted per occurrence from the logits of tokens already produced."""
    seed: int | None = None
    """Key of the request's own random numbers; None draws one at submission."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer and are not part of it. A single string is also accepted."""
    stop_token_ids: tuple[int, ...] = ()
    """Further ids that end the answer."""
    ignore_eos: bool = False
    """True continues to `max_tokens` after an EOS id."""
    logprobs: int | None = None
    """Number of alternatives (0 to 20) to report with the chosen token's log-probability."""
    prompt_logprobs: int | None = None
    """Number of alternatives (0 to 20) to report with each prompt token's log-probability."""
    confidence: bool = False
    """True reports each token's confidence: the largest probability of its distribution before any
    sampling setting. It costs less than `logprobs`, because no logits are kept for it."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Numbers that are added to the logits of these token ids."""
    structured_outputs: StructuredOutputs | None = None
    """Grammar of the answer. It holds from the first token, or after the reasoning if the prompt
    ends with `<think>`. EOS ends the answer."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only ids that may be produced. They must include the ids that end the answer."""
    bad_words: tuple[str, ...] = ()
    """Words that the answer may not contain. Each word is tokenised alone."""
    min_tokens: int = 0
    """Least number of tokens before an id that ends the answer, if another token is possible. Stop
    strings are ignored in them."""

    thinking_token_budget: int | None = None
    """Most tokens after `<think>` before `</think>` is forced; None sets no limit."""
    draft_tokens: int | None = None
    """Most drafted tokens that a step verifies, 0 to 16. None is the engine's `draft_tokens`. A
    request can only lower that number. Drafts change no token."""
    prediction: str | tuple[int, ...] = ()
    """Text or tokens that the answer may repeat in part, such as the file to edit. Drafts that look
    up tokens (`draft="lookup"`) use it; it changes no token."""
    include_stop_str_in_output: bool = False
    """True adds the stop string that ended the answer to the answer."""
    skip_special_tokens: bool = True
    """True leaves out the text of special tokens. The token that ends the answer never has text."""
    max_tokens: int | None = None
    """Most tokens to produce; None uses `submit(max_tokens=)`."""
    n: int = 1
    """Number of answers to each prompt of `generate` and `chat`; answer i has seed `seed + i`."""

    def __post_init__(self) -> None:
        t, s = self.temperature, self.seed
        _check("temperature", t, _is_number(t) and 0 <= t <= 100, "a number in [0, 100]")
        ok = s is None or (_is_int(s) and 0 <= s < NUM_SEEDS)
        _check("seed", s, ok, "None or in [0, 2**63)")
        is_usual = all(
            type(value := getattr(self, name)) is type(usual) and value == usual
            for name, usual in _USUAL
        )
        if not (is_usual and isinstance(self.ignore_eos, bool)):
            self._check_rest()

    def _check_rest(self) -> None:
        """Check the fields whose values differ from the defaults."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "prediction"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        k = self.top_k
        _check("top_k", k, _is_int(k) and k >= 0, "an integer >= 0")
        _check("top_p", self.top_p, _is_number(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]")
        _check("min_p", self.min_p, _is_number(self.min_p) and 0 <= self.min_p <= 1, "in [0, 1]")
        r = self.repetition_penalty
        _check("repetition_penalty", r, _is_number(r) and 0 < r <= 10, "a number in (0, 10]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, _is_number(value) and -2 <= value <= 2, "a number in [-2, 2]")
        ok = isinstance(self.stop, tuple) and all(isinstance(x, str) and x for x in self.stop)
        _check("stop", self.stop, ok, "a non-empty string or a list of them")
        check_text("stop", self.stop)
        if len(self.stop) > MOST_STOPS or sum(map(len, self.stop)) > MOST_STOP_CHARS:
            raise InvalidRequestError(
                f"stop has {len(self.stop)} strings of {sum(map(len, self.stop))} characters in "
                f"all; at most {MOST_STOPS} and {MOST_STOP_CHARS} are allowed, because every token "
                "is searched for each"
            )
        ids = self.stop_token_ids
        ok = isinstance(ids, tuple) and all(_is_int(x) and x >= 0 for x in ids)
        _check("stop_token_ids", ids, ok, "a list of token ids >= 0")
        _check_count("stop_token_ids", len(ids), MOST_STOP_TOKENS)
        flags = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "confidence")
        for name in flags:
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "a bool")
        for name in ("logprobs", "prompt_logprobs"):
            n = getattr(self, name)
            _check(name, n, n is None or (_is_int(n) and 0 <= n <= 20), "None or in [0, 20]")
        bias = self.logit_bias
        ok = isinstance(bias, Mapping) and all(
            _is_int(k) and k >= 0 and _is_number(v) for k, v in bias.items()
        )
        _check("logit_bias", bias, ok, "a mapping of token id to a finite number")
        _check_count("logit_bias", len(bias), MOST_BIASES)
        self._check_drafts()
        self._check_limits()

    def _check_drafts(self) -> None:
        """Check the fields that only drafts use."""
        most, given = self.draft_tokens, self.prediction
        ok = most is None or (_is_int(most) and 0 <= most <= MOST_DRAFTS)
        _check("draft_tokens", most, ok, f"None or an integer in [0, {MOST_DRAFTS}]")
        is_ids = isinstance(given, tuple) and all(_is_int(x) and x >= 0 for x in given)
        _check("prediction", given, isinstance(given, str) or is_ids, "a text or token ids >= 0")
        if isinstance(given, str):
            check_text("prediction", given)

    def _check_limits(self) -> None:
        """Check the fields that forbid tokens."""
        form = self.structured_outputs
        if isinstance(form, Mapping):  # a mapping that was read from a file
            object.__setattr__(self, "structured_outputs", StructuredOutputs(**form))
        elif form is not None and not isinstance(form, StructuredOutputs):
            _check("structured_outputs", form, False, "StructuredOutputs, or None")
        ids = self.allowed_token_ids
        ok = ids is None or (
            isinstance(ids, tuple) and bool(ids) and all(_is_int(x) and x >= 0 for x in ids)
        )
        _check("allowed_token_ids", ids, ok, "None or a non-empty list of token ids >= 0")
        _check_count("allowed_token_ids", len(ids or ()), MOST_BIASES)
        words = self.bad_words
        ok = isinstance(words, tuple) and all(isinstance(x, str) and x.strip() for x in words)
        _check("bad_words", words, ok, "a list of words, none of them blank")
        check_text("bad_words", words)
        _check_count("bad_words", len(words), MOST_BAD_WORDS)
        chars = sum(map(len, words))
        _check("bad_words", words, chars <= MOST_BAD_CHARS, f"{MOST_BAD_CHARS} characters in all")
        least, budget = self.min_tokens, self.thinking_token_budget
        for name, value in ("min_tokens", least), ("thinking_token_budget", budget or 0):
            ok = _is_int(value) and 0 <= value <= MOST_MIN_TOKENS
            _check(name, value, ok, f"an integer in [0, {MOST_MIN_TOKENS}]")
        most = self.max_tokens
        _check("max_tokens", most, most is None or (_is_int(most) and most > 0), "an integer >= 1")
        ok = _is_int(self.n) and 1 <= self.n <= MOST_ANSWERS
        _check("n", self.n, ok, f"an integer in [1, {MOST_ANSWERS}]")
        limits = {"structured_outputs": form, "allowed_token_ids": ids, "bad_words": words}
        given = [name for name, value in limits.items() if value]
        if len(given) > 1:
            raise InvalidRequestError(
                f"{given[0]} and {given[1]} together may leave no token; give one of them"
            )
        if form is not None and self.ignore_eos:
            raise InvalidRequestError(
                "ignore_eos and structured_outputs exclude each other: EOS ends what has its form"
            )

    @property
    def prediction_ids(self) -> tuple[int, ...]:
        """Tokens of the prediction; none while the prediction is a text."""
        return self.prediction if isinstance(self.prediction, tuple) else ()

    @property
    def limits_tokens(self) -> bool:
        """True if some tokens are forbidden, which needs a sampler on the host."""
        limits = (self.structured_outputs, self.allowed_token_ids, self.bad_words, self.min_tokens)
        return any(limits) or self.thinking_token_budget is not None

    @property
    def has_penalties(self) -> bool:
        """True if tokens change their own probability once they have occurred."""
        changed = self.repetition_penalty != 1 or self.frequency_penalty != 0
        return changed or self.presence_penalty != 0

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature == 0


_USUAL = [  # fields whose default values need no check
    (x.name, {} if x.name == "logit_bias" else x.default)
    for x in fields(SamplingParams)
    if x.name not in ("temperature", "seed", "ignore_eos")
]


class Logprobs(NamedTuple):
    """Log-probabilities at one position, of the distribution before any sampling setting."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """Pairs (token id, log-probability), most likely first."""


class PromptLogprobs(NamedTuple):
    """Log-probabilities of a prompt's tokens except the first, in order, as fp32."""

    num_top: int
    """Number of alternatives per token."""
    chosen: "array[float]"
    """Log-probabilities of the prompt's own tokens."""
    top: "array[float]"
    """Log-probabilities of the alternatives, most likely first: `num_top` per token."""
    top_ids: "array[int]"
    """Token ids of the alternatives."""

    @classmethod
    def empty(cls, num_top: int) -> "PromptLogprobs":
        """Make a value without tokens."""
        return cls(num_top, array("f"), array("f"), array("I"))

    def add(self, token: Logprobs) -> None:
        """Append one token, which has `num_top` alternatives."""
        self.chosen.append(token.chosen)
        self.top.extend(value for _, value in token.top)
        self.top_ids.extend(i for i, _ in token.top)

    def part(self, start: int, stop: int) -> "PromptLogprobs":
        """Return the log-probabilities of tokens [start, stop)."""
        k = self.num_top
        tops = slice(start * k, stop * k)
        return PromptLogprobs(k, self.chosen[start:stop], self.top[tops], self.top_ids[tops])

    def extend(self, part: "PromptLogprobs") -> None:
        """Append the tokens of `part`, which have `num_top` alternatives too."""
        self.chosen.extend(part.chosen)
        self.top.extend(part.top)
        self.top_ids.extend(part.top_ids)

    def tokens(self) -> Iterator[Logprobs]:
        """Yield one `Logprobs` per token."""
        k = self.num_top
        for i, chosen in enumerate(self.chosen):
            tops = slice(i * k, i * k + k)
            yield Logprobs(chosen, tuple(zip(self.top_ids[tops], self.top[tops], strict=True)))


class Sampled(NamedTuple):
    """One token that a runner produced."""

    request_id: RequestId
    token_id: int
    logprobs: Logprobs | None = None
    prompt: PromptLogprobs | None = None
    """Log-probabilities of the prompt, with the first token of a request that asked for them."""
    error: str | None = None
    """Reason why there is no token. The error ends this request, and no other request."""
    confidence: float | None = None
    """Largest probability of the token's distribution, if the request asked for it."""
