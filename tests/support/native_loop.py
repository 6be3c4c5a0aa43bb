"""The loop around the native server, on the host: rings -> decision -> runner -> rings.

    claim -> decide -> effects -> run a program until its end or a boundary
      ^                                                         |
      +----------- sampled, published, doorbells <--------------+

What a GPU would do without the host, with a runner in the place of its stages. It decides nothing
and has no other rules than `qllm.engine.loop.EngineLoop`; it keeps no trace, and serves what the
native server serves (docs/design/device-loop.md).
"""

import select
import sys
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from qllm.device import serving
from qllm.device.server import NativeServer, attach
from qllm.engine.costs import StepCosts
from qllm.errors import PolicyError
from qllm.ingress.layout import REASONS
from qllm.ingress.memory import ControlMemory, FrontEndMemory
from qllm.ingress.protocol import CONTROL
from qllm.ingress.shm import BACKLOG_NS, BEAT_NS, Announcer, Doorbell
from qllm.ingress.words import address_of
from qllm.runner.protocol import Runner, Watch
from qllm.scheduler.decision import Accept, Decision, Drop, Effect, EvictKv, Kill, Split
from qllm.scheduler.program import Program
from qllm.types import NS_PER_S, FinishReason, Grain


class ServerStop:
    """The stop word: what is in the rings, looked at when the bell has rung."""

    __slots__ = (
        "_address",
        "_bell",
        "_lowered",
        "_seen",
        "_server",
        "_word",
        "now_ns",
        "stop_at_ns",
    )

    def __init__(self, bell: memoryview, server: NativeServer, now_ns: Callable[[], int]) -> None:
        self.stop_at_ns: int | None = None
        self.now_ns = now_ns
        self._bell, self._server = bell, server
        self._address = address_of(bell)
        self._seen = server.memory.cell("bell_seen")
        self._word = server.memory.cell("word")
        self._lowered = server.memory.cell("lowered_ns")

    def watch(self) -> Watch:
        """The bell and the number seen last (`qllm.runner.protocol.Stop`)."""
        return Watch(self._address, self._seen[0])

    @property
    def word(self) -> int:
        """Smallest priority that has arrived and was not claimed."""
        if self._bell[0] != self._seen[0]:
            self._server.arrived(self.now_ns())
        word: int = self._word[0]
        return word

    @property
    def lowered_ns(self) -> int:
        """When what lowered the word last was put."""
        at_ns: int = self._lowered[0]
        return at_ns


class _Lane(NamedTuple):
    """A front end's memory, which the server knows by address, and its doorbell."""

    block: FrontEndMemory
    announcer: Announcer


