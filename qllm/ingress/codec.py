"""Conversion between values and the bodies of records, without pickle."""

import json
import math
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from qllm.ingress import layout
from qllm.ingress.admission import wrong_number
from qllm.ingress.layout import body_struct
from qllm.ingress.protocol import Cancel, Revision, Submission, Update
from qllm.ingress.ring import Record
from qllm.record.metrics import RequestMetrics, token_latencies
from qllm.types import (
    MAX_TIME_S,
    NS_PER_MS,
    PRIORITY_LIMIT,
    FinishReason,
    Logprobs,
    Priority,
    PromptLogprobs,
    RequestId,
    Sampled,
    SamplingParams,
    Slo,
)

_REQUEST, _CANCEL = body_struct(layout.REQUEST), body_struct(layout.CANCEL)
_UPDATE, _REVISE = body_struct(layout.UPDATE), body_struct(layout.REVISE)
_TOKEN, _FINISH = body_struct(layout.TOKEN), body_struct(layout.FINISH)
_PROMPT, _CACHED = body_struct(layout.PROMPT), struct.Struct("<I")
_LENGTH, _PIECES, _DRAFTS = _CACHED, struct.Struct("<dII"), struct.Struct("<II")
_CONFIDENCE = struct.Struct("<d")
_CACHE = struct.Struct(f"<{layout.SALT_BYTES}sd")
_LIMITS: tuple[str, ...] = ("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens")
_LIMITS += ("include_stop_str_in_output", "skip_special_tokens", "thinking_token_budget")
_LIMITS += ("draft_tokens", "prediction", "confidence")
_FIELDS = [name for name in layout.REQUEST.names or () if name != "header"]
_SAMPLING: tuple[str, ...] = ("seed", "top_k", "temperature", "top_p", "min_p")
_SAMPLING += ("repetition_penalty", "presence_penalty", "frequency_penalty")
_REASONS = tuple(FinishReason(reason) for reason in layout.REASONS)
MAX_TEXT_BYTES = 16_384
"""Largest size of an error in a finish, in bytes."""
PART_BYTES = 32_768
"""Approximate bytes of prompt log-probabilities in one record, far below a ring's size."""


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _optional(value: float) -> float | None:
    return None if math.isnan(value) else value


class _Arrays:
    """A reader of the arrays after the fixed fields, one after the other."""

    def __init__(self, body: bytes, offset: int) -> None:
        self._body, self._at = body, offset

    def take(self, dtype: str, count: int) -> Any:
        if not count:
            return []
        array = np.frombuffer(self._body, dtype, count, self._at)
        self._at += array.nbytes
        return array.tolist()

    def take_text(self, count: int) -> str:
        self._at += count
        return _text(self._body[self._at - count : self._at])


def encode_submission(item: Submission) -> tuple[int, bytes]:
    """Return the flags and the body of a request."""
    sampling, name = item.sampling, _utf8(item.name)
    stops = [_utf8(stop) for stop in sampling.stop]
    flags = layout.IGNORE_EOS * sampling.ignore_eos | layout.IS_OPEN * item.is_open
    if item.deadline_ns is not None:
        flags |= layout.HAS_DEADLINE
    cache = b""
    if item.cache_salt or item.cache_ttl_s is not None:
        flags |= layout.HAS_CACHE
        cache = _CACHE.pack(item.cache_salt, _float(item.cache_ttl_s))
    if _has_limits(sampling):
        flags |= layout.HAS_LIMITS
    fixed = _REQUEST.pack(
        item.request_id,
        item.arrival_ns,
        item.deadline_ns or 0,
        sampling.seed,
        min(sampling.top_k, 2**63 - 1),
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        _float(item.slo.ttft_ms),
        _float(item.slo.tpot_ms),
        item.priority,
        -1 if sampling.logprobs is None else sampling.logprobs,
        item.max_tokens,
        len(item.stop_ids),
        len(sampling.stop_token_ids),
        len(sampling.logit_bias),
        item.num_prompt_tokens,
        len(stops),
        len(name),
        sum(len(stop) for stop in stops),
        item.num_output_tokens,
        0 if sampling.prompt_logprobs is None else sampling.prompt_logprobs + 1,
    )
    arrays = (
        _array(sorted(item.stop_ids), "<i8"),
        _array(sampling.stop_token_ids, "<i8"),
        _array(list(sampling.logit_bias.values()), "<f8"),
        _array(list(sampling.logit_bias), "<u4"),
        _array(item.token_ids, "<u4"),
        _array([len(stop) for stop in stops], "<u4"),
    )
    return flags, b"".join((fixed, *arrays, name, *stops, cache, _encode_limits(sampling)))


