"""Lines and records of batches over HTTP."""

import io
import json
from typing import Any

import openai

from tests.support.waiting import wait_for

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"


def line(number: int, url: str = COMPLETIONS, **body: Any) -> str:
    body = {"model": "tiny", "prompt": f"def f{number}(", "max_tokens": 4, "seed": number, **body}
    if url == RESPONSES:
        body["input"], body["max_output_tokens"] = body.pop("prompt"), body.pop("max_tokens")
    elif url != COMPLETIONS:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    return json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body})


def start(client: openai.OpenAI, lines: list[str], endpoint: Any = COMPLETIONS) -> Any:
    content = io.BytesIO("\n".join(lines).encode())
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "ü"}
    )


def ended(client: openai.OpenAI, batch_id: str, seconds: float = 60) -> Any:
    def is_done() -> bool:
        last.append(client.batches.retrieve(batch_id))
        return last[-1].status in ("completed", "failed", "cancelled", "expired")

    last: list[Any] = []
    wait_for(is_done, seconds)
    return last[-1]


def records(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
