"""Requests whose engine is killed: what they ask, and how their answers are read."""

import json
import os
import signal
import threading
from typing import Any

import httpx

from tests.support.engines import pid_of
from tests.support.serving import Serving
from tests.support.waiting import wait_for

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

SETTINGS: dict[str, Any] = {
    "max_kv_tokens": 16384, "conformance": False, "exactness": "batch-invariant",
}  # fmt: skip

NUM = 400
"""Tokens of an answer: many more than are made between its first event and a kill."""

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7}

WORDS = {"guided_regex": "([a-z]{1,6} ){400,600}"}

PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2}


def body(number: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt": f"def f{number}(" * (number + 1),
        "max_tokens": NUM,
        "ignore_eos": True,
        **more,
    }


Asks = list[tuple[str, dict[str, Any]]]

ASKS: Asks = [
    (COMPLETIONS, body(0, temperature=0, stream=True)),
    (COMPLETIONS, body(1, **SAMPLED, stream=True)),
    (COMPLETIONS, body(2, **SAMPLED, stream=True, service_tier="flex")),
    (COMPLETIONS, body(3, **SAMPLED, **PENALTIES, stream=True, logprobs=2)),
    (COMPLETIONS, body(4, temperature=0, **PENALTIES, stream=True, service_tier="flex")),
    (COMPLETIONS, body(5, **SAMPLED, n=2, service_tier="flex")),
    (COMPLETIONS, {"prompt": "x", "max_tokens": NUM, "stream": True, **SAMPLED, **WORDS}),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Hi"}], "max_tokens": NUM, "stream": True,
            "ignore_eos": True, **SAMPLED,
        },
    ),
]  # fmt: skip


class Client(threading.Thread):
    """Asks one thing and reads the answer as it comes."""

    def __init__(self, served: Serving, path: str, asked: dict[str, Any]) -> None:
        super().__init__()
        self.url, self.asked = f"{served.url}{path}", dict(asked)
        if asked.get("stream"):
            self.asked["stream_options"] = {"include_usage": True}
        self.status = 0
        self.events: list[Any] = []
        self.start()

    def run(self) -> None:
        with httpx.Client(timeout=600) as client:
            if not self.asked.get("stream"):
                answer = client.post(self.url, json=self.asked)
                self.status, self.events = answer.status_code, [answer.json()]
                return
            with client.stream("POST", self.url, json=self.asked) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line and not line.startswith(":"):  # a comment in a silence
                        data = line.removeprefix("data: ")
                        self.events.append(data if data == "[DONE]" else json.loads(data))

    def answer(self) -> Any:
        """All that it says of its choices: text, log-probabilities, reason; and its usage."""
        self.join(600)
        assert not self.is_alive()
        assert self.status == 200, self.events
        if not self.asked.get("stream"):
            (whole,) = self.events
            return whole["usage"], [(c["text"], c["finish_reason"]) for c in whole["choices"]]
        assert self.events[-1] == "[DONE]", self.events[-1]
        text, reasons, logprobs = "", [], []
        for event in self.events[:-2]:
            for choice in event["choices"]:
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
        return self.events[-2]["usage"], text, reasons, logprobs

    def error(self) -> Any:
        """The error that ended it."""
        self.join(600)
        return self.events[-1]["error"]

    @property
    def has_begun(self) -> bool:
        return not self.asked.get("stream") or bool(self.events)


def kill(served: Serving) -> None:
    os.kill(pid_of(served.front.engine), signal.SIGKILL)


def ask_all(served: Serving, asks: Asks = ASKS) -> list[Client]:
    return [Client(served, *ask) for ask in asks]


def ask_until_they_run(served: Serving, asks: Asks = ASKS) -> list[Client]:
    clients = ask_all(served, asks)
    wait_for(lambda: all(client.has_begun for client in clients))
    return clients
