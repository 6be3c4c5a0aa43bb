"""Settings and prompts of engines that hand requests over."""

from typing import Any

from qllm import SamplingParams
from qllm.frontend.handle import Result
from qllm.ingress.remote.meeting import MIN_SECRET_BYTES
from tests.support.engines import SETTINGS as PLAIN

SECRET = b"s" * MIN_SECRET_BYTES

SAMPLED = SamplingParams(temperature=1.2, seed=5, ignore_eos=True, logprobs=1)

TEXT = "def parse(text, at):  # what json.loads does with numbers\n" * 8

SETTINGS: dict[str, Any] = {**PLAIN, "exactness": "batch-invariant"}
"""What is computed again has the bits of what was computed first."""


def same(found: Result, expected: Result) -> bool:
    return (
        (found.token_ids, found.text, found.logprobs, found.finish_reason)
        == (expected.token_ids, expected.text, expected.logprobs, expected.finish_reason)
    )  # fmt: skip
