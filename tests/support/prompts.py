"""Prompts that a client sends in pieces over HTTP."""

import json
import socket
from typing import Any

import httpx

from tests.support.serving import Serving

ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}

NDJSON = {"Content-Type": "application/x-ndjson"}

PLAIN = "/v1/completions"


def lines(*values: Any) -> bytes:
    return b"".join(json.dumps(value, ensure_ascii=False).encode() + b"\n" for value in values)


def post(served: Serving, path: str, body: Any, **how: Any) -> httpx.Response:
    return httpx.post(f"{served.url}{path}", content=body, headers=NDJSON, timeout=60, **how)


def message(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


class Slow:
    """A client that sends a chunked body piece by piece."""

    def __init__(self, served: Serving, path: str = PLAIN) -> None:
        host, port = served.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.settimeout(60)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        self.socket.sendall(f"{head}Content-Type: application/x-ndjson\r\n\r\n".encode())

    def __enter__(self) -> "Slow":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(b"%x\r\n%s\r\n" % (len(data), data))

    def answer(self) -> bytes:
        found = b""
        while part := self.socket.recv(65536):
            found += part
            if b"\r\n0\r\n\r\n" in found or found.endswith(b"}"):
                break
        return found
