"""A model of 30B parameters in 4 bits: time to load, memory, and speed of answers.

The checkpoint is that of `bench.models.checkpoint_30b`: 48 layers of 128 experts, top 8.

    load        seconds over reading its files once through the system's cache, which is empty
                before both; for comparison, the first touch of as much memory
    rss         peak memory of the process over the packed weights, loaded and once it serves
    decode      one stream: time of a token over one read of the bytes that it needs
    prefill     tokens per second of prompts of 512 and 2,048 tokens
    beside      TTFT of short LS prompts while BE prompts of 2,048 tokens run, and alone

The output is a table, then one JSON line. The process must be fresh, since its peak memory is one
of the rows.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import Table, machine, median, paired, plain, quantile, result_file
from bench.energy import Run, metered
from qllm import QLLMEngine, SamplingParams
from qllm.kernels import cpu
from qllm.models.loader import load
from qllm.models.weights.quantised_experts import quantised_in
from qllm.models.weights.quantised_linears import weight_bytes

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SEED = 1
CHUNK = 16 << 20
REACH = {"load": 1.5, "rss": 1.1, "decode": 1.4}
"""Largest ratios allowed."""
ROWS = ("decode", "prefill", "beside")
PROMPTS = (512, 2048)
LS_TOKENS, BE_TOKENS = 64, 2048
REST_S = 8
"""Seconds until free memory is back: a host takes back free memory within seconds."""


def with_layers(folder: Path, num: int, place: Path) -> Path:
    """Make a checkpoint of the first layers, with links to the whole one's shards."""
    config = json.loads((folder / "config.json").read_text())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    layers = re.compile(r"model\.layers\.(\d+)\.")
    kept = {}
    for name, shard in index["weight_map"].items():
        found = layers.match(name)
        if found is None or int(found[1]) < num:
            kept[name] = shard
    for shard in set(kept.values()):
        (place / shard).symlink_to((folder / shard).resolve())
    (place / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num}))
    text = json.dumps(index | {"weight_map": kept})
    (place / "model.safetensors.index.json").write_text(text)
    return place


def free_bytes() -> int:
    """Return the bytes of memory that a process can get."""
    line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if "Available" in x)
    return int(line.split()[1]) * 1024


def forget(folder: Path) -> None:
    """Drop the files of a checkpoint from the system's cache."""
    for path in folder.glob("*.safetensors"):
        number = os.open(path, os.O_RDONLY)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def read_once(folder: Path) -> tuple[float, int]:
    """Return the seconds to read the files of a checkpoint, and their bytes."""
    buffer, total, start = bytearray(CHUNK), 0, time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while got := file.readinto(buffer):
                total += got
    return time.perf_counter() - start, total


TOUCH = """
import mmap, sys, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np
size, threads = map(int, sys.argv[1:])
memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)
parts = np.array_split(np.frombuffer(memory, np.uint8)[::4096], 16 * threads)
start = time.perf_counter()
with ThreadPoolExecutor(threads) as pool:
    list(pool.map(lambda part: part.fill(1), parts))
print(time.perf_counter() - start)
"""


