"""Small prompts in one turn of the event loop: who is told when, and by which shortcuts."""

import asyncio
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from qllm import QLLMEngine
from qllm.errors import InvalidRequestError
from qllm.frontend.prompts import to_sampling
from qllm.models.tokenizer import ids_of, load_tokenizer
from qllm.names import new_seed, token_hex
from qllm.server.api.answers import respond
from qllm.server.http.connection import Presence
from qllm.server.http.keys import NO_RULE
from qllm.server.requests.ask import EACH, SHORT, Ask, Served
from qllm.server.requests.inline_submit import MOST_CHARS, MOST_HELD, AtOnce
from qllm.types import Priority, SamplingParams
from tests.support.serving import Serving
from tests.support.shm_rig import Rig
from tests.support.waiting import wait_for

TEXTS = ["a", "Hello, world", "<|endoftext|>x</s>", "  spaces\n\n", "ünïcödé 🙂 日本語", "x" * 3000]


class Engine:
    """Notes what it is told, and when."""

    def __init__(self, can_hold: bool = True) -> None:
        self.seen: list[str] = []
        self.client = SimpleNamespace(
            can_hold=can_hold,
            hold=lambda: self.seen.append("hold"),
            release=lambda: self.seen.append("release"),
        )


def ask(**fields: Any) -> Ask:
    return Ask(answer_id="x-1", **fields)


def test_an_engine_is_told_once_of_what_is_put_while_it_is_held() -> None:
    rig = Rig()
    try:
        front_end, control = rig.front_ends[0], rig.control

        def times_told() -> int:
            return int(control.words[control.BELL]) & 0xFF

        front_end.hold()
        for number in range(3):
            rig.submit(number)
        assert times_told() == 0
        front_end.release()
        assert times_told() == 1
        assert len(rig.ingress.drain()) == 3
        front_end.release()  # nothing came since
        assert times_told() == 1
        rig.submit(9)
        assert times_told() == 2
    finally:
        rig.close()


def test_what_is_put_in_one_turn_of_the_loop_is_told_at_its_end() -> None:
    async def turn() -> list[str]:
        engine: Any = Engine()
        at_once = AtOnce()

        async def one(n: int) -> None:
            at_once.run(engine, lambda: engine.seen.append(str(n)))

        await asyncio.gather(*(one(n) for n in range(3)))
        await asyncio.sleep(0)
        return list(engine.seen)

    assert asyncio.run(turn()) == ["hold", "0", "1", "2", "release"]


def test_many_of_one_turn_do_not_wait_for_its_end_and_a_failure_counts() -> None:
    async def turn() -> list[str]:
        engine: Any = Engine()
        at_once = AtOnce()

        def fail() -> None:
            raise InvalidRequestError("wrong")

        with pytest.raises(InvalidRequestError):
            at_once.run(engine, fail)
        for _ in range(MOST_HELD - 1):
            at_once.run(engine, lambda: None)
        return list(engine.seen)

    assert asyncio.run(turn()) == ["hold", "release"]


def test_another_engine_is_held_once_the_first_was_told() -> None:
    async def turn() -> tuple[list[str], list[str]]:
        first: Any = Engine()
        second: Any = Engine()
        at_once = AtOnce()
        at_once.run(first, lambda: None)
        at_once.run(second, lambda: None)
        now = list(first.seen)
        await asyncio.sleep(0)
        return now, second.seen

    assert asyncio.run(turn()) == (["hold", "release"], ["hold", "release"])


def test_an_engine_is_told_before_its_answer_is_prepared() -> None:
    async def turn() -> list[str]:
        engine: Any = Engine()
        answer = SimpleNamespace(served=Served(Priority.LS), course=None, close=lambda: None)
        at_once = AtOnce()

        async def opened(*_: Any) -> Any:
            at_once.run(engine, lambda: None)
            return answer

        renderer = SimpleNamespace(answer_id="x", serve=lambda *_: engine.seen.append("serve"))
        renderer.events = lambda *_: None
        config = SimpleNamespace(objectives={}, comment_s=1.0, stalled_client_s=1.0)
        config.silence_timeout_s = None
        told = SimpleNamespace(headers=lambda _: {})
        front: Any = SimpleNamespace(config=config, open=opened, told=told, headers=dict)
        front.rule_of = lambda _: NO_RULE
        body = SimpleNamespace(stream=True, service_tier=None, asked_class=lambda: None, lossy=None)
        body.all_unserved = []
        scope = {"type": "http", "headers": [], "state": {"caller": "", "presence": Presence()}}
        await respond(Request(scope), front, renderer, body, ask())
        return list(engine.seen)

    assert asyncio.run(turn()) == ["hold", "release", "serve"]


