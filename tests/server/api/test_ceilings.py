"""`max_tokens` is a ceiling: on every route an answer ends where the context does."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from qllm.plan import Plan
from qllm.policy import View, next_row
from qllm.types import Cap
from tests.support.serving import Serving, serving, tiny_engine

TEXT = "word " * 112
ENDS = {'"finish_reason":"length"', '"reason":"max_output_tokens"', "model_context_window_exceeded"}


@pytest.fixture(scope="module")
def narrow() -> Iterator[Serving]:
    """Serve sequences of at most 128 tokens."""
    with tiny_engine(max_kv_tokens=128, conformance=False) as engine, serving(engine) as made:
        yield made


def ceilings(served: Serving) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each route that answers, each of its names for the most tokens, and its fields."""
    schema = served.get("/openapi.json").json()
    for path, methods in schema["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        for reference in re.findall(r"schemas/(\w+)", json.dumps(content)):
            fields = schema["components"]["schemas"][reference].get("properties", {})
            for name in fields:
                if re.fullmatch("max(_completion|_output)?_tokens", name) and "stream" in fields:
                    yield path, name, fields


def body_of(fields: dict[str, Any], text: str, **more: Any) -> dict[str, Any]:
    """A request of a text, greedy and without an end of its own where it can be asked so."""
    prompt = {"input": text, "messages": [{"role": "user", "content": text}], "prompt": text}
    asked = next({name: value} for name, value in prompt.items() if name in fields)
    body = {"model": "tiny", "temperature": 0, "ignore_eos": True, **asked, **more}
    return {name: value for name, value in body.items() if name in fields}


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_beyond_the_context_end_with_it(narrow: Serving, stream: bool) -> None:
    seen = list(ceilings(narrow))
    assert len({path for path, *_ in seen}) >= 4
    for path, name, fields in seen:
        if path.endswith(("/input_tokens", "/count_tokens")):  # counts, and answers nothing
            continue
        for most in (65536, 10**12):
            answer = narrow.post(path, body_of(fields, TEXT, **{name: most, "stream": stream}))
            assert answer.status_code == 200, (path, answer.text)
            assert [end for end in ENDS if end in answer.text], (path, answer.text)
        answer = narrow.post(path, body_of(fields, TEXT * 2, **{name: 1, "stream": stream}))
        assert (answer.status_code, "128" in answer.text) == (400, True), path


def test_a_ceiling_below_the_context_has_its_own_reason(narrow: Serving) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "word"}], "temperature": 0}
    answer = narrow.post("/v1/messages", {**body, "max_tokens": 3}).json()
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 3)


def test_a_prompt_is_not_cut_for_a_ceiling_that_no_context_has(narrow: Serving) -> None:
    asked = {"prompt": list(range(200)), "max_tokens": 65536, "truncate_prompt_tokens": -1}
    usage = narrow.post("/v1/completions", asked).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (127, 1)


class Counting:
    """A policy that serves one request, and records before each plan what KV it holds."""

    needs = Cap.NONE

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []
        """Blocks that the request holds, that are taken in all, and that its tokens need."""

    def plan(self, view: View) -> Plan:
        (request,) = view.requests
        if request.frontier is None:  # else it is in the middle of a step
            needed = view.shape.blocks_for(request.num_written_tokens, view.block_size)
            taken = view.num_blocks - view.num_free_blocks
            self.seen.append((len(request.block_table), taken, needed))
        return Plan(rows=(next_row(request, view, view.max_step_tokens),))


def test_a_ceiling_reserves_no_kv() -> None:
    """The KV that a request holds between two steps is that of the tokens it has written."""
    policy = Counting()
    asked = {"prompt": list(range(1500)), "max_tokens": 65536, "ignore_eos": True, "stream": True}
    size = {"max_kv_tokens": 4096, "conformance": False}
    with (
        tiny_engine(run_in="thread", policy=policy, **size) as engine,
        serving(engine) as served,
        httpx.stream("POST", f"{served.url}/v1/completions", json=asked, timeout=60) as answer,
    ):
        lines = list(itertools.islice(answer.iter_lines(), 120))
    assert sum(line.startswith("data: {") for line in lines) == 60
    assert len(policy.seen) > 60
    assert all(held == taken == needed for held, taken, needed in policy.seen)
