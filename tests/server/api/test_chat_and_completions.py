import asyncio
import json
import socket
import threading
from http.client import HTTPConnection
from typing import Any

import httpx
import openai
import pytest

from qllm.errors import EngineClosedError, InvalidRequestError, RequestFailedError
from qllm.frontend.handle import Piece
from qllm.frontend.prompts import flat_message, render_chat
from qllm.llm import QLLMEngine
from qllm.server.http.errors import ApiError, from_engine
from qllm.server.requests.ask import SHORT, Served
from qllm.server.requests.open_answer import Answer
from qllm.types import Priority, SamplingParams, Slo
from tests.support.engines import Broken, Holding
from tests.support.serving import Serving, serving, tiny_engine
from tests.support.waiting import wait_for

CHAT = [{"role": "user", "content": "What does json.dumps do?"}]
GREEDY = SamplingParams(temperature=0)
LONG: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 4000}
ENDLESS = {**LONG, "ignore_eos": True}
KIND = {"Content-Type": "application/json"}


def is_idle(engine: QLLMEngine) -> bool:
    return engine.stats()["num_live"] == 0


# -- answers


def test_chat_is_what_the_engine_says(client: openai.OpenAI, engine: QLLMEngine) -> None:
    expected = engine.submit(CHAT, "LS", 24, sampling=GREEDY).result(300)
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_completion_tokens=24, temperature=0
    )
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == expected.text
    assert choice.finish_reason == expected.finish_reason.value
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    counted = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    assert counted == (len(expected.prompt_token_ids), len(expected.token_ids))


def test_a_chat_stream_says_the_same_as_no_stream(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 16, "seed": 7}
    whole = client.chat.completions.create(**ask)
    chunks = list(
        client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_a_stream_without_options_has_no_usage(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="tiny", prompt="def", max_tokens=3, stream=True))
    assert all(c.usage is None and c.choices for c in chunks)


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(
            model="tiny", prompt="def", max_tokens=3, stream=True, stream_options=options,
            extra_body={"ignore_eos": True},
        )
    )  # fmt: skip
    counted = [c.usage.completion_tokens for c in chunks if c.usage]
    assert len(counted) == len(chunks)
    assert counted == sorted(counted)
    assert counted[-1] == 3


def test_prompts_as_text_ids_and_lists(client: openai.OpenAI, served: Serving) -> None:
    texts = ["def f(x):", "import json"]
    ids = [served.post("/tokenize", {"prompt": text}).json()["tokens"] for text in texts]

    def ask(prompt: Any) -> list[str]:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
        assert [c.index for c in answer.choices] == list(range(len(answer.choices)))
        return [c.text for c in answer.choices]

    singles = [ask(text)[0] for text in texts]
    assert singles[0] != singles[1]
    assert ask(texts) == ask(ids) == singles
    assert ask(ids[0]) == singles[:1]


