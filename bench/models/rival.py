"""A contender in its own process, which answers lines of JSON."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.common import ROOT, without_paths
from bench.serving.servers import cores_of, vllm_variables


class RivalError(Exception):
    """A contender that ended, or cannot answer a question; the message is its last line."""


class Rival:
    """A contender; it is ready after construction.

    Args:
        command: Command of the process, see `answering.py`.
        variables: Environment variables in addition to ours.

    Raises:
        RivalError: The process ended before it was ready.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        self._said = open(os.memfd_create("said"), "w+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            cwd=ROOT,
            env=os.environ | dict(variables or {}),
        )
        try:
            self.about = self._next()
        except RivalError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self._process.pid

    def _next(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                if "error" in found:
                    raise RivalError(found["error"])
                return found
        raise RivalError(self._last_line())

    def _last_line(self) -> str:
        """Return the last line of a process that ended."""
        code = self._process.wait()
        self._said.seek(0)
        text = self._said.read().decode(errors="replace").strip()
        last = text.splitlines()[-1] if text else "no message"
        return without_paths(f"ended with {code}: {last}")

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Ask, and wait for the answer.

        Raises:
            RivalError: The process cannot answer the question, or ended.
        """
        assert self._process.stdin is not None
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise RivalError(self._last_line()) from None
        return self._next()

    def rates(self, prompt: list[int], tokens: int) -> tuple[float, float]:
        """Return the seconds of a prompt, and of a token after the first."""
        found = self.ask({"prompt": prompt, "tokens": tokens})
        return found["prompt_s"], found["token_s"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            with suppress(BrokenPipeError):  # of unread input
                if pipe is not None:
                    pipe.close()


def library(python: str, script: str, what: Path, threads: str, *more: str) -> Rival:
    """Start another library. It gets the environment variables of vLLM, which others ignore.

    Args:
        python: Python of its environment.
        script: Name of a script in this folder.
        what: File or folder that it reads.
        threads: Number of its threads.
        *more: Further arguments of the script.
    """
    path = str(ROOT / "bench/models" / script)
    variables = vllm_variables(Path(python).parents[1], cores_of(int(threads)), 1)
    return Rival([python, path, str(what.resolve()), threads, *more], variables)
