"""Fixtures of `canitoolcall` through the server's reader: how many pass, per family.

python -m tests.long.tool_fixtures [CUTS]
"""

import sys
from collections import Counter

from tests.support.tool_fixtures import WRONG, replays, status_of


def main() -> None:
    """Print the counts, and each fixture that does not pass with its reason."""
    cuts = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    counts: dict[str, Counter[str]] = {}
    for name, replay in replays().items():
        rows = replay.rows(cuts)
        status = status_of(rows).value
        counts.setdefault(replay.fixture.family, Counter())[status] += 1
        if status != "pass":
            why = WRONG.get(name) or next(row.detail for row in rows if row.status != "pass")
            print(f"{status:9} {name}: {why}")
    for family, found in counts.items():
        print(f"{family:14}", *(f"{found[x]:4} {x}" for x in ("pass", "soft_pass", "fail")))
    whole = sum((Counter(x) for x in counts.values()), Counter())
    print(f"{'all':14}", *(f"{whole[x]:4} {x}" for x in ("pass", "soft_pass", "fail")))


if __name__ == "__main__":
    main()