def test_echo_begins_with_the_prompt(client: openai.OpenAI, served: Serving) -> None:
    texts = ["def f(x):", "import json"]
    ids = [served.post("/tokenize", {"prompt": text}).json()["tokens"] for text in texts]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0, "n": 2}
    plain = [c.text for c in client.completions.create(prompt=texts, **asked).choices]
    for prompts in (texts, ids):
        echoed = client.completions.create(prompt=prompts, echo=True, **asked)
        assert [c.text for c in echoed.choices] == [
            texts[i // 2] + text for i, text in enumerate(plain)
        ]
    streamed = [""] * 4
    for part in client.completions.create(prompt=texts, echo=True, stream=True, **asked):
        streamed[part.choices[0].index] += part.choices[0].text
    assert streamed == [c.text for c in echoed.choices]


def test_n_choices_differ_and_repeat_with_the_seed(client: openai.OpenAI) -> None:
    def ask() -> tuple[list[str], Any]:
        answer = client.completions.create(
            model="tiny", prompt=["def f(", "class"], max_tokens=12, n=3, seed=5
        )
        return [c.text for c in answer.choices], answer.usage

    texts, usage = ask()
    assert len(set(texts)) == 6
    assert ask()[0] == texts
    one = client.completions.create(model="tiny", prompt="def f(", max_tokens=12, seed=5)
    assert one.choices[0].text == texts[0]
    other = client.completions.create(model="tiny", prompt="class", max_tokens=12, seed=5)
    assert usage.prompt_tokens == one.usage.prompt_tokens + other.usage.prompt_tokens


def test_stop_strings(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    assert whole is not None
    word = whole.split()[3]
    stopped = client.chat.completions.create(**ask, stop=[word]).choices[0]
    assert stopped.message.content == whole[: whole.index(word)]
    assert stopped.finish_reason == "stop"


def test_ignore_eos_goes_on_to_max_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=CHAT,
        max_tokens=60,
        extra_body={"ignore_eos": True, "top_k": -1, "min_tokens": 60},
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 60


def test_logprobs_of_completions(client: openai.OpenAI, engine: QLLMEngine) -> None:
    params = SamplingParams(temperature=0, logprobs=2)
    expected = engine.submit("def f(", "LS", 6, sampling=params).result(300)
    choice = client.completions.create(
        model="tiny", prompt="def f(", max_tokens=6, temperature=0, logprobs=2
    ).choices[0]
    assert choice.logprobs is not None
    assert expected.logprobs is not None
    assert choice.logprobs.token_logprobs == [p.chosen for p in expected.logprobs]
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset is not None
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    assert choice.logprobs.top_logprobs is not None
    assert [len(top) for top in choice.logprobs.top_logprobs] == [2] * 6


def test_logprobs_of_chat_streamed_and_not(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "tiny", "messages": CHAT, "max_tokens": 6, "temperature": 0,
        "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    whole = client.chat.completions.create(**ask).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert [len(entry.top_logprobs) for entry in whole.content] == [3] * 6
    for entry in whole.content:
        assert entry.top_logprobs[0].logprob >= entry.logprob
        assert bytes(entry.bytes or ()).decode() == entry.token
    chunks = client.chat.completions.create(**ask, stream=True)
    parts = [c.choices[0].logprobs for c in chunks if c.choices]
    assert [x for p in parts if p and p.content for x in p.content] == whole.content


def test_parts_of_text_are_one_text(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "What does"}, {"type": "text", "text": "json do?"}]
    joined = [{"role": "user", "content": "What does\njson do?"}]
    answers = [
        client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, temperature=0
        ).choices[0].message.content
        for messages in ([{"role": "user", "content": parts}], joined)
    ]  # fmt: skip
    assert answers[0] == answers[1]


def test_tools_reach_the_chat_template(
    client: openai.OpenAI, engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{{ mood }}"
    template += "{{ messages[0].content }}"
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    tools: Any = [{"type": "function", "function": {"name": "weather in", "parameters": {}}}]

    def num_prompt_tokens(**keywords: Any) -> int:
        answer = client.chat.completions.create(
            model="tiny", messages=CHAT, max_tokens=1, tools=tools,
            extra_body={"chat_template_kwargs": {"mood": "calm"}}, **keywords,
        )  # fmt: skip
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    def num_tokens(text: str) -> int:
        return len(engine.tokenizer(text + CHAT[0]["content"])["input_ids"])

    assert num_prompt_tokens() == num_tokens("weather in calm")
    assert num_prompt_tokens(tool_choice="none") == num_tokens("calm")


def test_a_template_variable_cannot_take_over_the_call(engine: QLLMEngine) -> None:
    with pytest.raises(InvalidRequestError, match="'tokenize' is no variable"):
        render_chat(CHAT, engine.tokenizer, variables={"tokenize": False})


def test_tokenize_and_back(served: Serving) -> None:
    text = "def f(x): return 'ä'"
    made = served.post("/tokenize", {"prompt": text}).json()
    assert made["count"] == len(made["tokens"]) > 3
    assert served.post("/detokenize", {"tokens": made["tokens"]}).json() == {"prompt": text}
    chat = served.post("/tokenize", {"messages": CHAT}).json()
    back = served.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
    assert back.startswith("<|im_start|>user\nWhat does")
    wrong = served.post("/detokenize", {"tokens": [3071, 3072]})
    assert wrong.status_code == 400
    assert "3072" in wrong.json()["error"]["message"]


@pytest.fixture
def submitted(
    engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, dict[str, Any]]]:
    """Thread and keywords of every `submit` from now on."""
    found: list[tuple[str, dict[str, Any]]] = []
    submit = engine.submit

    def spy(*args: Any, **keywords: Any) -> Any:
        found.append((threading.current_thread().name, keywords))
        return submit(*args, **keywords)

    monkeypatch.setattr(engine, "submit", spy)
    return found


def test_all_but_the_smallest_texts_are_made_into_tokens_off_the_event_loop(
    served: Serving, submitted: list[tuple[str, dict[str, Any]]]
) -> None:
    for priority in ("LS", "BE"):
        for prompt in ("a" * 256, "a" * SHORT):
            served.post("/v1/completions", {"prompt": prompt, "n": 2, "max_tokens": 1},
                        headers={"x-qllm-priority": priority})  # fmt: skip
    threads = ("qllm-short-LS", "qllm-text-LS", "qllm-short-BE", "qllm-text-BE")
    assert [name.rpartition("_")[0] for name, _ in submitted] == [x for x in threads for _ in "ab"]


# -- classes


@pytest.mark.parametrize(
    ("fields", "header", "served_as", "tier"),
    [
        ({}, None, "LS", "default"),
        ({"service_tier": "auto"}, None, "LS", "default"),
        ({"service_tier": "default"}, None, "LS", "default"),
        ({"service_tier": "priority"}, None, "LS", "priority"),
        ({"service_tier": "flex"}, None, "BE", "flex"),
        ({"priority": 0}, None, "LS", "default"),
        ({"priority": 3}, None, "BE", "flex"),
        ({"priority": -1, "service_tier": "priority"}, None, "LS", "priority"),
        ({}, "BE", "BE", "flex"),
        ({"service_tier": "flex"}, "ls", "LS", "default"),
        ({"service_tier": "priority"}, "BE", "BE", "flex"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_class_is_chosen_and_told(
    served: Serving, fields: Any, header: str | None, served_as: str, tier: str, stream: bool
) -> None:
    headers = {} if header is None else {"x-qllm-priority": header}
    body = {"messages": CHAT, "max_tokens": 1, "stream": stream, **fields}
    answer = served.post("/v1/chat/completions", body, headers=headers)
    assert answer.headers["x-qllm-priority"] == served_as
    assert f'"service_tier":"{tier}"' in answer.text
    wait_for(lambda: served.front._num_ls == 0)


def test_the_engine_is_told_the_class(served: Serving, client: openai.OpenAI) -> None:
    def num_done(label: str) -> float:
        name = "qllm:request_success_total"
        return served.metric(name, **{"class": label, "finished_reason": "length"})

    wait_for(lambda: not served.front._settling)
    before = {label: num_done(label) for label in ("LS", "BE")}
    client.completions.create(
        model="tiny", prompt="a", max_tokens=1, extra_body={"service_tier": "flex"}
    )
    wait_for(lambda: not served.front._settling)
    assert (num_done("LS"), num_done("BE")) == (before["LS"], before["BE"] + 1)


def test_the_engine_is_told_the_targets(
    served: Serving, submitted: list[tuple[str, dict[str, Any]]]
) -> None:
    for slo in ({"ttft_ms": 500, "tpot_ms": 100.5}, {"tpot_ms": 9}, None):
        body = {"messages": CHAT, "max_tokens": 1, "slo": slo}
        assert served.post("/v1/chat/completions", body).status_code == 200
        body = {"prompt": "a", "max_tokens": 1, "slo": slo}
        assert served.post("/v1/completions", body).status_code == 200
    wanted = (Slo(500.0, 100.5), Slo(None, 9.0), None)
    assert [how["slo"] for _, how in submitted] == [slo for slo in wanted for _ in range(2)]


# -- failures on the way, disconnects


class Failing:
    """A handle that fails after a piece."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def at(self, position: int) -> Piece:
        if position:
            raise self.error
        return Piece("a", (1,), ())

    def listen(self, wake: Any) -> None:
        self.wake = wake

    def unlisten(self, wake: Any) -> None:
        assert wake == self.wake
        del self.wake


@pytest.mark.parametrize("error", [RequestFailedError("it failed twice"), RuntimeError("a bug")])
def test_a_failure_reaches_the_reader(error: Exception) -> None:
    handle: Any = Failing(error)

    async def read() -> Any:
        served, explain = Served(Priority.LS), lambda _, e: from_engine(e)
        answer = Answer([handle], 1, served, lambda _: None, explain, lambda: 0)
        return [item async for item in answer.pieces()]

    with pytest.raises((ApiError, RuntimeError), match=str(error)) as raised:
        asyncio.run(read())
    assert getattr(raised.value, "status_code", 500) == 500
    assert not hasattr(handle, "wake")  # nobody listens any more


def test_a_request_that_fails_in_the_engine() -> None:
    with tiny_engine(policy=Broken()) as engine, serving(engine) as served:
        client = served.client()
        with pytest.raises(openai.InternalServerError, match="no such request"):
            client.completions.create(model="tiny", prompt="a")
        with pytest.raises(openai.APIError, match="no such request"):
            list(client.completions.create(model="tiny", prompt="a", stream=True))
        labels = {"class": "LS", "finished_reason": "error"}
        wait_for(lambda: served.metric("qllm:request_success_total", **labels) == 2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels(served: Serving, engine: QLLMEngine, stream: bool) -> None:
    def num_cancelled() -> float:
        labels = {"class": "LS", "finished_reason": "cancelled"}
        return served.metric("qllm:request_success_total", **labels)

    before = num_cancelled()
    client = HTTPConnection(served.url.removeprefix("http://"), timeout=60)
    client.request(
        "POST", "/v1/completions", json.dumps({**ENDLESS, "stream": stream, "n": 2}), KIND
    )
    if stream:
        assert client.getresponse().read(1)
    wait_for(lambda: served.front.answers)
    client.close()
    wait_for(lambda: is_idle(engine))
    wait_for(lambda: num_cancelled() == before + 2)
    assert not served.front.answers


def test_a_client_that_leaves_before_its_request_is_submitted(
    served: Serving, engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, asked, go, handles = engine.submit, threading.Event(), threading.Event(), []

    def late(*args: Any, **keywords: Any) -> Any:
        asked.set()
        go.wait(60)
        handles.append(submit(*args, **keywords))
        return handles[-1]

    monkeypatch.setattr(engine, "submit", late)
    client = HTTPConnection(served.url.removeprefix("http://"), timeout=60)
    client.request("POST", "/v1/completions", json.dumps(ENDLESS | {"bad_words": ["x"]}), KIND)
    wait_for(asked.is_set)  # on a thread, where words are looked up: not on the event loop
    client.close()
    wait_for(lambda: served.front._num_ls == 0 and not handles)
    go.set()
    wait_for(lambda: handles and handles[0].finish_reason == "cancelled" and is_idle(engine))


def test_a_request_over_its_time_is_504(engine: QLLMEngine) -> None:
    with serving(engine, request_timeout_s=0.3) as served:
        answer = served.post("/v1/completions", ENDLESS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        with pytest.raises(openai.APIError, match="longer than"):
            list(
                served.client().completions.create(
                    **LONG, stream=True, extra_body={"ignore_eos": True}
                )
            )  # fmt: skip


def test_a_request_to_which_no_token_comes_is_504(holding: Holding) -> None:
    with serving(holding.engine, silence_timeout_s=0.3) as served:
        answer = served.post("/v1/completions", ENDLESS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        wait_for(lambda: served.front._num_ls == 0)


def test_the_drain_lets_a_stream_end(engine: QLLMEngine) -> None:
    with serving(engine) as served, served.client() as client:
        chunks = client.completions.create(
            model="tiny", prompt="x", max_tokens=200, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(chunks)
        served.server.should_exit = True
        rest = list(chunks)
        assert rest[-2].choices[0].finish_reason == "length"
        assert rest[-1].usage is not None
        assert rest[-1].usage.completion_tokens == 200
        wait_for(lambda: not served.server.started or served.front.draining.is_set())
    assert is_idle(engine)


def test_a_drain_that_takes_too_long_tells_the_clients(engine: QLLMEngine) -> None:
    with serving(engine, drain_s=0) as served, served.client() as client:
        chunks = client.completions.create(**LONG, stream=True, extra_body={"ignore_eos": True})
        next(chunks)
        served.server.should_exit = True
        with pytest.raises(openai.APIError, match="shutting down"):
            list(chunks)
    assert is_idle(engine)


def test_an_answer_does_not_wait_for_the_clients_ack(engine: QLLMEngine) -> None:
    with serving(engine) as served, httpx.Client(timeout=60) as client:
        assert client.get(f"{served.url}/version").status_code == 200
        (connection,) = served.server.server_state.connections  # kept alive
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_probes(served: Serving) -> None:
    assert served.get("/health").status_code == served.get("/ready").status_code == 200
    assert served.get("/version").json()["version"]
    engine = tiny_engine()
    with serving(engine) as other:
        engine.close()
        answer = other.get("/ready")
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        assert other.get("/health").status_code == 503


def test_metrics_of_an_engine_that_is_gone(
    served: Serving, engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> None:
        raise EngineClosedError("the engine was closed")

    monkeypatch.setattr(engine, "stats", gone)
    assert "qllm:request_success_total" in served.get("/metrics").text


def test_only_text_parts() -> None:
    message = {"role": "user", "content": "plain"}
    assert flat_message(message) is message
