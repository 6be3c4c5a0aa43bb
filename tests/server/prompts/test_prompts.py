"""Prompts that come in pieces over HTTP: a body that streams, and `/v1/prompts`."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from qllm.frontend.incremental_tokens import IncrementalText
from qllm.llm import QLLMEngine
from qllm.server.requests.ask import SHORT
from qllm.types import SamplingParams
from tests.support.engines import pid_of
from tests.support.prompts import ASK, NDJSON, PLAIN, Slow, lines, message, post
from tests.support.serving import Serving, serving, tiny_engine
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("engine")  # each test leaves the shared engine idle

TEXT = "def add(a, b):\n    return a + b\n\n# Ünïcödé: 你好 🙂\n" * 6
GREEDY = SamplingParams(temperature=0)
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def patient(shared_engine: QLLMEngine) -> Iterator[Serving]:
    """Serve prompts that may be idle for long."""
    with serving(shared_engine, prompt_idle_s=3600) as made:
        yield made


@pytest.fixture(scope="module")
def want(shared_engine: QLLMEngine) -> str:
    return shared_engine.submit(TEXT, "LS", 8, sampling=GREEDY).result(300).text


def pieces(size: int, text: str = TEXT) -> list[dict[str, Any]]:
    return [{"append": text[at : at + size]} for at in range(0, len(text), size)]


# -- a body that streams


@pytest.mark.parametrize("size", [1, 30, 500])
def test_a_body_that_streams_is_answered_as_usual(patient: Serving, want: str, size: int) -> None:
    body = iter([lines(ASK), *(lines(piece) for piece in pieces(size))])
    answer = post(patient, PLAIN, body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == want
    assert answer.json()["usage"]["prompt_tokens"] > 100


def test_bytes_are_cut_anywhere(patient: Serving, want: str) -> None:
    """Also inside a character, an escape and a line."""
    whole = lines(ASK, *pieces(40))
    for size in (1, 7):
        parts = iter([whole[at : at + size] for at in range(0, len(whole), size)])
        assert post(patient, PLAIN, parts).json()["choices"][0]["text"] == want


def test_a_stream_answers_a_stream(patient: Serving, want: str) -> None:
    body = lines({**ASK, "stream": True}, *pieces(50))
    how: dict[str, Any] = {"content": body, "headers": NDJSON, "timeout": 60}
    with httpx.stream("POST", f"{patient.url}{PLAIN}", **how) as answer:
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1]) == want


def test_a_replacement(patient: Serving, want: str) -> None:
    body = lines({**ASK, "prompt": "Nobody "}, {"append": "wants this."},
                 {"replace": TEXT, "from": 0})  # fmt: skip
    assert post(patient, PLAIN, body).json()["choices"][0]["text"] == want


def test_the_last_message_of_a_chat(patient: Serving) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    whole = patient.post(CHAT, {**ASK, "messages": chat}).json()
    first = {**ASK, "messages": [chat[0], {"role": "user", "content": ""}]}
    answer = post(patient, CHAT, lines(first, *pieces(33))).json()
    assert answer["choices"] == whole["choices"]
    assert answer["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_be_by_header_and_by_body(patient: Serving) -> None:
    answer = post(patient, PLAIN, lines({**ASK, "service_tier": "flex"}, {"append": "x"}))
    assert (answer.json()["service_tier"], answer.headers["x-qllm-priority"]) == ("flex", "BE")
    headers = {**NDJSON, "x-qllm-priority": "BE"}
    body = lines(ASK, {"append": "x"})
    answer = httpx.post(f"{patient.url}{PLAIN}", content=body, headers=headers, timeout=60)
    assert answer.headers["x-qllm-priority"] == "BE"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "the body is empty"),
        (b"{\n", "line 1 of the body is no JSON"),
        (lines(ASK) + b"nonsense\n", "line 2 of the body is no JSON"),
        (lines(ASK) + b'{"append": "\xff"}\n', "line 2 of the body is no UTF-8"),
        (lines(ASK) + b'{"append": "\xe4\xbd', "line 2 of the body is no UTF-8"),
        (lines(ASK, {"append": "\\ud800"}).replace(b"\\\\", b"\\"), "append"),
        (lines(ASK, {"prepend": "x"}), "line 2: it must be"),
        (lines(ASK, ["append"]), "line 2: it must be"),
        (lines(ASK, {"append": 5}), "line 2: append"),
        (lines(ASK, {"append": "x", "more": 1}), "line 2: unknown field 'more'"),
        (lines(ASK, {"replace": "x"}), "line 2: from"),
        (lines(ASK, {"replace": "x", "from": -1}), "line 2: from"),
        (lines(ASK, {"append": "x"}, {"replace": "x", "from": 9}), "line 3: from_token=9 must be"),
        (lines({**ASK, "stopp": 1}), "unknown field 'stopp'"),
        (lines({**ASK, "n": 2}, {"append": "x"}), "n=2 cannot be asked"),
        (lines({**ASK, "echo": True}, {"append": "x"}), "echo=True cannot be asked"),
        (lines({**ASK, "prompt": ["a", "b"]}), "not a list of prompts"),
        (lines({**ASK, "prompt_id": "prompt-1"}), "prompt_id"),
        (lines(ASK), "the prompt is empty"),
        (lines({**ASK, "min_tokens": 10**7}, {"append": "x"}), "min_tokens=10000000 must"),
        (lines(ASK, {"append": "word " * 40_000}), "so far, and at most"),
    ],
)
def test_a_wrong_body_says_where(patient: Serving, body: bytes, text: str) -> None:
    assert text in message(post(patient, PLAIN, body), 400)
    wait_for(lambda: patient.metric("qllm:num_open_prompts") == 0)


def test_another_model(patient: Serving) -> None:
    assert "not served" in message(post(patient, PLAIN, lines({"model": "large"})), 404)


def test_the_engine_computes_while_the_body_comes(patient: Serving, engine: QLLMEngine) -> None:
    before = engine.stats()["open_prompts"]["revisions"]
    with Slow(patient) as client:
        client.send(lines(ASK))
        client.send(lines({"append": TEXT}))
        wait_for(lambda: engine.stats()["open_prompts"]["revisions"] > before)
        assert patient.metric("qllm:num_open_prompts") == 1
        client.send(lines({"append": "more"}))
        client.socket.sendall(b"0\r\n\r\n")
        assert b'"finish_reason"' in client.answer()
    wait_for(lambda: patient.metric("qllm:num_open_prompts") == 0)


def test_who_hangs_up_cancels(patient: Serving, engine: QLLMEngine) -> None:
    with Slow(patient) as client:
        client.send(lines(ASK))
        client.send(lines({"append": TEXT}))
        wait_for(lambda: patient.metric("qllm:num_open_prompts") == 1)
        wait_for(lambda: engine.stats()["num_live"] == 1)
    wait_for(
        lambda: patient.metric("qllm:num_open_prompts") == 0 and engine.stats()["num_live"] == 0
    )


def test_a_body_that_stalls_is_abandoned(engine: QLLMEngine) -> None:
    with serving(engine, prompt_idle_s=0.2) as made, Slow(made) as client:
        client.send(lines(ASK, {"append": TEXT}))
        found = client.answer()
        assert found.startswith(b"HTTP/1.1 408")
        assert b"prompt_abandoned" in found
        wait_for(lambda: engine.stats()["num_live"] == 0)
        assert made.metric("qllm:prompts_abandoned_total") == 1


# -- /v1/prompts


def test_a_prompt_by_its_id(patient: Serving, want: str) -> None:
    opened = patient.post("/v1/prompts", {"prompt": TEXT[:20]}).json()
    assert (opened["object"], opened["status"], opened["priority"]) == ("prompt", "open", "LS")
    path = f"/v1/prompts/{opened['id']}"
    for piece in pieces(60, TEXT[20:]):
        grown = patient.post(f"{path}/append", piece).json()
    assert grown["num_tokens"] > 100
    assert patient.get(path).json() == grown
    assert [x["id"] for x in patient.get("/v1/prompts").json()["data"]] == [opened["id"]]
    with patient.client() as client:
        answer = client.completions.create(
            model="tiny", prompt=openai.NOT_GIVEN, max_tokens=8, temperature=0,
            extra_body={"prompt_id": opened["id"]},
        )  # fmt: skip
    assert answer.choices[0].text == want
    for call in (
        patient.post(f"{path}/append", {"append": "x"}),
        patient.get(path),
        patient.post(PLAIN, {**ASK, "prompt_id": opened["id"]}),
    ):
        assert "was sent" in message(call, 409)
        assert call.json()["error"]["code"] == "prompt_closed"


def test_a_long_one_that_is_sent_holds_up_no_short_prompt(
    patient: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate, plain = threading.Event(), threading.Event(), IncrementalText.finish

    def slow(self: IncrementalText) -> list[int]:
        begun.set()
        assert gate.wait(60)
        return plain(self)

    name = patient.post("/v1/prompts", {"prompt": "a" * SHORT}).json()["id"]
    monkeypatch.setattr(IncrementalText, "finish", slow)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(patient.post, PLAIN, {**ASK, "prompt_id": name})
        try:
            assert begun.wait(60)
            assert patient.post(PLAIN, {**ASK, "prompt": "x"}).status_code == 200
        finally:
            gate.set()
        assert long.result().status_code == 200


def test_put_replaces_and_delete_gives_up(patient: Serving, want: str) -> None:
    name = patient.post("/v1/prompts", {"prompt": "Something else"}).json()["id"]
    url = f"{patient.url}/v1/prompts/{name}"
    put = httpx.put(url, json={"replace": TEXT, "from": 0}, timeout=60)
    assert put.status_code == 200
    wrong = httpx.put(url, json={"replace": "x", "from": 10**6}, timeout=60)
    assert "must be an integer in" in message(wrong, 400)
    answer = patient.post(PLAIN, {**ASK, "prompt_id": name}).json()
    assert answer["choices"][0]["text"] == want
    name = patient.post("/v1/prompts", {}).json()["id"]
    gone = httpx.delete(f"{patient.url}/v1/prompts/{name}", timeout=60)
    assert gone.json() == {"id": name, "object": "prompt", "deleted": True}
    assert "was deleted" in message(patient.get(f"/v1/prompts/{name}"), 409)


def test_a_chat_by_its_id(patient: Serving) -> None:
    chat = [{"role": "user", "content": TEXT}]
    whole = patient.post(CHAT, {**ASK, "messages": chat}).json()
    body = {"messages": [{"role": "user", "content": TEXT[:9]}], "service_tier": "flex"}
    opened = patient.post("/v1/prompts", body).json()
    patient.post(f"/v1/prompts/{opened['id']}/append", {"append": TEXT[9:]})
    wrong = patient.post(PLAIN, {**ASK, "prompt_id": opened["id"]})
    assert "opened with messages; send it to /v1/chat/completions" in message(wrong, 400)
    answer = patient.post(CHAT, {**ASK, "prompt_id": opened["id"]}).json()
    assert answer["choices"] == whole["choices"]
    assert answer["service_tier"] == "flex"


def test_what_is_refused_leaves_it_open(patient: Serving, want: str) -> None:
    name = patient.post("/v1/prompts", {"prompt": TEXT}).json()["id"]
    for wrong, text in (
        ({"min_tokens": 10**7}, "min_tokens=10000000 must"),
        ({"prompt": "another"}, "leave prompt out"),
        ({"n": 2}, "n=2 cannot be asked"),
        ({"temperature": -1}, "temperature"),
    ):
        assert text in message(patient.post(PLAIN, {**ASK, "prompt_id": name, **wrong}), 400)
    answer = patient.post(PLAIN, {**ASK, "prompt_id": name}).json()
    assert answer["choices"][0]["text"] == want


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "either"),
        ({"prompt": "x", "tools": []}, "go with messages"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [10**7]}, "token id"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "it grows"),
        ({"messages": [{"role": "user"}]}, "must be a string: it grows"),
        ({"wrong": 1}, "unknown field"),
    ],
)
def test_what_cannot_be_opened(patient: Serving, body: dict[str, Any], text: str) -> None:
    assert text in message(patient.post("/v1/prompts", body), 400)
    assert patient.metric("qllm:num_open_prompts") == 0


def test_unknown_ids_and_those_of_other_keys(engine: QLLMEngine) -> None:
    with serving(engine, api_keys="one,two", max_open_prompts=2) as made:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        name = made.post("/v1/prompts", {"prompt": "x"}, headers=one).json()["id"]
        assert "no prompt" in message(made.get(f"/v1/prompts/{name}", headers=two), 404)
        sent = made.post(PLAIN, {**ASK, "prompt_id": name}, headers=two)
        assert "no prompt" in message(sent, 404)
        assert "no prompt" in message(made.get("/v1/prompts/prompt-5", headers=one), 404)
        assert made.post("/v1/prompts", {}, headers=one).status_code == 200
        full = made.post("/v1/prompts", {}, headers=one)
        assert "max_open_prompts=2" in message(full, 429)
        assert full.headers["retry-after"] == "1"
        assert made.post("/v1/prompts", {}, headers=two).status_code == 200
        body = lines(ASK, {"append": "x"})
        full = httpx.post(f"{made.url}{PLAIN}", content=body, headers={**NDJSON, **one}, timeout=60)
        assert "max_open_prompts=2" in message(full, 429)
    wait_for(lambda: engine.stats()["num_live"] == 0)


def test_a_prompt_has_a_size(engine: QLLMEngine) -> None:
    with serving(engine, max_prompt_bytes=1024) as made:
        name = made.post("/v1/prompts", {"prompt": "x" * 1000}).json()["id"]
        path = f"/v1/prompts/{name}"
        assert "max_prompt_bytes" in message(made.post(f"{path}/append", {"append": "é" * 20}), 413)
        assert made.post(f"{path}/append", {"append": "é" * 12}).status_code == 200
        assert made.get(path).json()["num_bytes"] == 1024
        assert "max_prompt_bytes" in message(made.post("/v1/prompts", {"prompt": "x" * 1025}), 413)
        body = lines(ASK, {"append": "x" * 1025})
        assert "max_prompt_bytes" in message(post(made, PLAIN, body), 413)


def test_an_idle_prompt_is_abandoned(engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(engine, prompt_idle_s=3600, max_ls=1, ls_overflow="refuse") as made:
        name = made.post("/v1/prompts", {"prompt": TEXT[:50]}).json()["id"]
        assert "max_ls=1" in message(made.post("/v1/prompts", {"prompt": TEXT}), 429)
        with monkeypatch.context() as patch:
            patch.setitem(made.front.config.__dict__, "prompt_idle_s", 0.05)
            made.post(f"/v1/prompts/{name}/append", {"append": TEXT[50:]})
            wait_for(lambda: made.metric("qllm:num_open_prompts") == 0)
        assert "was abandoned" in message(made.get(f"/v1/prompts/{name}"), 409)
        wait_for(lambda: engine.stats()["num_live"] == 0)
        name = made.post("/v1/prompts", {"prompt": TEXT}).json()["id"]  # its seat came back
        assert made.post(PLAIN, {**ASK, "prompt_id": name}).status_code == 200
        assert made.post(PLAIN, {**ASK, "prompt": "x"}).status_code == 200


def test_a_batch_line_has_no_prompt_id() -> None:
    from qllm.server.batch.worker import line_of
    from qllm.server.http.errors import ApiError

    text = json.dumps({"custom_id": "a", "body": {"prompt_id": "prompt-1"}}).encode()
    custom_id, error = line_of(text, PLAIN)
    assert custom_id == "a"
    assert isinstance(error, ApiError)
    assert "a prompt of its own" in error.message


def test_many_retrievers_write_one_prompt(patient: Serving) -> None:
    name = patient.post("/v1/prompts", {"prompt": "Sources:\n"}).json()["id"]

    def write(i: int) -> None:
        for j in range(5):
            patient.post(f"/v1/prompts/{name}/append", {"append": f"<{i}.{j}>"})

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    body = {**ASK, "prompt_id": name, "return_token_ids": True}
    answer = patient.post(PLAIN, body).json()
    ids = answer["choices"][0]["prompt_token_ids"]
    text = patient.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert all(text.count(f"<{i}.{j}>") == 1 for i in range(4) for j in range(5))
    for i in range(4):  # each in its own order
        places = [text.index(f"<{i}.{j}>") for j in range(5)]
        assert places == sorted(places)


def test_an_engine_killed_while_a_prompt_is_open(want: str) -> None:
    """It goes on with the next one: what came before, meanwhile and after."""
    first = tiny_engine()
    with serving(first, tiny_engine, restart_backoff_s=0, max_restarts=2) as made:
        name = made.post("/v1/prompts", {"prompt": TEXT[:50]}).json()["id"]
        path = f"/v1/prompts/{name}/append"
        made.post(path, {"append": TEXT[50:100]})
        os.kill(pid_of(first), signal.SIGKILL)
        assert made.post(path, {"append": TEXT[100:150]}).status_code == 200
        wait_for(lambda: made.front.engine is not first and made.get("/ready").status_code == 200)
        wait_for(lambda: made.metric("qllm:requests_replayed_total") == 1)
        assert made.post(path, {"append": TEXT[150:]}).status_code == 200
        answer = made.post(PLAIN, {**ASK, "prompt_id": name})
        assert answer.json()["choices"][0]["text"] == want
