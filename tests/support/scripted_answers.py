"""A server whose model says what a script says: a real engine, held to the text of each answer."""

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import qllm
from qllm.llm import QLLMEngine
from qllm.server.api import chat
from qllm.server.api.protocol import ChatRequest
from qllm.server.http.fields import Packed
from qllm.server.requests.front import Front
from qllm.types import StructuredOutputs
from tests.support.serving import Serving, serving

SHELLS: dict[str, dict[str, Any]] = {
    "Bash": {"command": "{}", "description": "Write a file"},
    "bash": {"command": "{}"},
    "exec_command": {"cmd": "{}"},
    "shell": {"command": ["bash", "-c", "{}"]},
    "shell_command": {"command": "{}"},
    "run_shell_command": {"command": "{}", "is_background": False},
    "time_of": {"zone": "{}"},
}
"""Tools that run a command, by the names that agents give them, with their arguments."""
COMMANDS = ("echo one > made-1", "echo two > made-2")
"""Commands that a session runs, one per turn."""
END = "Both files are written."
"""Last answer of a session."""


def script(messages: Sequence[Any], tools: Sequence[Any] | None) -> str:
    """Return the next answer: a call for each command, then a text."""
    names = [tool.get("function", tool).get("name") for tool in tools or ()]
    shell = next((name for name in SHELLS if name in names), None)
    num_done = sum(message.get("role") == "tool" for message in messages)
    if shell is None or num_done >= len(COMMANDS):
        return END
    command = json.dumps(COMMANDS[num_done])[1:-1]
    arguments = json.loads(json.dumps(SHELLS[shell]).replace("{}", command))
    call = json.dumps({"name": shell, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def long_model(folder: Path, num_positions: int) -> Path:
    """Return a copy of the tiny model that takes prompts as long as those of agents."""
    made = folder / "long"
    shutil.copytree(Path(qllm.__file__).parent / "models" / "tiny", made)
    config = json.loads((made / "config.json").read_text())
    config["max_position_embeddings"] = num_positions
    (made / "config.json").write_text(json.dumps(config))
    return made


class Requests(logging.Handler):
    """The requests that a server answered, from its access log."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(record.__dict__["fields"])


@contextmanager
def scripted(folder: Path, **settings: Any) -> Iterator[tuple[Serving, Requests]]:
    """Serve a model that follows the script wherever a request holds its answer to no form."""
    plain = chat.ask_of

    def ask_of(front: Front, body: ChatRequest, *rest: Any) -> Any:
        ask = plain(front, body, *rest)
        if ask.form is not None or body.form() is not None:
            return ask
        given: Any = body.messages
        messages = given.opened() if isinstance(given, Packed) else given
        held = StructuredOutputs(choice=(script(messages, body.callable_tools),))
        return replace(ask, sampling={**ask.sampling, "structured_outputs": held})

    size = {"max_kv_tokens": 1 << 18, "prefix_cache_tokens": 1 << 17}
    seen, log = Requests(), logging.getLogger("qllm.server.http.access")
    chat.ask_of = ask_of
    try:
        model = long_model(folder, 1 << 18)
        with (
            QLLMEngine.from_pretrained(str(model), threads=1, conformance=False, **size) as engine,
            serving(engine, state_dir=folder / "state", **settings) as served,
        ):
            log.addHandler(seen)  # the server's start has removed all handlers
            yield served, seen
    finally:
        chat.ask_of = plain
        log.removeHandler(seen)
