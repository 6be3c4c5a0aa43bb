"""What the live page costs: CPU time of the browser that shows it, and of the server that feeds it.

In turn the page is open in a headless Chromium for a slot, and nobody looks for a slot; what counts
is CPU time per second with the page minus without, the median of pairs. `page` is all processes
of the browser. Two rows:

- scripted: the events of 20 preemptions and 200 decode passes per second, whatever else the machine
  does, go to the watch of an idle engine; `server` is this process but for the thread that makes
  them.
- served: a server gets long BE prompts and LS requests at a steady rate; `server` is the process of
  the front end plus all threads of the engine's process but its loop's. A busy machine preempts
  less.

And what the loop's own thread adds per event while somebody looks. The last line of stdout is one
JSON document.

    python -m bench.serving.live_page [--rows scripted served] [--slots 6] [--seconds 10]
"""

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.common import machine
from bench.serving.qllm_serve import Serve, serving
from qllm import QLLMEngine
from qllm.plan import Row
from qllm.record.trace import Arrived, Event, Finished, Parked, Planned, Ran, Resumed, Token
from qllm.scheduler.program import Index
from qllm.types import NS_PER_MS, FinishReason, Grain

REACH = {"page": 0.10, "server": 0.01}
"""Cores, at most; what the project promises at 20 preemptions per second."""
PER_S = 20
"""Preemptions that the script makes."""
TICK = os.sysconf("SC_CLK_TCK")
SIZES = {"desktop": (1400, 1000), "phone": (390, 844)}


def ticks(stat: Path) -> int:
    """CPU ticks of a process or thread; 0 if it is gone."""
    try:
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def family(pid: int) -> list[int]:
    """A process and all below it."""
    try:
        tasks = [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
        children = {int(child) for task in tasks for child in task.read_text().split()}
    except OSError:
        return [pid]
    return [pid, *(found for child in children for found in family(child))]


def cpu(serve: Serve, browser: int) -> dict[str, float]:
    """CPU seconds so far, by part."""
    engine = Path(f"/proc/{serve.engine_pid}/task")
    others = [task for task in engine.iterdir() if task.name != str(serve.engine_pid)]
    known = {task.name: ticks(task / "stat") for task in others}
    attendants = [n for name, n in known.items() if _name(engine / name).startswith("python")]
    return {
        "page": sum(ticks(Path(f"/proc/{pid}/stat")) for pid in family(browser)) / TICK,
        "front_end": ticks(Path(f"/proc/{serve.pid}/stat")) / TICK,
        "attendants": sum(attendants) / TICK,
    }


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except OSError:
        return ""


def post(url: str, body: dict[str, Any]) -> None:
    """Ask, and read all of the answer."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def load(url: str, rate: float, until: threading.Event) -> list[threading.Thread]:
    """Long BE prompts without end, and LS requests at a rate."""
    rng = random.Random(0)

    def many(priority: int, num_tokens: int, max_tokens: int, wait_s: Callable[[], float]) -> None:
        while not until.is_set():
            prompt = [rng.randrange(10, 500) for _ in range(num_tokens)]
            body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
            post(url, {**body, "priority": priority})
            time.sleep(wait_s())

    kinds = [(1, 2500, 4, lambda: 0.0)] * 2
    kinds += [(0, 8, 1, lambda: rng.expovariate(rate / 8))] * 8
    threads = [threading.Thread(target=many, args=kind) for kind in kinds]
    for thread in threads:
        thread.start()
    return threads


def preemptions(url: str) -> float:
    """So far, from /metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith("qllm:preemptions_total"))


def per_event_ns(count: int = 200_000) -> float:
    """What the loop's thread does more per event: the median of five runs."""
    event, kept = Token(at_ns=0, request_id=0, token_id=0), deque[Any](maxlen=50_000)
    until_ns = 1

    def listen(event: Token) -> None:
        kept.append(event)
        if event.at_ns > until_ns:
            raise AssertionError

    def run(listeners: tuple[Callable[[Token], None], ...]) -> int:
        begin = time.thread_time_ns()
        for _ in range(count):
            for each in listeners:
                each(event)
        return time.thread_time_ns() - begin

    return statistics.median((run((listen,)) - run(())) / count for _ in range(5))