def _array(values: Sequence[float], dtype: str) -> bytes:
    return np.array(values, dtype).tobytes() if values else b""


def _has_limits(sampling: SamplingParams) -> bool:
    """Return True if one of `_LIMITS`, which few requests set, is not at its default."""
    of_text = sampling.include_stop_str_in_output or not sampling.skip_special_tokens
    of_drafts = sampling.draft_tokens is not None or bool(sampling.prediction)
    return sampling.limits_tokens or of_text or of_drafts or sampling.confidence


def _encode_limits(sampling: SamplingParams) -> bytes:
    if not _has_limits(sampling):
        return b""
    values = {name: getattr(sampling, name) for name in _LIMITS}
    form = sampling.structured_outputs
    values["structured_outputs"] = None if form is None else asdict(form)
    data = json.dumps(values).encode()
    return _LENGTH.pack(len(data)) + data


def _decode_limits(body: bytes, at: int) -> dict[str, Any]:
    """Return the settings that forbid tokens, as keywords of SamplingParams.

    Raises:
        ValueError: The bytes are no JSON, or incomplete.
    """
    if len(body) < at + _LENGTH.size:
        raise ValueError("the limits of a request lie behind its record")
    (length,) = _LENGTH.unpack_from(body, at)
    at += _LENGTH.size
    found = json.loads(body[at : at + length])
    if not isinstance(found, dict) or not found.keys() <= set(_LIMITS):
        raise ValueError("the limits of a request have another form")
    return found


_NONE = SamplingParams(seed=0)
"""Placeholder for invalid settings of a request."""


def decode_submission(record: Record) -> Submission:
    """Decode the result of `encode_submission`.

    Returns:
        The request. Its field `wrong` names a value that our front ends never write, if there is
            one.

    Raises:
        ValueError: The record is shorter than its lengths require.
    """
    values = dict(zip(_FIELDS, _REQUEST.unpack_from(record.body), strict=True))
    num_cache = layout.CACHE_BYTES if record.flags & layout.HAS_CACHE else 0
    need = _check_length(values, len(record.body) - num_cache)
    salt, ttl_s = _CACHE.unpack_from(record.body, need) if num_cache else (b"", math.nan)
    arrays = _Arrays(record.body, _REQUEST.size)
    stop_ids = frozenset(arrays.take("<i8", values["num_stop_ids"]))
    stop_token_ids = tuple(arrays.take("<i8", values["num_stop_token_ids"]))
    weights = arrays.take("<f8", values["num_logit_bias"])
    bias = dict(zip(arrays.take("<u4", values["num_logit_bias"]), weights, strict=True))
    token_ids = tuple(arrays.take("<u4", values["num_prompt"] + values["num_output"]))
    lengths = arrays.take("<u4", values["num_stops"])
    priority, arrival_ns = values["priority"], values["arrival_ns"]
    deadline_ns = values["deadline_ns"] if record.flags & layout.HAS_DEADLINE else None
    slo = Slo(_optional(values["slo_ttft_ms"]), _optional(values["slo_tpot_ms"]))
    wrong = wrong_number(priority, arrival_ns, deadline_ns, slo)
    if num_cache and not math.isnan(ttl_s) and not 0 <= ttl_s <= MAX_TIME_S:
        wrong = wrong or f"cache_ttl_s={ttl_s} must be seconds in [0, {MAX_TIME_S}]"
    name, sampling = "", _NONE
    try:
        if values["top_k"] >> 63:
            raise ValueError(f"top_k={values['top_k']} must be in [0, 2**63)")
        name = arrays.take_text(values["num_name_bytes"])
        limits = {}
        if record.flags & layout.HAS_LIMITS:
            limits = _decode_limits(record.body, need + num_cache)
        sampling = SamplingParams(
            **{name: values[name] for name in _SAMPLING},
            **limits,
            stop=tuple(arrays.take_text(length) for length in lengths),
            stop_token_ids=stop_token_ids,
            ignore_eos=bool(record.flags & layout.IGNORE_EOS),
            logprobs=None if values["logprobs"] < 0 else values["logprobs"],
            prompt_logprobs=values["prompt_logprobs"] - 1 if values["prompt_logprobs"] else None,
            logit_bias=bias,
        )
    except (TypeError, ValueError) as error:  # bytes are no text, or a setting is out of range
        wrong = wrong or str(error)
    return Submission(
        request_id=values["request_id"],
        name=name,
        priority=priority if wrong is None else Priority.BE,
        token_ids=token_ids,
        sampling=sampling,
        stop_ids=stop_ids,
        max_tokens=values["max_tokens"],
        slo=slo if wrong is None else Slo(),
        arrival_ns=arrival_ns if wrong is None else 0,
        deadline_ns=deadline_ns if wrong is None else None,
        num_output_tokens=values["num_output"],
        cache_salt=salt if any(salt) else b"",
        cache_ttl_s=_optional(ttl_s) if wrong is None else None,
        is_open=bool(record.flags & layout.IS_OPEN),
        wrong=wrong,
    )


