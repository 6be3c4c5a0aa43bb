"""What the tests of engines in processes share; policies here can be imported by an engine."""

import os
import signal
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from qllm import QLLMEngine, SamplingParams
from qllm.plan import Plan
from qllm.policy import View, next_row
from qllm.scheduler import decision
from qllm.types import NS_PER_S, Cap
from qllm_policies.qllm2 import Qllm2
from tests.support.waiting import wait_for

SETTINGS: dict[str, Any] = {"conformance": False, "threads": 1, "max_kv_tokens": 2048}
LONG = SamplingParams(temperature=0, ignore_eos=True)
POISON = 77


def wait_for_file(view: View) -> Plan:
    """Nothing, for as long as a test takes: a policy that waits for 10 s counts as broken."""
    decision.MAX_IDLE_NS = 3600 * NS_PER_S  # of the engine's own process
    return Plan(wait_until_ns=view.now_ns + 2_000_000)


class FileGate:
    """Plans nothing until a file exists; then everything, one by one."""

    needs = Cap.NONE

    def __init__(self, path: str) -> None:
        self.path = path

    def plan(self, view: View) -> Plan:
        if os.path.exists(self.path):
            for r in view.requests:
                row = next_row(r, view, view.max_step_tokens)
                if view.blocks_needed(row) <= view.num_free_blocks:
                    return Plan(rows=(row,))
        return wait_for_file(view)


class Holds(FileGate):
    """Plans a request up to its 20th token; further once the file exists."""

    def plan(self, view: View) -> Plan:
        is_open = os.path.exists(self.path)
        for r in view.requests:
            if is_open or r.num_output_tokens < 20:
                return Plan(rows=(next_row(r, view, view.max_step_tokens),))
        return wait_for_file(view)


class Crash(FileGate):
    """Ends the loop itself once the file is there."""

    def plan(self, view: View) -> Plan:
        if os.path.exists(self.path):
            raise KeyboardInterrupt("enough")
        return super().plan(view)


class Poisoned(Qllm2):
    """Ends its process when a request with a prompt of `POISON` tokens comes."""

    def rank(
        self, arrival_ns: int, priority: int, deadline_ns: int, prompt_tokens: int, *more: int
    ) -> tuple[int, int]:
        if prompt_tokens == POISON:
            os._exit(3)
        return super().rank(arrival_ns, priority, deadline_ns, prompt_tokens, *more)


class CrashOnce(Qllm2):
    """Ends the loop itself once the file is there, and takes the file away."""

    def __init__(self, path: str) -> None:
        super().__init__()
        object.__setattr__(self, "path", path)

    def rank(self, *numbers: int) -> tuple[int, int]:
        if os.path.exists(self.path):  # type: ignore[attr-defined]
            os.unlink(self.path)  # type: ignore[attr-defined]
            raise KeyboardInterrupt("the device is lost")
        return super().rank(*numbers)


class Broken:
    """A policy that fails every request."""

    needs = Cap.NONE

    def plan(self, view: View) -> Plan:
        if view.requests:
            raise KeyError("no such request")
        return Plan(wait_until_ns=view.now_ns + 10_000_000)


class Unpicklable(FileGate):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Holding(NamedTuple):
    """An engine with the policy `Holds`."""

    engine: QLLMEngine
    gate: Path
    """The file that lets requests go beyond their 20th token."""


def save_model(folder: Path, num_layers: int | None = None) -> str:
    """A tiny model with room for long answers, and a tokenizer."""
    from tests.support.byte_models import byte_tokenizer  # an engine that has a policy of this
    from tests.support.families import make_model  # file does not import all families

    made = make_model("mixtral", num_layers=num_layers)
    made.config.max_position_embeddings = 2048
    made.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def pid_of(engine: QLLMEngine) -> int:
    return int(engine._client._process.pid)  # type: ignore[attr-defined]


def assert_idle(engine: QLLMEngine) -> None:
    """Check that an engine has no request, no open prompt, no parked frame and no KV in use.

    Requests that clients left are given time to end. What is still open then is cancelled, and what
    is kept of prompts is forgotten, so that the next test finds an idle engine that knows nothing.
    """

    def found() -> dict[str, Any]:
        stats = engine.stats()
        used = {name: stats[name] for name in ("num_live", "num_waiting", "kv_blocks_used")}
        used |= {"frames": len(stats["frames"]), "prompts": stats["open_prompts"]["now"]}
        used |= {"handles": len(engine.client.open_handles())}
        return {name: number for name, number in used.items() if number}

    assert engine.failure is None, f"a test ended the shared engine: {engine.failure}"
    engine.raise_if_closed()
    try:
        wait_for(lambda: not found(), 60)
    except AssertionError:
        left = found()
        for handle in engine.client.open_handles():
            handle.cancel()
        with suppress(AssertionError):
            wait_for(lambda: not found())
        raise AssertionError(f"a test leaves the shared engine busy: {left}") from None
    finally:
        engine.reset_prefix_cache()


def stand_still(path: str) -> None:
    """Called on an engine's loop: nothing moves until a file is there."""
    Path(f"{path}-reached").touch()
    while not os.path.exists(path):
        time.sleep(0.002)


def state(stat: Path) -> str:
    """The letter of a process or a thread: `R` runs, `S` sleeps, `T` stands still, `Z` is dead."""
    return stat.read_text().rpartition(")")[2].split()[0]


def is_alive(pid: int) -> bool:
    try:
        return state(Path(f"/proc/{pid}/stat")) != "Z"
    except FileNotFoundError:
        return False


def freeze(pid: int) -> None:
    """Stops a process by SIGSTOP, and returns once none of its threads runs any more.

    The signal alone returns before: a thread on another core goes on for a while.
    """
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    wait_for(lambda: all(state(stat) == "T" for stat in tasks.glob("*/stat")))


def open_files() -> Counter[str]:
    """What this process has open, and how often; what is left open is more than was before.

    Counts alone would not do: the collector may close, in between, what an earlier test dropped.
    """
    found: Counter[str] = Counter()
    for number in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder itself, while it was read
            found[os.readlink(number)] += 1
    return found


def free_port() -> int:
    """A port of this host at which an engine may listen, and that nobody else is given.

    It stays bound, by a socket that does not listen: the kernel gives it to no other program, and
    lets one that names it and sets SO_REUSEADDR, as engines do, listen there.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = int(held.getsockname()[1])
    held.detach()  # until this process ends
    return port