@pytest.mark.parametrize(
    ("fields", "takes"),
    [
        ({"prompts": ["a" * (MOST_CHARS - EACH)]}, True),
        ({"prompts": ["a" * (MOST_CHARS - EACH + 1)]}, False),
        ({"prompts": [[1] * (MOST_CHARS - EACH)]}, True),
        ({"prompts": ["a"] * 100}, False),
        ({"prompts": ["a"], "n": 100}, False),
        ({"messages": [{"role": "user", "content": "a"}]}, True),
        ({"messages": [{"role": "user", "content": None}]}, False),
        ({"prompts": ["a"], "template": {"tools": []}}, False),
        ({"prompts": ["a"], "sampling": {"bad_words": ["x"]}}, False),
        ({"prompts": ["a"], "sampling": {"structured_outputs": object()}}, False),
        ({"opened": SimpleNamespace(num_bytes=1)}, False),
    ],
)
def test_what_is_made_into_tokens_on_the_event_loop(fields: Any, takes: bool) -> None:
    engine: Any = Engine()
    assert AtOnce.takes(engine, ask(**fields)) is takes
    far: Any = Engine(can_hold=False)
    assert not AtOnce.takes(far, ask(**fields))
    assert MOST_CHARS < SHORT


def test_a_small_prompt_is_submitted_on_the_event_loop_and_answered(
    served: Serving,
    engine: QLLMEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, submit = [], engine.submit

    def spy(*args: Any, **keywords: Any) -> Any:
        names.append(threading.current_thread().name)
        return submit(*args, **keywords)

    monkeypatch.setattr(engine, "submit", spy)
    body = {"prompt": "a", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    assert served.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 2
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    assert served.post("/v1/chat/completions", chat).status_code == 200
    wrong = served.post("/v1/completions", {**body, "prompt": ""})
    assert wrong.status_code == 400
    assert served.post("/v1/completions", body).status_code == 200
    assert len(names) == 4
    assert not any(name.startswith("qllm-") for name in names)
    wait_for(lambda: served.front._num_ls == 0)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_whole_tokenizer(text: str) -> None:
    tokenizer: Any = load_tokenizer("tiny")
    assert ids_of(tokenizer, text) == list(tokenizer(text)["input_ids"])


def test_a_tokenizer_that_would_do_more_is_asked_whole() -> None:
    tokenizer: Any = load_tokenizer("tiny")
    whole = list(tokenizer("a b c d e f")["input_ids"])
    for change in (
        lambda t: t.backend_tokenizer.enable_truncation(2),
        lambda t: t.backend_tokenizer.enable_padding(length=50),
    ):
        change(tokenizer)
        assert ids_of(tokenizer, "a b c d e f") == whole
    special = tokenizer.all_special_tokens[0]
    tokenizer.split_special_tokens = True
    assert ids_of(tokenizer, special) == list(tokenizer(special)["input_ids"])
    other: Any = load_tokenizer("tiny")
    assert ids_of(tokenizer, special) != list(other(special)["input_ids"])
    call = {"__call__": lambda *_, **__: {"input_ids": [7]}}
    tokenizer.__class__ = type("Other", (type(tokenizer),), call)
    assert ids_of(tokenizer, "a") == [7]


def test_a_seed_is_drawn_and_all_else_is_the_same() -> None:
    asked = SamplingParams(temperature=0.5, top_k=3, stop=("x",), logit_bias={1: 2.0})
    made = to_sampling(asked)
    assert made.seed is not None
    assert (
        SamplingParams(temperature=0.5, top_k=3, stop=("x",), logit_bias={1: 2.0}, seed=made.seed)
        == made
    )
    assert to_sampling(asked).seed != made.seed
    assert to_sampling(made) is made


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1}, {"temperature": "1"}, {"seed": -1}, {"seed": 2**63}, {"seed": 1.0},
        {"ignore_eos": 1}, {"top_k": True}, {"top_p": 2.0}, {"n": True}, {"min_tokens": False},
        {"include_stop_str_in_output": 0},
    ],
)  # fmt: skip
def test_what_is_not_as_usual_is_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        SamplingParams(**wrong)


def test_names_differ_in_a_process_that_was_forked() -> None:
    assert len({token_hex(12) for _ in range(100)}) == 100
    assert all(len(token_hex(1)) == 2 for _ in range(300))
    assert all(0 <= new_seed() < 2**62 for _ in range(100))
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(theirs, token_hex(16).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    told = os.read(ours, 64).decode()
    os.close(ours)
    os.close(theirs)
    assert len(told) == 32
    assert told != token_hex(16)


def test_a_client_that_went_before_anybody_asked_is_gone() -> None:
    seen: list[str] = []
    presence = Presence()
    presence.tell_when_gone(lambda: seen.append("first"))()
    presence.leave()
    assert seen == []
    presence.tell_when_gone(lambda: seen.append("second"))
    assert seen == ["second"]
