"""Longest stops of an LS stream and of a server's loop by the worst bodies of other clients.

One client reads an LS stream and asks GET /version without a pause, on connections that stay open.
Four other clients send one kind of body as fast as they are answered, as best effort. Times with
and without them alternate. The bench measures the longest time between two events of the stream,
and the longest answer of GET /version; a row has the medians over the rounds.

    python -m bench.serving.worst_bodies [--rounds 5] [--seconds 2] [--out FILE]

The last line of stdout is one JSON document.
"""

import argparse
import http.client
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from typing import Any
from urllib.parse import urlsplit

from bench.common import (
    Line,
    busy_cores,
    machine,
    print_result,
    result_file,
    with_lines,
)
from bench.serving.qllm_serve import serving

MORE_MS, MOST_MS = 20.0, 50.0
"""Longest gaps, in ms: beyond those of the same run without the bodies, and in all if idle."""
AT_ONCE = 4
LIMIT = 4 << 20
"""Value of `max_body_bytes`, less some fields."""
TURN = {"role": "user", "content": "a"}
FLEX = {"service_tier": "flex"}
JSON = {"Content-Type": "application/json"}


def _many(item: Any, num_bytes: int = LIMIT) -> list[Any]:
    return [item] * ((num_bytes - 1000) // (len(json.dumps(item)) + 2))


def kinds() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return path and body of each attack."""
    done = {"max_tokens": 1, **FLEX}
    return {
        "one prompt of 1 MB": ("/v1/completions", {"prompt": "word " * 200_000, **done}),
        "one prompt of 4 MB": ("/v1/completions", {"prompt": "word " * 800_000, **done}),
        "one letter": ("/v1/completions", {"prompt": "a" * (LIMIT - 1000), **done}),
        "lists": ("/v1/completions", {"prompt": _many([]), **done}),
        "token ids": ("/v1/completions", {"prompt": _many(1), **done}),
        "a chat": ("/v1/chat/completions", {"messages": _many(TURN), **done}),
        "messages": ("/v1/messages", {"model": "tiny", "messages": _many(TURN), "max_tokens": 1}),
        "messages, counted": (
            "/v1/messages/count_tokens",
            {"model": "tiny", "messages": _many(TURN)},
        ),
        "a response": ("/v1/responses", {"input": _many(TURN), **FLEX}),
        "ids to text": ("/detokenize", {"tokens": _many(5)}),
        "text to ids": ("/tokenize", {"prompt": "word " * 800_000}),
        "metadata": (
            "/v1/chat/completions",
            {"messages": [TURN], "metadata": {str(i): i for i in range(200_000)}, **done},
        ),
        "a response in the background": (
            "/v1/responses",
            {"input": _many(TURN, 1 << 20), "background": True},
        ),
        "lines of a batch": ("/v1/batches", {"messages": _many(TURN, 3 << 20), "max_tokens": 1}),
    }


def _connect(url: str) -> http.client.HTTPConnection:
    address = urlsplit(url)
    return http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)


def _post(link: http.client.HTTPConnection, path: str, raw: bytes, kind: str) -> bytes:
    link.request("POST", path, raw, {"Content-Type": kind})
    return link.getresponse().read()


def _batch(link: http.client.HTTPConnection, body: dict[str, Any]) -> None:
    """Upload a file of two lines, and start its batch."""
    line = {"custom_id": "0", "method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = "\n".join(json.dumps({**line, "custom_id": str(i)}) for i in range(2))
    parts = [("purpose", "", "batch"), ("file", '; filename="in.jsonl"', lines)]
    form = "".join(
        f'--x\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{text}\r\n'
        for name, more, text in parts
    )
    made = _post(link, "/v1/files", f"{form}--x--\r\n".encode(), "multipart/form-data; boundary=x")
    asked = {"input_file_id": json.loads(made)["id"], "completion_window": "24h"}
    raw = json.dumps({**asked, "endpoint": line["url"]}).encode()
    _post(link, "/v1/batches", raw, JSON["Content-Type"])


def attack(url: str, name: str, goes: Event, ends: Event) -> None:
    """Send bodies of one kind, several at once, whenever `goes` is set, in a separate process."""
    path, body = kinds()[name]
    raw = json.dumps(body).encode()

    def send() -> None:
        link = _connect(url)
        while not ends.is_set():
            if not goes.wait(0.1):
                continue
            if path == "/v1/batches":
                _batch(link, body)
            else:
                _post(link, path, raw, JSON["Content-Type"])

    for _ in range(AT_ONCE):
        threading.Thread(target=send).start()


class Client:
    """A client that reads an LS stream and asks for the version, and records the longest waits."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.longest_ms = {"stream": 0.0, "version": 0.0}
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=do) for do in (self._read, self._ask)]

    def __enter__(self) -> "Client":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def reset(self) -> dict[str, float]:
        """Return the longest gap since the last call."""
        found, self.longest_ms = self.longest_ms, {"stream": 0.0, "version": 0.0}
        return found

    def _note(self, name: str, begin: float) -> float:
        now = time.perf_counter()
        self.longest_ms[name] = max(self.longest_ms[name], (now - begin) * 1e3)
        return now

    def _read(self) -> None:
        body = {"prompt": "def f(", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        while not self._ends.is_set():
            link = _connect(self._url)
            link.request("POST", "/v1/completions", json.dumps(body), JSON)
            answer = link.getresponse()
            last = time.perf_counter()
            while answer.readline() and not self._ends.is_set():
                last = self._note("stream", last)
            link.close()

    def _ask(self) -> None:
        link = _connect(self._url)
        while not self._ends.wait(0.002):
            begin = time.perf_counter()
            link.request("GET", "/version")
            link.getresponse().read()
            self._note("version", begin)


def measured(client: Client, seconds: float) -> dict[str, float]:
    """Return the longest waits of some seconds."""
    client.reset()
    time.sleep(seconds)
    return client.reset()


def row(url: str, name: str, client: Client, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure the longest waits without and with one kind of body, in turns."""
    context = multiprocessing.get_context("spawn")
    goes, ends = context.Event(), context.Event()
    attacker = context.Process(target=attack, args=(url, name, goes, ends))
    attacker.start()
    time.sleep(2)
    found: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for _ in range(rounds):
        found["without"].append(measured(client, seconds))
        goes.set()
        found["with"].append(measured(client, seconds))
        goes.clear()
        time.sleep(1)
    ends.set()
    attacker.join()

    def median(when: str, what: str) -> float:
        return round(statistics.median(some[what] for some in found[when]), 1)

    return {
        what: {when: median(when, what) for when in found} | {"all": found}
        for what in ("stream", "version")
    }


def line(what: str, ms: dict[str, float]) -> Line:
    """Return a row of the result."""
    more = ms["with"] - ms["without"]
    text = f"{more:+.1f} ({ms['with']:.1f}; {ms['without']:.1f} without)"
    return Line(f"{what}, ms", text, f"<= +{MORE_MS:g}", more <= MORE_MS)


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    says: dict[str, Callable[[str], str]] = {
        "stream": lambda name: f"{name}: longest gap of an LS stream",
        "version": lambda name: f"{name}: longest answer of GET /version",
    }
    rows, lines = {}, []
    began, before_s = time.monotonic(), busy_cores()[0]
    with tempfile.TemporaryDirectory() as folder:
        settings = ("tiny", "--threads", "1", "--state-dir", folder)
        with serving(*settings) as server, Client(server.url) as client:
            measured(client, args.seconds)
            for name in kinds():
                rows[name] = row(server.url, name, client, args.rounds, args.seconds)
                for what, say in says.items():
                    lines.append(line(say(name), rows[name][what]))
                    print(*lines[-1], sep="  ", flush=True)
    busy = (busy_cores()[0] - before_s) / (time.monotonic() - began)
    document = {
        "bench": "worst_bodies", "machine": machine(), "model": "tiny", "at_once": AT_ONCE,
        "rounds": args.rounds, "seconds": args.seconds, "busy_cores": round(busy, 2),
        "reach": {"more_ms": MORE_MS, "idle_ms": MOST_MS}, "rows": rows,
    }  # fmt: skip
    print_result(with_lines(document, lines), args.out)


if __name__ == "__main__":
    main()
