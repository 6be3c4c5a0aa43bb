"""Value and cost of the prefix cache: `python -m bench.kv [--quick] [--rows ...]`.

Rows, all on the 300M random MoE with 2 threads:

    chats      8-turn LS chats over a context of 2k tokens: TTFT of later turns, warm over cold
    sweep      LS chats before and after BE prompts of ten times the store: warm over warm before;
               the same with plain least recently used, and with vLLM's server
    no_hit     prompts without common tokens: tokens/s, cache on over off, in turns
    shared     32 chats over one system prompt of 2k tokens: bytes of KV cached and copied, and all
               KV over that of one copy per chat: copied, as on a CPU, and by reference, as
               blocks are counted on a GPU
    swap       BE work of four times the KV pool, and LS chats that take its KV and two, three or
               four tenths of the engine's time: swap over recompute, with the prefix cache and
               without, and over a bound of every engine
    rota       one class, KV for two requests, arrivals at 0.87 of its capacity: `rota` with
               swap over `fcfs`; and a burst of eight
    restart    `kill -9` at 4k tokens of context: time to the next token, with `kv_dir` over without
    mover      LS chats over BE work while 1 GB is stored to the file and 1 GB loaded: TTFT p99
               over an idle mover, duration of preemption, stalls of BE
    handover_tcp, handover_shm
               a request of 4k tokens migrates to another engine over NIXL: time to its next
               token, over that of computing it there

Rows are merged into `bench/results/kv.json`, unless `--quick`; a row takes one to four minutes.
Every arm's tokens are compared with those of another. The last line is JSON. The exit status is 1
if tokens differ, a due hit did not come, nothing was evicted, or a swapped request was recomputed.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.common import RESULTS, machine, result_file, with_lines, write_result
from bench.kv.cache import chats_row, flood, no_hit_row, shared_row, sweep_row
from bench.kv.file import mover_row, restart_row
from bench.kv.handover import handover_row
from bench.kv.lines import lines_of
from bench.kv.parts import make_engine
from bench.kv.swap import rota_burst, rota_row, swap_row
from qllm.measure.random_moe import make_random_moe

FILE = RESULTS / "kv.json"
Row = dict[str, Any]


def _with_two(row: Callable[..., Row], model: str, *sizes: int) -> Row:
    """Measure a row of two engines at once, without the cache and with it."""
    settings = {"prefix_cache_tokens": 32768}
    with (
        make_engine(model, prefix_cache=False) as off,
        make_engine(model, prefix_cache=True, **settings) as on,
    ):
        for engine in (off, on):
            flood(engine, 99)  # the first pass touches the weights
        return row(off, on, *sizes)


ROWS: dict[str, Callable[[str, bool], Row]] = {
    "chats": lambda m, quick: _with_two(chats_row, m, *((3, 1) if quick else (8, 2))),
    "sweep": lambda m, quick: sweep_row(m, 1 if quick else 2, 3072 if quick else 6144),
    "no_hit": lambda m, quick: _with_two(no_hit_row, m, 2 if quick else 15),
    "shared": lambda m, quick: _with_two(shared_row, m, 4 if quick else 32),
    "swap_0.2": lambda m, quick: swap_row(m, 1 if quick else 3, 4, 0.2),
    "swap_0.3": lambda m, quick: swap_row(m, 1 if quick else 3, 4, 0.3),
    "swap_0.4": lambda m, quick: swap_row(m, 1 if quick else 3, 4, 0.4),
    "rota": lambda m, quick: rota_row(m, 30 if quick else 80),
    "rota_burst": lambda m, quick: rota_burst(m, 4 if quick else 8),
    "restart": lambda m, quick: restart_row(m, 1 if quick else 4, 4000),
    "handover_tcp": lambda m, quick: handover_row(m, 2 if quick else 6, 4000, "tcp"),
    "handover_shm": lambda m, quick: handover_row(m, 2 if quick else 6, 4000, "shm"),
    "mover": lambda m, quick: mover_row(m, 8 if quick else 20),
}


def main() -> int:
    """Run rows; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer turns, rounds and chats")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--out", type=result_file, default=FILE, help="results to merge rows into")
    asked = parser.parse_args()
    out = None if asked.quick else result_file(asked.out)
    rows = _run(asked.rows, asked.quick)
    if out is not None:
        _merge(out, rows)
    right = all(row["same_tokens"] and row.get("hits_due", True) for row in rows.values())
    print(json.dumps({"right": right, **rows}))
    return 0 if right else 1


def _run(asked: Iterable[str], quick: bool) -> dict[str, Row]:
    model, rows = str(make_random_moe(size="300m")), {}
    for name in asked:
        rows[name] = ROWS[name](model, quick)
        print(name, rows[name], flush=True)
    return rows


def _merge(path: Path, rows: dict[str, Row]) -> None:
    """Merge rows into the results, each with its machine and commit."""
    found = json.loads(path.read_text()) if path.exists() else {}
    found |= {name: {**row, "machine": machine()} for name, row in rows.items()}
    write_result(path, json.dumps(with_lines(found, lines_of(found)), indent=1, sort_keys=True))


if __name__ == "__main__":
    sys.exit(main())
