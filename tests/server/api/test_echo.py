"""`echo` with `logprobs` over HTTP, and a model of several names."""

import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from qllm.errors import ConfigError, InvalidRequestError
from qllm.frontend.prompts import refuse_unserved
from qllm.llm import QLLMEngine
from qllm.server.api.completions import CompletionWriter
from qllm.server.config import load_config
from qllm.types import SamplingParams
from tests.support.serving import Serving, serving

pytestmark = pytest.mark.usefixtures("engine")  # each test leaves the shared engine idle

TEXT = "What does json.dumps do?"
NAMES = ["tiny", "gpt-3.5-turbo-instruct", "models/other"]


@pytest.fixture(scope="module")
def named(shared_engine: QLLMEngine) -> Iterator[Serving]:
    with serving(shared_engine, served_model_name=NAMES) as serving_:
        yield serving_


def ask(served: Serving, **fields: Any) -> Any:
    body = {"prompt": TEXT, "echo": True, "temperature": 0, "max_tokens": 4, **fields}
    answer = served.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_an_echo_has_the_log_probabilities_of_the_prompt(
    named: Serving, engine: QLLMEngine, num_top: int
) -> None:
    params = SamplingParams(temperature=0, logprobs=num_top, prompt_logprobs=num_top)
    expected = engine.submit(TEXT, "LS", 4, sampling=params).result(300)
    (choice,) = ask(named, logprobs=num_top)["choices"]
    ids, found = [*expected.prompt_token_ids, *expected.token_ids], choice["logprobs"]
    assert found["tokens"] == [engine.tokenizer.decode([i]) for i in ids]
    assert expected.prompt_logprobs is not None
    assert expected.logprobs is not None
    known = [*expected.prompt_logprobs, *expected.logprobs]
    assert found["token_logprobs"] == [None if x is None else x.chosen for x in known]
    assert found["top_logprobs"][0] is None
    for shown, logprobs, token in zip(
        found["top_logprobs"][1:], known[1:], found["tokens"][1:], strict=True
    ):
        assert logprobs is not None
        values = [value for _, value in logprobs.top]
        assert set(shown.values()) <= {*values, logprobs.chosen}
        assert shown[token] >= logprobs.chosen
        assert max(shown.values()) == max([*values, logprobs.chosen])
    starts = found["text_offset"]
    pieces = [choice["text"][a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    assert starts[0] == 0
    assert pieces == found["tokens"]
    assert choice["text"] == TEXT + expected.text


def test_a_stream_says_the_same(named: Serving) -> None:
    asked: dict[str, Any] = {"n": 2, "prompt": [TEXT, "def main():"], "logprobs": 2}
    choices = ask(named, **asked)["choices"]
    streamed: list[dict[str, Any]] = [{} for _ in choices]
    with named.client() as client:
        for part in client.completions.create(
            model="tiny", echo=True, temperature=0, max_tokens=4, stream=True, **asked
        ):
            (choice,) = part.choices
            into = streamed[choice.index]
            into["text"] = into.get("text", "") + choice.text
            if choice.logprobs is not None:
                for name, values in choice.logprobs.model_dump().items():
                    into.setdefault(name, []).extend(values)
    for whole, parts in zip(choices, streamed, strict=True):
        assert parts == {"text": whole["text"], **whole["logprobs"]}


def test_no_token_is_asked_for_and_none_is_shown(named: Serving, engine: QLLMEngine) -> None:
    ids = engine.tokenizer(TEXT)["input_ids"]
    more = ask(named, prompt=[ids, ids[:1], ids[:5]], logprobs=1, max_tokens=1)
    none = ask(named, prompt=[ids, ids[:1], ids[:5]], logprobs=1, max_tokens=0)
    for choice, longer, num in zip(none["choices"], more["choices"], (len(ids), 1, 5), strict=True):
        assert choice["text"] == engine.tokenizer.decode(ids[:num])
        assert choice["finish_reason"] == "length"
        for name, values in choice["logprobs"].items():
            assert len(values) == num
            assert values == longer["logprobs"][name][:num]
    assert none["usage"]["completion_tokens"] == 0
    assert none["usage"]["prompt_tokens"] == more["usage"]["prompt_tokens"] == len(ids) + 6
    plain = ask(named, max_tokens=0)
    assert plain["choices"][0]["text"] == TEXT
    assert plain["choices"][0]["logprobs"] is None
    with named.client() as client:
        parts = list(
            client.completions.create(
                model="tiny", prompt=TEXT, echo=True, max_tokens=0, logprobs=1, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
    assert "".join(p.choices[0].text for p in parts if p.choices) == TEXT
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 0


def test_the_loop_on_the_device_refuses_it_by_name() -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt_logprobs: not served.*loop='host'"):
        refuse_unserved("conditional", SamplingParams(prompt_logprobs=0), 1)


# -- names


def test_every_name_is_listed_and_accepted(named: Serving) -> None:
    with named.client() as client:
        assert [model.id for model in client.models.list()] == NAMES
        for name in NAMES:
            assert client.models.retrieve(name).id == name
            answer = client.completions.create(model=name, prompt="a", max_tokens=1)
            assert answer.model == "tiny", "the first name, as vLLM answers"
            chat = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "a"}], max_tokens=1
            )
            assert chat.model == "tiny"
        with pytest.raises(openai.NotFoundError, match=r"use 'tiny', 'gpt-3\.5-turbo-instruct'"):
            client.models.retrieve("gpt-4")
    assert named.post("/tokenize", {"prompt": "a", "model": NAMES[2]}).status_code == 200
    assert named.get("/metrics").text.count('model_name="tiny"')


@pytest.mark.parametrize(
    ("given", "names"),
    [({}, ("m",)), ("a", ("a",)), ("a, b,,a", ("a", "b")), (["b", "a"], ("b", "a"))],
)
def test_names_come_as_one_string_or_as_a_list(given: Any, names: tuple[str, ...]) -> None:
    flags = {"model": "m", **({"served_model_name": given} if given else {})}
    config = load_config(None, {}, flags)
    assert (config.model_names, config.model_name) == (names, names[0])
    if isinstance(given, str):
        environ = {"QLLM_MODEL": "m", "QLLM_SERVED_MODEL_NAME": given}
        assert load_config(None, environ, {}).model_names == names


@pytest.mark.parametrize("given", [["a", ""], [1], "[1]", {"a": 1}])
def test_a_name_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="served_model_name"):
        load_config(None, {}, {"model": "m", "served_model_name": given})


@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_prompt_is_shown_off_the_event_loop(
    named: Serving, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    threads: list[str] = []
    show = CompletionWriter._shown_prompt

    def seen(self: CompletionWriter, *args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return show(self, *args)

    monkeypatch.setattr(CompletionWriter, "_shown_prompt", seen)
    body = {"prompt": TEXT, "echo": True, "logprobs": 2, "max_tokens": 2, "stream": stream}
    assert named.post("/v1/completions", body).status_code == 200
    assert threads
    assert all("text" in name for name in threads), threads
