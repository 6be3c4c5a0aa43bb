"""What the live page costs: CPU time of the browser that shows it, and of the server that feeds it.

A server gets long BE prompts and LS requests at a steady rate, so that passes are preempted. In turn
the page is open in a headless Chromium for a slot, and nobody looks for a slot. CPU time, not wall:

- page: all processes of the browser, per second with the page minus per second without;
- server: the front end's process, with minus without, plus all threads of the engine's process but
  its loop's, with minus without;
- loop: what the loop's own thread adds per event while somebody looks, from a run without a server.

The last line of stdout is one JSON document.

    python -m bench.serving.live_page [--model tiny] [--rate 30] [--slots 6] [--seconds 10]
"""

import argparse
import json
import os
import random
import shutil
import statistics
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common import machine
from bench.serving.qllm_serve import Serve, serving
from qllm.record.trace import Token

REACH = {"page": 0.10, "server": 0.01}
"""Cores, at most; what the project promises at 20 preemptions per second."""
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


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Slots with and without the page, in turn, per size of the window."""
    from playwright.sync_api import sync_playwright

    found: dict[str, Any] = {}
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with serving(args.model, "--threads", "1") as serve, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        ours = {p for p in family(os.getpid()) if "chrom" in _name(Path(f"/proc/{p}"))}
        top = min(ours)
        until = threading.Event()
        threads = load(serve.url, args.rate, until)
        try:
            for size, (width, height) in SIZES.items():
                page = browser.new_page(viewport={"width": width, "height": height})
                rows: dict[bool, list[dict[str, float]]] = {True: [], False: []}
                for slot in range(args.slots):
                    for looks in (True, False):
                        page.goto(f"{serve.url}/ui" if looks else "about:blank")
                        page.wait_for_timeout(1000)
                        begin, at = cpu(serve, top), time.monotonic()
                        stops = preemptions(serve.url)
                        page.wait_for_timeout(1000 * args.seconds)
                        seconds, end = time.monotonic() - at, cpu(serve, top)
                        row = {name: (end[name] - begin[name]) / seconds for name in end}
                        row["preemptions"] = (preemptions(serve.url) - stops) / seconds
                        rows[looks].append(row)
                        print(size, slot, looks, {k: round(v, 4) for k, v in row.items()}, flush=True)
                pairs = list(zip(rows[True], rows[False], strict=True))
                more = {
                    name: statistics.median(a[name] - b[name] for a, b in pairs)
                    for name in ("page", "front_end", "attendants")
                }
                found[size] = {
                    **more,
                    "server": more["front_end"] + more["attendants"],
                    "preemptions": statistics.median(row["preemptions"] for row in rows[True]),
                }
                page.close()
        finally:
            until.set()
            for thread in threads:
                thread.join()
        browser.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rate", type=float, default=30.0, help="LS requests per second")
    parser.add_argument("--slots", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    found = {"reach": REACH, "loop_ns_per_event": per_event_ns(), **measure(args)}
    print(json.dumps({"machine": machine(), **found}))


if __name__ == "__main__":
    main()
