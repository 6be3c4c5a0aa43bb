"""A real server on a free port, in a thread, for the tests of `qllm.server`."""

import asyncio
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import httpx
import openai

from qllm.llm import QLLMEngine
from qllm.server.app import create_app
from qllm.server.config import load_config
from qllm.server.ops.run import Server, make_server
from qllm.server.requests.front import Front
from qllm.server.serve import bound_socket, make_engines
from tests.support.waiting import wait_for

CHAT = [{"role": "user", "content": "a"}]


def bodies(max_tokens: int) -> dict[str, dict[str, Any]]:
    """Return a short request for each route that answers."""
    return {
        "/v1/chat/completions": {"messages": CHAT, "max_tokens": max_tokens},
        "/v1/completions": {"prompt": "a", "max_tokens": max_tokens},
        "/v1/messages": {"model": "tiny", "messages": CHAT, "max_tokens": max_tokens},
        "/v1/responses": {"input": "a", "max_output_tokens": max_tokens},
    }


OVER = ("completed", "failed", "cancelled", "expired")
"""States that a batch does not leave."""


class Serving(NamedTuple):
    url: str
    server: Server
    front: Front

    def client(self, api_key: str = "none") -> openai.OpenAI:
        """A client whose connections end with it: who drops one need not close it."""
        http = openai.DefaultHttpxClient()
        url = f"{self.url}/v1"
        client = openai.OpenAI(base_url=url, api_key=api_key, max_retries=0, http_client=http)
        weakref.finalize(client, http.close)
        return client

    def post(self, path: str, body: Any, **keywords: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, **keywords)

    def get(self, path: str, **keywords: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60, **keywords)

    def metric(self, name: str, model: str = "tiny", **labels: str) -> float:
        self.get("/metrics")
        registry = self.front.metrics.registry
        return registry.get_sample_value(name, {"model_name": model, **labels}) or 0.0


def tiny_engine(**settings: Any) -> QLLMEngine:
    return QLLMEngine.from_pretrained("tiny", threads=1, **settings)


@contextmanager
def serving(
    engine: QLLMEngine, make: Callable[[], QLLMEngine] | None = None, **settings: Any
) -> Iterator[Serving]:
    config = load_config(None, {}, {"model": "tiny", "port": 0, "drain_s": 20, **settings})
    with running(make_server(create_app(engine, config, make), config), config.host) as made:
        yield made


@contextmanager
def serving_models(**settings: Any) -> Iterator[Serving]:
    """Serve several models, each with an engine that is made here and closed at the end."""
    given = {"model": "tiny", "port": 0, "drain_s": 20, "restart_backoff_s": 0, **settings}
    config = load_config(None, {}, given)
    first, *others = models = make_engines(config)
    try:
        app = create_app(*first, others)
        with running(make_server(app, first.config), config.host) as made:
            yield made
            for front in made.front.all:
                front.engine.close()
    finally:
        for model in models:
            model.engine.close()


@contextmanager
def running(server: Server, host: str) -> Iterator[Serving]:
    """Run a server in a thread until the end of the block."""
    with bound_socket(host, 0) as sock:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        thread.start()
        try:
            wait_for(lambda: server.started or not thread.is_alive())
            port = sock.getsockname()[1]
            yield Serving(f"http://127.0.0.1:{port}", server, server.config.app.state.front)
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive(), "the server did not end"


def forget_all(served: Serving) -> None:
    """End the batches and delete the files that a test left at a server without keys."""

    def is_over(batch_id: str) -> bool:
        return client.batches.retrieve(batch_id).status in OVER

    with served.client() as client:
        for batch in client.batches.list():
            if batch.status not in OVER:
                with suppress(openai.ConflictError):  # it has just ended by itself
                    client.batches.cancel(batch.id)
                wait_for(functools.partial(is_over, batch.id))
        for file in client.files.list():
            client.files.delete(file.id)