def _check_length(values: Mapping[str, int], num_bytes: int) -> int:
    """Return the number of bytes up to the end of a request's arrays, inside its record.

    Raises:
        ValueError: The arrays exceed the record.
    """
    eights = values["num_stop_ids"] + values["num_stop_token_ids"] + values["num_logit_bias"]
    fours = values["num_logit_bias"] + values["num_prompt"] + values["num_output"]
    text = values["num_name_bytes"] + values["num_stop_bytes"]
    need = _REQUEST.size + 8 * eights + 4 * (fours + values["num_stops"]) + text
    if need > num_bytes:
        raise ValueError(f"a request of {need} bytes in a record of {num_bytes}")
    return need


def encode_revision(item: Revision) -> tuple[int, bytes]:
    """Return the flags and the body of a revision."""
    flags, body = encode_submission(item.rest)
    return flags, _REVISE.pack(item.keep, 0) + body


def decode_revision(record: Record) -> Revision:
    """Decode the result of `encode_revision`.

    Raises:
        ValueError: The record is shorter than its lengths require.
    """
    keep, _ = _REVISE.unpack_from(record.body)
    return Revision(keep, decode_submission(record._replace(body=record.body[_REVISE.size :])))


def encode_cancel(item: Cancel) -> bytes:
    """Return the body of a cancel record."""
    return _CANCEL.pack(item.request_id, _REASONS.index(item.reason), 0)


def decode_cancel(record: Record) -> Cancel:
    """Decode the result of `encode_cancel`."""
    request_id, reason, _ = _CANCEL.unpack_from(record.body)
    return Cancel(request_id, _REASONS[reason])


def encode_update(item: Update) -> bytes:
    """Return the body of an update record."""
    what = layout.SETS_PRIORITY * (item.priority is not None)
    if item.paused is not None:
        what |= layout.PAUSES if item.paused else layout.RESUMES
    return _UPDATE.pack(item.request_id, item.priority or 0, what)


def decode_update(record: Record) -> Update:
    """Decode the result of `encode_update`.

    Raises:
        ValueError: The record holds a value our front ends never write.
    """
    request_id, priority, what = _UPDATE.unpack_from(record.body)
    turns = what & ~layout.SETS_PRIORITY
    if turns not in (0, layout.PAUSES, layout.RESUMES) or abs(priority) > PRIORITY_LIMIT:
        raise ValueError(f"an update of {what:#x} to class {priority}")
    paused = {0: None, layout.PAUSES: True, layout.RESUMES: False}[turns]
    return Update(request_id, priority if what & layout.SETS_PRIORITY else None, paused)