class Script(threading.Thread):
    """Makes the events of preemptions and decode passes, in the time that they would take.

    20 times a second an LS request arrives 3 ms before the BE pass parks, runs, and ends; then the
    BE pass goes on. Between two of them 10 decode passes of 1 ms run.
    """

    def __init__(self, listen: Callable[[Event], object], now_ns: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self._listen, self._now_ns = listen, now_ns
        self.over = threading.Event()
        self.cpu_s = 0.0
        self._numbers = itertools.count(1)

    def run(self) -> None:
        """Until `over`."""
        self._arrive(0, 10, self._now_ns())
        at_s = time.monotonic()
        while not self.over.wait(max(0.0, at_s - time.monotonic())):
            self._turn(self._now_ns())
            self.cpu_s = time.thread_time()
            at_s += 1 / PER_S

    def _arrive(self, number: int, priority: int, at_ns: int) -> None:
        name = f"cmpl-{'chat' if priority == 0 else 'summary'}-{number}"
        who = {"request_id": number, "priority": priority, "name": name}
        self._listen(Arrived(at_ns=at_ns, num_prompt_tokens=9, max_tokens=9, **who))

    def _plan(self, frame: int, number: int, at_ns: int, layers: int = 4) -> None:
        rows = (Row(number, 0, 9, 0, layers),)
        how = {"grain": Grain.EXPERT, "stop_below": 10}
        self._listen(Planned(at_ns=at_ns, frame_id=frame, rows=rows, **how))

    def _ran(self, frame: int, start_ns: int, end_ns: int, why: Any) -> None:
        place = {"start": Index(0, 0), "end": Index(0, 0), "segments": 1}
        self._listen(Ran(start_ns=start_ns, at_ns=end_ns, frame_id=frame, why=why, **place))

    def _turn(self, end_ns: int) -> None:
        number, ms = next(self._numbers), NS_PER_MS
        be, ls, at = 3 * number, 3 * number + 1, end_ns - 45 * NS_PER_MS
        self._plan(be, 0, at)
        self._arrive(number, 0, at + 7 * ms)
        self._ran(be, at, at + 10 * ms, "stopped")
        stop = {"layer": 2, "inside_layer": True, "arrival_ns": at + 7 * ms}
        self._listen(Parked(at_ns=at + 10 * ms, frame_id=be, request_ids=(0,), **stop))
        self._plan(ls, number, at + 10 * ms)
        self._ran(ls, at + 10 * ms, at + 15 * ms, "done")
        self._listen(Token(at_ns=at + 15 * ms, request_id=number, token_id=1))
        end = {"reason": FinishReason.STOP, "error": None}
        self._listen(Finished(at_ns=at + 15 * ms, request_id=number, **end))
        self._listen(Resumed(at_ns=at + 15 * ms, frame_id=be))
        self._ran(be, at + 15 * ms, at + 25 * ms, "done")
        for n in range(10):
            begin = at + (26 + n) * ms
            self._plan(3 * number + 2, 0, begin)
            self._ran(3 * number + 2, begin, begin + ms, "done")
            self._listen(Token(at_ns=begin + ms, request_id=0, token_id=1))


@contextmanager
def chromium() -> Iterator[tuple[Any, int]]:
    """A headless browser, and the process at its top."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser, min(p for p in family(os.getpid()) if "chrom" in _name(Path(f"/proc/{p}")))
        browser.close()


def in_turn(
    args: argparse.Namespace, browser: Any, url: str, read: Callable[[], dict[str, float]]
) -> dict[str, Any]:
    """Slots with and without the page, per size of the window: what `read` counts, per second."""
    found: dict[str, Any] = {}
    for size, (width, height) in SIZES.items():
        page = browser.new_page(viewport={"width": width, "height": height})
        rows: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for slot in range(args.slots):
            for looks in (True, False):
                page.goto(f"{url}/ui" if looks else "about:blank")
                page.wait_for_timeout(3000)
                begin, at = read(), time.monotonic()
                page.wait_for_timeout(1000 * args.seconds)
                seconds, end = time.monotonic() - at, read()
                row = {name: (end[name] - begin[name]) / seconds for name in end}
                rows[looks].append(row)
                print(size, slot, looks, {k: round(v, 4) for k, v in row.items()}, flush=True)
        page.close()
        pairs = list(zip(rows[True], rows[False], strict=True))
        found[size] = {
            name: statistics.median(a[name] - b[name] for a, b in pairs)
            for name in ("page", "server")
        }
        found[size]["preemptions"] = statistics.median(row["preemptions"] for row in rows[True])
    return found


def scripted(args: argparse.Namespace) -> dict[str, Any]:
    """The row of that name."""
    from tests.support.serving import serving as serving_here

    with (
        QLLMEngine.from_pretrained(args.model, threads=1, run_in="thread") as engine,
        serving_here(engine) as served,
        chromium() as (browser, top),
    ):
        client: Any = engine._client
        loop = client.loop

        def listen(event: Event) -> None:
            for each in loop.listeners:
                each(event)
            loop.num_preemptions += isinstance(event, Parked)

        script = Script(listen, engine.now_ns)
        script.start()

        def read() -> dict[str, float]:
            return {
                "page": sum(ticks(Path(f"/proc/{pid}/stat")) for pid in family(top)) / TICK,
                "server": time.process_time() - script.cpu_s,
                "preemptions": float(loop.num_preemptions),
            }

        try:
            return in_turn(args, browser, served.url, read)
        finally:
            script.over.set()
            script.join()


def served(args: argparse.Namespace) -> dict[str, Any]:
    """The row of that name."""
    with serving(args.model, "--threads", "1") as serve, chromium() as (browser, top):
        until = threading.Event()
        threads = load(serve.url, args.rate, until)

        def read() -> dict[str, float]:
            parts = cpu(serve, top)
            server = parts["front_end"] + parts["attendants"]
            stops = preemptions(serve.url)
            return {"page": parts["page"], "server": server, "preemptions": stops}

        try:
            return in_turn(args, browser, serve.url, read)
        finally:
            until.set()
            for thread in threads:
                thread.join()


ROWS = {"scripted": scripted, "served": served}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rate", type=float, default=30.0, help="LS requests per second")
    parser.add_argument("--rows", nargs="+", choices=sorted(ROWS), default=sorted(ROWS))
    parser.add_argument("--slots", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    found = {name: ROWS[name](args) for name in args.rows}
    every = {"reach": REACH, "loop_ns_per_event": per_event_ns(), **found}
    print(json.dumps({"machine": machine(), **every}))


if __name__ == "__main__":
    main()
