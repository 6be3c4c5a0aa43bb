#!/usr/bin/env python
"""Time of a gather of rows between two hosts: gloo between two network namespaces of this machine.

It needs root and `ip`. The link is a pair of virtual cards. Its rate is limited by the kernel's
pacing of the sockets (SO_MAX_PACING_RATE), which adds no delay. Each process has half of the rows,
in bf16. Usage: scripts/gather_hosts.py [--rows 4096] [--width 768] [--gbit 1] [--times 9]
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta

HOSTS = ("qllm-a", "qllm-b")
ADDRESSES = ("10.46.0.1", "10.46.0.2")
PORT = 29546
SO_MAX_PACING_RATE = 47
"""Option of a socket, from asm-generic/socket.h."""
PATIENCE_S = 300


def ip(*words: str, check: bool = True) -> None:
    """Call `ip`; its complaints go to this program's stderr."""
    subprocess.run(["ip", *words], check=check, stderr=None if check else subprocess.DEVNULL)


def make_link() -> None:
    """Make both namespaces with a card each."""
    for host in HOSTS:
        ip("netns", "add", host)
    ends = [word for host in HOSTS for word in ("name", host, "netns", host)]
    ip("link", "add", *ends[:4], "type", "veth", "peer", *ends[4:])
    for host, address in zip(HOSTS, ADDRESSES, strict=True):
        ip("-n", host, "addr", "add", f"{address}/24", "dev", host)
        for card in (host, "lo"):
            ip("-n", host, "link", "set", card, "up")


def pace(bytes_s: int) -> int:
    """Limit the rate of each connection of this process; return their number."""
    num = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as end:
                end.getpeername()
                end.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_s)
                num += 1
        except OSError:  # no connection
            continue
    return num


def gather(asked: argparse.Namespace) -> None:
    """Gather in one process; the first prints the milliseconds."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    first, patience = asked.rank == 0, timedelta(seconds=PATIENCE_S)
    store = dist.TCPStore(ADDRESSES[0], PORT, len(HOSTS), first, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=asked.rank, world_size=len(HOSTS))
    dist.barrier()
    connections = pace(int(asked.gbit * 1e9 / 8)) if asked.gbit else 0
    own = torch.full((asked.rows // len(HOSTS), asked.width), asked.rank + 1.0).to(torch.bfloat16)
    parts, took = [torch.zeros_like(own) for _ in HOSTS], []
    for _ in range(asked.times):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_gather(parts, own)
        took.append(1e3 * (time.perf_counter() - begin))
    assert [int(part.max()) for part in parts] == [1, 2], "the rows are those of both"
    took.sort()
    found = {"min": took[0], "median": took[len(took) // 2], "max": took[-1]}
    if first:
        text = {name: round(ms, 2) for name, ms in found.items()}
        print(json.dumps({"mb_each": own.nbytes / 1e6, "connections_paced": connections} | text))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Run both processes; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--gbit", type=float, default=1.0, help="rate of the link; 0 is no limit")
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        gather(asked)
        return 0
    try:
        make_link()
        runs = [
            subprocess.Popen(
                ["ip", "netns", "exec", host, sys.executable, *sys.argv, "--rank", str(rank)],
                env=os.environ | {"GLOO_SOCKET_IFNAME": host},
            )
            for rank, host in enumerate(HOSTS)
        ]
        try:
            return int(any(run.wait(PATIENCE_S) for run in runs))
        finally:
            for run in runs:
                run.kill()
                run.wait()
    finally:
        for host in HOSTS:
            ip("netns", "del", host, check=False)


if __name__ == "__main__":
    sys.exit(main())