def encode_token(sampled: Sampled, at_ns: int) -> tuple[int, bytes]:
    """Return the flags and the body of a token."""
    logprobs, flags, last = sampled.logprobs, 0, b""
    if sampled.confidence is not None:
        flags, last = layout.HAS_CONFIDENCE, _CONFIDENCE.pack(sampled.confidence)
    if logprobs is None:
        return flags, _TOKEN.pack(sampled.request_id, at_ns, 0.0, sampled.token_id, 0) + last
    top = logprobs.top
    fixed = _TOKEN.pack(sampled.request_id, at_ns, logprobs.chosen, sampled.token_id, len(top))
    values, ids = np.array([x for _, x in top], "<f8"), np.array([i for i, _ in top], "<u4")
    return flags | layout.HAS_LOGPROBS, fixed + values.tobytes() + ids.tobytes() + last


def decode_token(record: Record) -> tuple[Sampled, int]:
    """Decode the result of `encode_token`."""
    request_id, at_ns, chosen, token_id, num_top = _TOKEN.unpack_from(record.body)
    arrays, logprobs, confidence = _Arrays(record.body, _TOKEN.size), None, None
    if record.flags & layout.HAS_LOGPROBS:
        values = arrays.take("<f8", num_top)
        logprobs = Logprobs(chosen, tuple(zip(arrays.take("<u4", num_top), values, strict=True)))
    if record.flags & layout.HAS_CONFIDENCE:
        [confidence] = arrays.take("<f8", 1)
    return Sampled(request_id, token_id, logprobs, confidence=confidence), at_ns


class PromptPart(NamedTuple):
    """Log-probabilities of some of a prompt's tokens."""

    request_id: RequestId
    first: int
    """Number of the first of these tokens; 0 is the prompt's second token."""
    logprobs: PromptLogprobs


