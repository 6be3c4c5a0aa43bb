"""Poison requests next to innocent ones: the number of innocent ones lost or changed.

A thousand mixed requests with extremes in every field: through Python's `submit`, over HTTP, and as
records in the rings of the Python loop and of the native server. The last line is JSON.

    python -m tests.long.poison --count 1000 --seed 0
"""

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Send poison on every way in, a quarter on each."""
    from bench.common import machine
    from tests.support.poison import Outcome, in_rings, over_http, through_python, together
    from tests.support.serving import serving, tiny_engine

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    share, seed, began = args.count // 4, args.seed, time.monotonic()
    ways: dict[str, Outcome] = {}
    with tiny_engine(max_kv_tokens=4096, default_max_tokens=4, conformance=False) as engine:
        ways["python"] = through_python(engine, share, seed)
        with serving(engine, max_choices=8) as served:
            ways["http"] = over_http(served, engine, share, seed)
    for native, name in ((False, "records, Python loop"), (True, "records, native server")):
        rounds = range(seed, seed + -(-share // 25))
        ways[name] = together([in_rings(native, 25, number) for number in rounds])
    total = together(list(ways.values()))
    for name, outcome in {**ways, "all": total}.items():
        sys.stdout.write(f"{name}: {outcome._asdict()}\n")
    found = {name: outcome._asdict() for name, outcome in ways.items()}
    took_s = round(time.monotonic() - began, 1)
    result = {"bench": "poison", "machine": machine(), "seed": seed, "took_s": took_s}
    sys.stdout.write(json.dumps({**result, "ways": found, **total._asdict()}) + "\n")
    sys.exit(bool(total.lost or total.changed or total.raw))


if __name__ == "__main__":
    main()