def touch(num_bytes: int, threads: int) -> float:
    """Return the seconds until a process has new memory: a host may have taken back free memory."""
    command = [sys.executable, "-c", TOUCH, str(num_bytes), str(threads)]
    return float(subprocess.run(command, capture_output=True, check=True).stdout)


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def token_bytes(model: Any) -> int:
    """Return the bytes of weights that one token needs."""
    config, experts = model.config, 0
    for module in model.modules():
        held = quantised_in(module)
        if held is not None:
            experts += held.num_bytes
    embedding = model.get_input_embeddings().weight
    rest = weight_bytes(model) - experts - embedding.nbytes
    return int(rest + experts * config.num_experts_per_tok // config.num_experts)


def ids(rng: np.random.Generator, vocab: int, num: int) -> list[int]:
    """Return a random prompt."""
    return [int(i) for i in rng.integers(8, vocab, num)]


class Reading:
    """A reader of the packed weights of some layers, in place, with a number of threads."""

    def __init__(self, model: Any, threads: int, layers: int = 4) -> None:
        found = [quantised_in(module) for module in model.modules()]
        held = [one for one in found if one is not None][:layers]
        stacks = [w.stack.packed for one in held for w in one.weights.values() if w.stack]
        self._parts = [p.view(torch.float32) for s in stacks for p in s.view(-1).chunk(8)]
        self._bytes = sum(part.nbytes for part in self._parts)
        self._pool = ThreadPoolExecutor(threads)

    def gb_s(self) -> float:
        """Return the rate of one read of all weights."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # OpenMP's threads would spin next to ours
        start = time.perf_counter()
        list(self._pool.map(lambda part: torch.dot(part, part), self._parts))
        seconds = time.perf_counter() - start
        torch.set_num_threads(before)
        return self._bytes / seconds / 1e9


class Bench:
    """An engine, prompts for it, and the reference of its numbers."""

    def __init__(self, engine: QLLMEngine, model: Any, memory: Reading, quick: bool) -> None:
        self._engine, self._memory, self.quick = engine, memory, quick
        self._bytes, self._vocab = token_bytes(model), model.config.vocab_size
        self._rng = np.random.default_rng(SEED)

    def prompt(self, num: int) -> list[int]:
        """Return a new random prompt of this length."""
        return ids(self._rng, self._vocab, num)

    def decode(self, table: Table) -> dict[str, Any]:
        """Measure time per token against reading its weights, in turns."""
        over, tokens, energy = [], [], list[Run]()
        for _ in range(2 if self.quick else 7):
            read_s = self._bytes / self._memory.gb_s() / 1e9
            num = 4 if self.quick else 16
            with metered(energy) as computed:
                times = self._times(16, num)
                computed.append(16 + num - 1)
            tokens.append(float(np.median(np.diff(times))))
            over.append(tokens[-1] / read_s)
        found, ms = paired(over), paired([1e3 * t for t in tokens])
        reached = found.value <= REACH["decode"]
        table.add("time of a token over one read", found.text(), f"<= {REACH['decode']}", reached)
        table.add("decode, tokens/s", f"{1e3 / ms.value:.1f}", energy=energy)
        return {"over_read": found, "ms": ms, "bytes": self._bytes}

    def _times(self, num_prompt: int, num_tokens: int) -> list[float]:
        handle = self._engine.submit(self.prompt(num_prompt), "LS", num_tokens, sampling=GREEDY)
        return [time.perf_counter() for _ in handle]

    def prefill(self, table: Table) -> dict[str, Any]:
        """Measure tokens per second of a prompt."""
        rates = {}
        for num in PROMPTS[:1] if self.quick else PROMPTS:
            found, energy = [], list[Run]()
            for _ in range(1 if self.quick else 3):
                with metered(energy) as computed:
                    start = time.perf_counter()
                    self._engine.submit(self.prompt(num), "LS", 1, sampling=GREEDY).result(600)
                    found.append(num / (time.perf_counter() - start))
                    computed.append(num)
            rates[num] = paired(found)
            table.add(f"prefill of {num} tokens, tokens/s", rates[num].text(1), energy=energy)
        return rates

    def _ttft_ms(self) -> float:
        start = time.perf_counter()
        handle = self._engine.submit(self.prompt(LS_TOKENS), "LS", 2, sampling=GREEDY)
        first = next(iter(handle))
        assert first is not None
        found = (time.perf_counter() - start) * 1e3
        handle.result(600)
        return found

    def beside(self, table: Table) -> dict[str, Any]:
        """Measure TTFT of LS alone and while BE fills the machine, in turns."""
        alone, busy = [], []
        for _ in range(1 if self.quick else 4):
            alone += [self._ttft_ms() for _ in range(3)]
            jobs = [
                self._engine.submit(self.prompt(BE_TOKENS), "BE", 8, sampling=GREEDY)
                for _ in range(2)
            ]
            time.sleep(0.5)
            for _ in range(3):
                busy.append(self._ttft_ms())
                time.sleep(float(self._rng.uniform(0.1, 0.4)))
            for job in jobs:
                job.cancel()
        rows = {"alone": alone, "beside": busy}
        p99 = quantile(99)
        for name, values in rows.items():
            text = f"{median(np.array(values)):.0f} / {p99(np.array(values)):.0f}"
            table.add(f"TTFT of LS {name}, {LS_TOKENS} tokens, p50 / p99 ms", text)
        ratio = median(np.array(busy)) / median(np.array(alone))
        table.add("TTFT p50 beside BE over alone", f"{ratio:.2f}")
        return rows | {"p50_ratio": ratio}


def timed(what: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result, and the seconds that it took."""
    start = time.perf_counter()
    return what(), time.perf_counter() - start


def loading(table: Table, folder: Path, rounds: int, threads: int) -> tuple[Any, dict[str, Any]]:
    """Read the files and load them, in turns; return the model of the last round."""
    reads, loads, touches, loaded, num_bytes = list[float](), list[float](), list[float](), None, 0
    for _ in range(rounds):
        loaded = None
        forget(folder)
        seconds, num_bytes = read_once(folder)
        reads.append(seconds)
        forget(folder)
        time.sleep(REST_S)
        touches.append(touch(num_bytes, threads))
        time.sleep(REST_S)
        loaded, seconds = timed(lambda: load(folder))
        loads.append(seconds)
    assert loaded is not None
    ratio = paired([a / b for a, b in zip(loads, reads, strict=True)])
    packed = weight_bytes(loaded.model)
    table.add("load, s", f"{loads[-1]:.1f} of {packed / 1e9:.2f} GB")
    table.add("first touch of as much memory, s", f"{median(np.array(touches)):.1f}")
    reached = ratio.value <= REACH["load"]
    table.add("load over reading the files once", ratio.text(), f"<= {REACH['load']}", reached)
    rss = peak_bytes() / packed
    table.add(
        "peak memory over the packed weights, loaded",
        f"{rss:.3f}",
        f"<= {REACH['rss']}",
        rss <= REACH["rss"],
    )
    found = {
        "read_s": reads,
        "touch_s": touches,
        "load_s": loads,
        "over_read": ratio,
        "bytes": num_bytes,
    }
    return loaded, found | {"packed_bytes": packed, "rss": rss}


def folder_of(folder: Path, num_layers: int | None, place: Path) -> Path:
    """Return the checkpoint to load, after a check of the free memory."""
    if num_layers is not None:
        folder = with_layers(folder, num_layers, place)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if size * 1.1 > (free := free_bytes()):
        raise SystemExit(
            f"{size / 1e9:.1f} GB of weights need a tenth more, and {free / 1e9:.1f} GB of memory "
            "are free: take --layers"
        )
    return folder


def main() -> None:
    """Load the model and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of `bench.models.checkpoint_30b`")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--layers", type=int, help="take only so many, an even number")
    parser.add_argument("--rounds", type=int, default=1, help="how often it is loaded")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="beside loading")
    parser.add_argument("--no-check", action="store_true", help="without the start-up check")
    parser.add_argument("--quick", action="store_true", help="only shows that it runs")
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cpu.set_threads(args.threads)
    table, place = Table(), tempfile.TemporaryDirectory()
    folder = folder_of(args.folder, args.layers, Path(place.name))
    loaded, found = loading(table, folder, args.rounds, args.threads)
    rows: dict[str, Any] = {"load": found}
    engine, seconds = timed(
        lambda: QLLMEngine.from_model(
            loaded.model, threads=args.threads, max_kv_tokens=16384, conformance=not args.no_check
        )
    )
    with engine:
        packed = weight_bytes(loaded.model)
        how = "made" if args.no_check else "made and checked"
        table.add(f"engine {how}, s", f"{seconds:.1f}")
        rss = peak_bytes() / packed
        table.add(f"peak memory over the packed weights, engine {how}", f"{rss:.3f}")
        bench = Bench(engine, loaded.model, Reading(loaded.model, args.threads), args.quick)
        rows |= {"engine_s": seconds, "rss": rss}
        rows |= {name: getattr(bench, name)(table) for name in args.rows}
        kernels = engine.kernels
    config = {"threads": args.threads, "layers": loaded.model.config.num_hidden_layers}
    config |= {"seed": SEED, "kernels": kernels, "weights": loaded.weights}
    result = {"bench": "real_size", "machine": machine(), "config": config, "rows": plain(rows)}
    table.finish(result, args.out)


if __name__ == "__main__":
    main()