class NativeLoop:
    """Runs the requests of rings to their end. One thread calls `step` or `serve`.

    Args:
        server: Claims, decides and publishes.
        runner: Executes programs.
        control: The engine's control block, whose address the server has.
        doorbell: What an idle loop sleeps on.
        now_ns: The engine's clock.
        broken: Told the number of a front end that was cut off, and why.
    """

    def __init__(
        self,
        server: NativeServer,
        runner: Runner,
        control: ControlMemory,
        doorbell: Doorbell,
        now_ns: Callable[[], int],
        broken: Callable[[int, str], None] | None = None,
    ) -> None:
        self.server, self.runner = server, runner
        self.control, self.doorbell = control, doorbell
        self.now_ns = now_ns
        self.broken = broken or _say
        self.costs = StepCosts()
        bell = control.words[control.BELL : control.BELL + 1]
        self.stop = ServerStop(bell, server, now_ns)
        self.closing = False
        self.num_preemptions = 0
        self.preempt_latencies_ns: deque[int] = deque(maxlen=100_000)
        self.policy_errors: list[str] = []
        self.longest_plan_ns = 0
        self._ports: dict[int, _Lane] = {}
        self._announced: dict[int, int] = {}
        self._calls: deque[Callable[[], None]] = deque()

    # -- front ends

    def post(self, function: Callable[[], None]) -> None:
        """Have the loop's thread call something between two programs. From any thread."""
        self._calls.append(function)
        self.doorbell.ring()

    def attach(self, block: FrontEndMemory, announcer: Announcer) -> None:
        """Serve one more front end. On the loop's thread.

        Raises:
            ConfigError: See `NativeServer.attach`.
        """
        attach(self.server, block)
        self._ports[block.number] = _Lane(block, announcer)
        self._announced[block.number] = 0

    def detach(self, number: int) -> None:
        """A front end is gone: end its requests. On the loop's thread."""
        self.server.detach(number, self.now_ns())
        self._follow()
        self._forget(number)

    def _forget(self, number: int) -> None:
        port = self._ports.pop(number, None)
        if port is not None:
            del self._announced[number]
            port.announcer.close()

    def _announce(self) -> None:
        """Wake the front ends that have new records."""
        for number, written in self.server.num_written().items():
            if written != self._announced[number]:
                self._announced[number] = written
                self._ports[number].announcer.ring()

    # -- the loop

    def serve(self) -> None:
        """Serve until the front ends ask to stop, or `close` was called."""
        while not self.closing:
            self.step()

    def step(self) -> bool:
        """Take what arrived, run one program; return whether anything ran."""
        self.flush()
        self._take()
        if self.server.asked == serving.STOP:
            self.close()
        if self.closing:
            return False
        now = self.now_ns()
        try:
            decision = self.server.decide(now)
        except PolicyError as error:
            self.policy_errors.append(str(error))
            self._end_all(FinishReason.ERROR, str(error))
            return False
        program, start_ns = decision.program, self.now_ns()
        self.longest_plan_ns = max(self.longest_plan_ns, start_ns - now)
        try:
            for effect in decision.effects:
                self._apply(effect)
        except Exception as error:
            if program is None:
                raise
            self._failed(program, start_ns, error)
            return False
        self.server.show()
        if program is None:
            self._idle(decision)
            return False
        self._run(program, decision)
        return True

    def close(self) -> None:
        """End every request with `cancelled`, those in the rings too, and stop serving.

        What finds no room in a token ring is written by further calls of `flush`.
        """
        self.closing = True
        self._end_all(FinishReason.CANCELLED, "")
        while self.server.claim(self.now_ns()):
            self._end_all(FinishReason.CANCELLED, "")
        self.flush()

    def give_up(self, text: str) -> None:
        """End every request with an error, without the runner: the loop has crashed."""
        self.closing = True
        while True:
            for slot in list(self.server.live()):
                self.server.end(slot, REASONS.index(FinishReason.ERROR), self.now_ns(), text)
            self.server.changes()
            if not self.server.claim(self.now_ns()):
                break
        self.flush()

    def flush(self) -> bool:
        """Write what found no room before and wake front ends; whether some of it must wait."""
        left = self.server.flush()
        self._announce()
        return bool(left)

    def _take(self) -> None:
        while self._calls:
            self._calls.popleft()()
        while self.server.claim(self.now_ns()):
            self._follow()
        self._follow()
        for number, why in self.server.cut_off():
            self._forget(number)
            self.broken(number, why)

    def _follow(self) -> None:
        """Tell the runner what has become of requests."""
        effects, events = self.server.changes()
        for effect in effects:
            self._apply(effect)
        for request_id, kind, slot in events:
            if kind == serving.REMOVED:
                self.runner.remove(request_id)
                continue
            known, num_prompt = self.server.tokens(slot), self.server.num_prompt_tokens(slot)
            most = num_prompt + self.server.max_tokens(slot)
            self.runner.add(request_id, known, self.server.sampling(slot), num_prompt, most)

    def _idle(self, decision: Decision) -> None:
        times = (decision.wait_until_ns, self.server.next_deadline_ns)
        until_ns = min((t for t in times if t is not None), default=None)
        limit_ns = BACKLOG_NS if self.flush() else BEAT_NS
        if until_ns is not None:
            limit_ns = min(limit_ns, max(0, until_ns - self.now_ns()))
        self.sleep(limit_ns)

    def sleep(self, limit_ns: int) -> None:
        """Wait until the bell rings or the time has passed."""
        if self.control.words[self.control.BELL] == self.server.memory.get("bell_seen"):
            select.select((self.doorbell.fd,), (), (), limit_ns / NS_PER_S)
        self.doorbell.clear()

    # -- one program

    def _run(self, program: Program, decision: Decision) -> None:
        stop, start_ns = self.stop, self.now_ns()
        ends = [self.server.next_deadline_ns] if program.grain > Grain.STEP else []
        if decision.slice_ns is not None:
            ends.append(start_ns + decision.slice_ns)
        stop.stop_at_ns = min((t for t in ends if t is not None), default=None)
        try:
            end = self.runner.run(program, decision.start, stop)
            sampled = self.runner.finish(program) if end == program.end else []
        except Exception as error:  # noqa: BLE001 - fails its requests, not the engine
            self._failed(program, start_ns, error)
            return
        end_ns = self.now_ns()
        if end != program.end:
            by_word = CONTROL < stop.word < program.stop_below
            lowered_ns = stop.lowered_ns
            self.server.stopped(end, start_ns, end_ns, preempted=by_word)
            if by_word:
                self.num_preemptions += 1
                self.preempt_latencies_ns.append(self.now_ns() - lowered_ns)
            return
        self.server.done(end, [s.request_id for s in sampled], start_ns, end_ns)
        for token in sampled:
            self.server.sampled(self.server.find(token.request_id), token.token_id, end_ns)
        self._follow()
        self._announce()
        if decision.start == (0, 0):
            table = self.costs.observe(program, end_ns - start_ns)
            if table is not None and table != self.server.costs:
                self.server.costs = table

    def _failed(self, program: Program, start_ns: int, error: Exception) -> None:
        now = self.now_ns()
        effects, hopeless = self.server.failed(start_ns, now)
        for effect in effects:
            self._apply(effect)
        text = f"{type(error).__name__}: {error}"
        for slot in hopeless:
            self.server.end(slot, REASONS.index(FinishReason.ERROR), now, text)
        self._follow()

    def _end_all(self, reason: FinishReason, text: str) -> None:
        now = self.now_ns()
        for slot in list(self.server.live()):
            self.server.end(slot, REASONS.index(reason), now, text)
        self._follow()

    def _apply(self, effect: Effect) -> None:
        runner = self.runner
        if isinstance(effect, Accept):
            runner.accept(effect.program, effect.tables)
        elif isinstance(effect, Split):
            runner.split(effect.program, effect.at)
        elif isinstance(effect, Kill):
            runner.kill(effect.program, effect.request_id)
        elif isinstance(effect, Drop):
            runner.drop(effect.program)
        elif isinstance(effect, EvictKv):
            runner.evict(effect.request_id)


def _say(number: int, why: str) -> None:
    sys.stderr.write(f"qllm: front end {number} is cut off: {why}\n")