def encode_prompt(request_id: RequestId, whole: PromptLogprobs) -> Iterator[bytes]:
    """Return the bodies of one or more records for the log-probabilities of a prompt."""
    most = max(1, PART_BYTES // (4 + 8 * whole.num_top))
    for first in range(0, max(1, len(whole.chosen)), most):
        part = whole.part(first, first + most)
        fixed = _PROMPT.pack(request_id, first, len(part.chosen), whole.num_top, 0)
        yield b"".join((fixed, part.chosen.tobytes(), part.top.tobytes(), part.top_ids.tobytes()))


def decode_prompt(record: Record) -> PromptPart:
    """Decode one body of `encode_prompt`."""
    request_id, first, num_tokens, num_top, _ = _PROMPT.unpack_from(record.body)
    arrays = _Arrays(record.body, _PROMPT.size)
    chosen, top = arrays.take("<f4", num_tokens), arrays.take("<f4", num_tokens * num_top)
    ids = arrays.take("<u4", num_tokens * num_top)
    logprobs = PromptLogprobs(num_top, array("f", chosen), array("f", top), array("I", ids))
    return PromptPart(request_id, first, logprobs)


class End(NamedTuple):
    """The end of a request, as the engine reports it."""

    request_id: RequestId
    reason: FinishReason
    error: str | None
    metrics: "EngineMetrics | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """The part of RequestMetrics that cannot be computed from the times of the tokens."""

    arrival_ns: int
    queue_ms: float | None
    parked_ms: float
    max_stall_ms: float
    priority: int
    num_prompt_tokens: int
    num_prefilled_tokens: int
    preemptions: int
    evictions: int
    evict_recomputed_tokens: int
    retry_recomputed_tokens: int
    preempt_recomputed_tokens: int
    num_cached_tokens: int = 0
    open_ms: float | None = None
    num_revisions: int = 0
    revise_lost_tokens: int = 0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0

    @classmethod
    def unknown(cls, arrival_ns: int, priority: int, num_prompt_tokens: int) -> "EngineMetrics":
        """Return metrics of a request whose engine has ended; unknown values are zeros."""
        return cls(
            **_UNKNOWN,
            arrival_ns=arrival_ns,
            priority=priority,
            num_prompt_tokens=num_prompt_tokens,
        )

    def complete(
        self, request_id: RequestId, name: str, reason: FinishReason, token_ns: Sequence[int]
    ) -> RequestMetrics:
        """Add the values that follow from the tokens that reached the front end."""
        known = {name: getattr(self, name) for name in self.__slots__}
        whole_ns = self.arrival_ns + round((self.open_ms or 0) * NS_PER_MS)
        times = token_latencies(whole_ns, token_ns)
        return RequestMetrics(request_id=request_id, name=name, reason=reason, **known, **times)


_UNKNOWN: dict[str, Any] = {
    "queue_ms": None,
    "parked_ms": 0.0,
    "max_stall_ms": 0.0,
    "num_prefilled_tokens": 0,
    "preemptions": 0,
    "evictions": 0,
    "evict_recomputed_tokens": 0,
    "retry_recomputed_tokens": 0,
    "preempt_recomputed_tokens": 0,
}


def encode_finish(
    request_id: RequestId,
    reason: FinishReason,
    error: str | None,
    metrics: "RequestMetrics | EngineMetrics | None",
) -> tuple[int, bytes]:
    """Return the flags and the body of a finish."""
    text = b"" if error is None else _utf8(error)[:MAX_TEXT_BYTES]
    flags = layout.HAS_ERROR * (error is not None)
    values: tuple[Any, ...] = (0, 0.0, 0.0, 0.0, _REASONS.index(reason), *[0] * 8)
    if metrics is not None:
        flags |= layout.HAS_METRICS
        values = (
            metrics.arrival_ns,
            _float(metrics.queue_ms),
            metrics.parked_ms,
            metrics.max_stall_ms,
            _REASONS.index(reason),
            metrics.priority,
            metrics.num_prompt_tokens,
            metrics.num_prefilled_tokens,
            metrics.preemptions,
            metrics.evictions,
            metrics.evict_recomputed_tokens,
            metrics.retry_recomputed_tokens,
            metrics.preempt_recomputed_tokens,
        )
    body = _FINISH.pack(request_id, *values, len(text)) + text
    if metrics is not None and metrics.num_cached_tokens:
        flags, body = flags | layout.HAS_CACHED, body + _CACHED.pack(metrics.num_cached_tokens)
    if metrics is not None and metrics.num_revisions:
        counts = metrics.num_revisions, metrics.revise_lost_tokens
        flags |= layout.HAS_PIECES
        body += _PIECES.pack(_float(metrics.open_ms), *counts)
    if metrics is not None and (metrics.num_accepted_drafts or metrics.num_rejected_drafts):
        flags |= layout.HAS_DRAFTS
        body += _DRAFTS.pack(metrics.num_accepted_drafts, metrics.num_rejected_drafts)
    return flags, body


def decode_finish(record: Record) -> End:
    """Decode the result of `encode_finish`."""
    request_id, *values, num_error_bytes = _FINISH.unpack_from(record.body)
    arrival_ns, queue_ms, parked_ms, max_stall_ms, reason, priority, *counts = values
    error = None
    if record.flags & layout.HAS_ERROR:
        end = _FINISH.size + num_error_bytes
        error = record.body[_FINISH.size : end].decode("utf-8", "replace")
    cached, metrics, at = 0, None, _FINISH.size + num_error_bytes
    if record.flags & layout.HAS_CACHED:
        (cached,) = _CACHED.unpack_from(record.body, at)
        at += _CACHED.size
    open_ms, num_revisions, lost = math.nan, 0, 0
    if record.flags & layout.HAS_PIECES:
        open_ms, num_revisions, lost = _PIECES.unpack_from(record.body, at)
        at += _PIECES.size
    accepted = rejected = 0
    if record.flags & layout.HAS_DRAFTS:
        accepted, rejected = _DRAFTS.unpack_from(record.body, at)
    if record.flags & layout.HAS_METRICS:
        names = [f.name for f in fields(EngineMetrics)][5:-6]
        metrics = EngineMetrics(
            arrival_ns=arrival_ns,
            queue_ms=_optional(queue_ms),
            parked_ms=parked_ms,
            max_stall_ms=max_stall_ms,
            priority=priority,
            **dict(zip(names, counts, strict=True)),
            num_cached_tokens=cached,
            open_ms=_optional(open_ms),
            num_revisions=num_revisions,
            revise_lost_tokens=lost,
            num_accepted_drafts=accepted,
            num_rejected_drafts=rejected,
        )
    return End(request_id, _REASONS[reason], error, metrics)
