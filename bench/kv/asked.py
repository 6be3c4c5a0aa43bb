"""Servers that answer the chats of a row: our engine, or vLLM's server on the same machine."""

import http.client
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from bench.kv.parts import GREEDY, PAGE
from bench.serving.servers import PEERS, Peer, Place, free_port, installed, platform, serving
from qllm import QLLMEngine
from qllm.measure.random_moe import cache_dir
from qllm.types import Priority

TIMEOUT_S = 600


class Turn(NamedTuple):
    """One answer."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    ttft_ms: float
    num_cached: int
    """Number of prompt tokens that came from the cache."""

    @property
    def all_ids(self) -> list[int]:
        """Return the conversation so far."""
        return [*self.prompt, *self.token_ids]


class Asked(Protocol):
    """A server that answers greedily, to the full length."""

    def chat(self, ids: Sequence[int], num: int) -> Turn:
        """Answer one LS request."""
        ...

    def batch(self, prompts: Sequence[Sequence[int]], num: int) -> None:
        """Run BE requests, all at once; return when the last has ended."""
        ...


class Ours:
    """Our engine."""

    def __init__(self, engine: QLLMEngine) -> None:
        self._engine = engine

    def chat(self, ids: Sequence[int], num: int) -> Turn:
        """See `Asked`."""
        found = self._engine.submit(list(ids), "LS", num, sampling=GREEDY).result(TIMEOUT_S)
        m = found.metrics
        return Turn(tuple(ids), found.token_ids, m.ttft_ms or 0.0, m.num_cached_tokens)

    def batch(self, prompts: Sequence[Sequence[int]], num: int) -> None:
        """See `Asked`."""
        handles = [self._engine.submit(list(ids), "BE", num, sampling=GREEDY) for ids in prompts]
        for handle in handles:
            handle.result(TIMEOUT_S)


class Vllm:
    """A server of vLLM on this machine; times are the client's.

    Args:
        port: Port of the server.
    """

    def __init__(self, port: int) -> None:
        self._port = port

    def _send(self, priority: Priority, **body: Any) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        fixed = {"model": "moe", "temperature": 0, "ignore_eos": True, "priority": int(priority)}
        text = json.dumps({**fixed, **body})
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"vLLM: HTTP {answer.status}: {answer.read()[:300]!r}")
        return answer

    def chat(self, ids: Sequence[int], num: int) -> Turn:
        """See `Asked`."""
        start = time.perf_counter()
        more = {"return_token_ids": True, "stream_options": {"include_usage": True}}
        answer = self._send(Priority.LS, prompt=list(ids), max_tokens=num, stream=True, **more)
        tokens, ttft_ms, usage = list[int](), 0.0, dict[str, Any]()
        for event in _events(answer):
            for choice in event["choices"]:
                new = choice.get("token_ids") or []
                if new and not tokens:
                    ttft_ms = 1e3 * (time.perf_counter() - start)
                tokens += new
            usage = event.get("usage") or usage
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Turn(tuple(ids), tuple(tokens), ttft_ms, cached)

    def batch(self, prompts: Sequence[Sequence[int]], num: int) -> None:
        """See `Asked`."""
        self._send(Priority.BE, prompt=[list(ids) for ids in prompts], max_tokens=num).read()


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in answer:
        data = line.strip().removeprefix(b"data:").strip()
        if data.startswith(b"{"):
            yield json.loads(data)


@contextmanager
def vllm(model: str, kv_tokens: int, threads: int) -> Iterator[tuple[Vllm, str | None]]:
    """Start a server of vLLM with so many tokens of KV; yield it and its kernels' name.

    Raises:
        InstallError: vLLM cannot be installed, or does not serve; the message has the reason.
    """
    peer: Peer = PEERS["vllm"]
    home = installed(peer, cache_dir() / "peers")
    size = ["--block-size", str(PAGE), "--num-gpu-blocks-override", str(kv_tokens // PAGE)]
    tell = ["--enable-prompt-tokens-details", "--enable-prefix-caching"]
    peer = replace(peer, command=lambda place: [*PEERS["vllm"].command(place), *size, *tell])
    place = Place(home, Path(model), free_port(), threads)
    with (
        tempfile.TemporaryDirectory(prefix="qllm-vllm-") as folder,
        serving(peer, place, Path(folder) / "log"),
    ):
        yield Vllm(place.port), platform(PEERS["vllm"], home)
