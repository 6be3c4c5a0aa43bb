"""Count the Python files and functions that one warm streaming chat enters, in both processes.

    python scripts/walk.py            prints one JSON line
    python scripts/walk.py --list     names them first

A chat of 8 tokens goes over HTTP to the model `tiny`, after two that do not count. Every thread of
the server's process and the thread of the engine's loop are watched. Functions of `qllm` and of
policies count by file and name; comprehensions and lambdas belong to the function around them.
"""

import argparse
import asyncio
import http.client
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = tuple(f"{ROOT / name}{os.sep}" for name in ("qllm", "policies"))
BODY = {
    "messages": [{"role": "user", "content": "What does json.dumps do?"}],
    "max_tokens": 8,
    "ignore_eos": True,
    "stream": True,
}
WARM = 2

_entered: set[tuple[str, str]] | None = None
"""Files and functions, during a count."""


def _watch(frame: FrameType, event: str, arg: Any) -> None:
    if event == "call" and _entered is not None:
        code = frame.f_code
        if code.co_filename.startswith(FOLDERS) and not code.co_name.startswith("<"):
            _entered.add((os.path.relpath(code.co_filename, ROOT), code.co_qualname))


def begin() -> None:
    """Start to count on this thread, and on others with this profile."""
    global _entered
    _entered = set()
    sys.setprofile(_watch)


def end() -> list[tuple[str, str]]:
    """Stop counting; return the files and functions that were entered."""
    global _entered
    sys.setprofile(None)
    found, _entered = sorted(_entered or ()), None
    return found


def chat(port: int) -> None:
    """Send one streaming chat, and read it to its end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(BODY), headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    if answer.status != 200 or "[DONE]" not in text:
        raise RuntimeError(f"the chat failed: {answer.status} {text[:300]}")


def walk() -> dict[str, list[tuple[str, str]]]:
    """Return the files and functions that one chat enters, by process."""
    import walk as self  # the engine's process can import it by this name

    from qllm.llm import QLLMEngine
    from qllm.server.app import create_app
    from qllm.server.config import load_config
    from qllm.server.ops.run import make_server
    from qllm.server.serve import bound_socket

    config = load_config(None, {}, {"model": "tiny", "port": 0})
    threading.setprofile(self._watch)
    with (
        QLLMEngine.from_pretrained("tiny", threads=1) as engine,
        bound_socket(config.host, 0) as sock,
    ):
        server = make_server(create_app(engine, config), config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.02)
        port = sock.getsockname()[1]
        for _ in range(WARM):
            chat(port)
        engine.call(self.begin)
        self.begin()
        chat(port)
        found = {"front": self.end(), "engine": engine.call(self.end)}
        server.should_exit = True
        thread.join(60)
    return found


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name files and functions")
    args = parser.parse_args()
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    found = walk()
    if args.list:
        for process, functions in found.items():
            for file, name in functions:
                print(f"{process:8} {file}: {name}")
    files = {process: {file for file, _ in functions} for process, functions in found.items()}
    document = {
        "bench": "walk",
        **{f"{process}_files": len(names) for process, names in files.items()},
        **{f"{process}_functions": len(functions) for process, functions in found.items()},
        "files": len(set().union(*files.values())),
        "functions": len({pair for functions in found.values() for pair in functions}),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
