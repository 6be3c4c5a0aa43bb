"""The engine's check of a request from any front end, the last check before the scheduler.

`submit` makes the same checks. But a record in a ring may come from a front end of another release,
or from a broken one. Policies compute with the record's values, so wrong values must not reach
policies. The native server makes the same checks (`qllm/device/csrc/claim.h`).
"""

from qllm.ingress.protocol import Submission
from qllm.plan import ModelShape
from qllm.types import MAX_CLOCK_NS, MAX_TIME_MS, PRIORITY_LIMIT, Slo


def wrong_number(priority: int, arrival_ns: int, deadline_ns: int | None, slo: Slo) -> str | None:
    """Return the name of a number that our front ends never write; None if all are valid."""
    for name, time_ns in (("arrival_ns", arrival_ns), ("deadline_ns", deadline_ns)):
        if time_ns is not None and abs(time_ns) >= MAX_CLOCK_NS:
            return f"{name}={time_ns} must be within {MAX_CLOCK_NS} of the engine's start"
    for name, target in slo._asdict().items():
        if target is not None and not 0 < target <= MAX_TIME_MS:
            return f"{name}={target} must be milliseconds in (0, {MAX_TIME_MS}]"
    if abs(priority) > PRIORITY_LIMIT:
        return f"priority={priority} must be in [-{PRIORITY_LIMIT}, {PRIORITY_LIMIT}]"
    return None


def refusal(item: Submission, shape: ModelShape, max_kv_tokens: int) -> str | None:
    """Return the reason why an engine cannot serve a request; None if it can.

    Args:
        item: The request.
        shape: Shape of its model.
        max_kv_tokens: Largest number of tokens of KV that may exist at once.
    """
    if item.wrong is not None:
        return item.wrong
    has_prompt = item.num_prompt_tokens > 0 or item.is_open
    if not has_prompt or item.max_tokens <= item.num_output_tokens:
        return "a prompt or an answer of no tokens"
    total, most = item.num_prompt_tokens + item.max_tokens, shape.longest(max_kv_tokens)
    if total > most:
        return f"prompt and max_tokens are {total} tokens; the engine serves at most {most}"
    wrong = max(item.token_ids, default=0)
    if item.sampling.logit_bias:
        wrong = max(wrong, *item.sampling.logit_bias)
    if item.sampling.allowed_token_ids:
        wrong = max(wrong, *item.sampling.allowed_token_ids)
    if wrong >= shape.vocab_size:
        return f"token id {wrong} must be in [0, {shape.vocab_size}), the vocabulary"
    return wrong_number(item.priority, item.arrival_ns, item.deadline_ns, item.slo)
