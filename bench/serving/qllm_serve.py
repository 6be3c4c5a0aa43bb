"""A child process that runs `qllm serve`, for the benches that need a whole server."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

START_S = 300
PAGE = os.sysconf("SC_PAGE_SIZE")


class Serve(NamedTuple):
    """A server that is ready."""

    url: str
    pid: int
    engine_pid: int
    """Process id of the engine; 0 if its engines are elsewhere."""

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds so far of the front end and of the engine."""
        return {"front_end": _cpu_s(self.pid), "engine": _cpu_s(self.engine_pid)}

    def rss_mb(self) -> dict[str, float]:
        """Return the resident memory of the front end and of the engine, in MB."""
        return {"front_end": _rss_mb(self.pid), "engine": _rss_mb(self.engine_pid)}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 1e6


@contextmanager
def serving(*arguments: str, log: Path | None = None, tree: Path | None = None) -> Iterator[Serve]:
    """Run `qllm serve ARGUMENTS --port 0`; SIGTERM and wait at the end.

    `tree` is another folder of this project with the code that serves.

    Raises:
        RuntimeError: The server did not start, or did not end with code 0; the message has its log.
    """
    with tempfile.TemporaryDirectory(prefix="qllm-bench-") as folder:
        path = log or Path(folder) / "log"
        with path.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "qllm.cli", "serve", *arguments, "--port", "0"],
                stderr=stderr, stdout=subprocess.DEVNULL, cwd=tree,
            )  # fmt: skip
        try:
            url = _address(process, path)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            _wait_ready(url)
            yield Serve(url, process.pid, int(children[0]) if children else 0)
            process.send_signal(signal.SIGTERM)
            if process.wait(60) != 0:
                raise RuntimeError(f"the server ended with {process.returncode}:\n{_tail(path)}")
        finally:
            process.kill()
            process.wait()


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"at (http://\S+)", log.read_text())
        if found:
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"the server did not come up:\n{_tail(log)}")


def _wait_ready(url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"{url}/ready never said yes")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-20:])


def pinned(core: int | None, command: Sequence[str]) -> list[str]:
    """Return a command that runs on one core; None leaves it free."""
    return list(command) if core is None else ["taskset", "-c", str(core), *command]
