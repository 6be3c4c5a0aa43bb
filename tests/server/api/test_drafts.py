"""Predictions and drafts over HTTP: they change no answer, and usage counts them."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from qllm import QLLMEngine
from qllm.cli import app
from qllm.scheduler.drafts import Utility
from tests.support.serving import serving

TEXT = "def area(width, height):\n    return width * height\n"
CHAT: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 40,
    "temperature": 0,
}  # fmt: skip
PREDICTIONS = [
    {"type": "content", "content": TEXT},
    {"type": "content", "content": [{"type": "text", "text": TEXT}, {"type": "text", "text": "x"}]},
    {"content": ""},
    {"type": "content", "content": []},
    {"type": "content", "content": "x = 1\n" * 200_000},
]


@pytest.fixture(scope="module")
def clients() -> Iterator[list[httpx.Client]]:
    """A server without drafts, and one that always drafts the most.

    How many drafts pay depends on the speed of the machine.
    """
    how: dict[str, Any] = {"threads": 1, "conformance": False, "run_in": "thread"}
    with (
        pytest.MonkeyPatch.context() as patch,
        QLLMEngine.from_pretrained("tiny", **how) as plain,
        QLLMEngine.from_pretrained("tiny", **how, draft="auto", draft_tokens=8) as drafting,
        serving(plain) as one,
        serving(drafting) as other,
        httpx.Client(base_url=one.url, timeout=120) as client,
        httpx.Client(base_url=other.url, timeout=120) as drafting_client,
    ):
        patch.setattr(Utility, "most", lambda self, costs, num_others, limit, extra_ns=None: limit)
        yield [client, drafting_client]


def answer(client: httpx.Client, route: str, body: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    found = client.post(f"/v1/{route}", json=body)
    assert found.status_code == 200, found.text
    (choice,), usage = found.json()["choices"], found.json()["usage"]
    return choice, usage


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_a_prediction_changes_no_answer(clients: list[httpx.Client], prediction: Any) -> None:
    body = {**CHAT, "prediction": prediction}
    (choice, usage), (same, drafted) = (answer(c, "chat/completions", body) for c in clients)
    assert choice == same
    details = drafted.pop("completion_tokens_details")
    assert {**usage, "completion_tokens_details": None} == {
        **drafted, "completion_tokens_details": None,
    }  # fmt: skip
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert details.pop("reasoning_tokens") == 0
    assert set(details) <= {"accepted_prediction_tokens", "rejected_prediction_tokens"}


def test_usage_and_metrics_count_what_was_accepted(clients: list[httpx.Client]) -> None:
    """The answer repeats itself, as greedy answers of a small model do."""
    _, client = clients
    body = {"model": "tiny", "prompt": "a a a a a a a a", "max_tokens": 200, "temperature": 0}
    _, usage = answer(client, "completions", body)
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 20
    accepted = counted(client, "accepted", "auto", "LS")
    assert counted(client, "draft", "auto", "LS") > accepted >= 20


def counted(client: httpx.Client, what: str, drafter: str, track: str) -> float:
    """Return a counter of drafted tokens, which has one series per class and drafter."""
    (family,) = (
        family
        for family in text_string_to_metric_families(client.get("/metrics").text)
        if family.name == f"qllm:spec_decode_num_{what}_tokens"
    )
    found = {(s.labels["drafter"], s.labels["class"]): s.value for s in family.samples}
    assert set(found) == {(drafter, "LS"), (drafter, "BE")}
    return found[drafter, track]


def test_an_engine_that_drafts_nothing_counts_nothing(clients: list[httpx.Client]) -> None:
    client, _ = clients
    answer(client, "completions", {"model": "tiny", "prompt": "a a a a a a", "max_tokens": 40})
    assert counted(client, "draft", "none", "LS") == counted(client, "draft", "none", "BE") == 0


def feed(client: httpx.Client) -> dict[str, Any]:
    """Return the first message of a live page that the server has made from now on."""
    since_s = time.time()
    with client.stream("GET", "/ui/events") as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        messages = (json.loads(line.removeprefix("data: ")) for line in lines)
        found: dict[str, Any] = next(m for m in messages if m["time_s"] >= since_s)
    return found


def test_the_live_page_gets_the_drafts_of_each_class(clients: list[httpx.Client]) -> None:
    plain, client = clients
    assert not {"drafts", "drafter"} & set(feed(plain))
    before = feed(client)["drafts"]
    body = {"model": "tiny", "prompt": "a a a a a a a a", "max_tokens": 100, "temperature": 0}
    _, usage = answer(client, "completions", {**body, "priority": 1})
    told, details = feed(client), usage["completion_tokens_details"]
    assert told["drafter"] == "auto"
    assert told["drafts"]["LS"] == before["LS"]
    new = {name: told["drafts"]["BE"][name] - before["BE"][name] for name in before["BE"]}
    assert new == {
        "accepted": details["accepted_prediction_tokens"],
        "rejected": details["rejected_prediction_tokens"],
    }
    assert new["accepted"] > 10


def test_top_shows_drafts_of_an_engine_that_drafts(clients: list[httpx.Client]) -> None:
    plain, client = (
        CliRunner().invoke(app, ["top", str(c.base_url), "--once", "--every", "0.1"]).output
        for c in clients
    )
    assert "drafted tokens/s" not in plain
    assert "drafts by" not in plain
    assert "drafted tokens/s" in client
    assert "drafts by auto" in " ".join(client.split())


def test_draft_tokens_of_a_body_lower_the_drafts(clients: list[httpx.Client]) -> None:
    _, client = clients
    body = {"model": "tiny", "prompt": "a a a a a a a a", "max_tokens": 60, "temperature": 0}
    _, usage = answer(client, "completions", {**body, "draft_tokens": 0})
    assert "completion_tokens_details" not in usage


@pytest.mark.parametrize(
    "wrong",
    [
        {"prediction": "text"},
        {"prediction": []},
        {"prediction": {"type": "other", "content": "x"}},
        {"prediction": {"type": "content"}},
        {"prediction": {"type": "content", "content": 5}},
        {"prediction": {"type": "content", "content": [{"type": "image", "text": "x"}]}},
        {"draft_tokens": -1},
        {"draft_tokens": 17},
        {"draft_tokens": 1.5},
    ],
)
def test_a_wrong_field_is_named(clients: list[httpx.Client], wrong: dict[str, Any]) -> None:
    (name,) = wrong
    for client in clients:
        found = client.post("/v1/chat/completions", json={**CHAT, **wrong})
        assert found.status_code == 400, found.text
        assert name in found.json()["error"]["message"] or name in found.json()["error"]["param"]
