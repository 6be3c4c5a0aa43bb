"""A model of 30B parameters in 4 bits of which half of the experts fit: is the disk the limit?

    decode    time to read the missing experts, over the time of an answer: share of the ceiling
    ttft      TTFT of LS requests beside a BE request that misses experts, over that alone
    llama     tokens/s over those of llama.cpp with the file mapped, under the same limit

The checkpoint is that of `checkpoint_30b`, and llama.cpp gets its values as GGUF. The ceiling is
the rate of direct reads in the engine's own file, of the same size and with as many threads, before
and after each answer. Memory is limited by a control group, in which each side runs alone, one
after the other. llama.cpp repacks no weights, because their copies would not fit.

The output is a table, then one JSON line.
"""

import argparse
import math
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Estimate, Table, machine, paired, plain, quantile, result_file
from bench.energy import Run, metered
from bench.models.checkpoint_30b import SHAPE, write
from bench.models.experts_disk import read_bytes
from bench.models.gguf_30b import write_gguf
from bench.models.memory_limit import forget, limited
from bench.models.rival import RivalError, library
from qllm import QLLMEngine, SamplingParams
from qllm.block_file import BLOCK, Blocks, whole_blocks
from qllm.engine.storage.reads import NUM_THREADS

QUICK: dict[str, Any] = SHAPE | {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
"""Shape of a model that only shows that the bench runs."""
QUICK_LAYERS = 4
SHARE = 0.5
"""Share of the experts in memory."""
REST_BYTES = 3 << 30
"""Memory for all but the experts: the limit of 48 layers is 10 GiB."""
LEAST_SHARE = 0.75
"""Least share of the disk's ceiling."""
KV_TOKENS, SEED = 4096, 7
READ_S = 1.0
"""Seconds of a measurement of the disk."""
LS_LENGTHS = 1, 16
LONGEST_S = 1200
BYTES_OF_4_BITS = 0.5 + 2 / 128


def expert_bytes(shape: Mapping[str, Any]) -> int:
    """Return the bytes of an expert, at most a block less than in the engine's file."""
    weights = 3 * shape["hidden_size"] * shape["moe_intermediate_size"]
    return whole_blocks(math.ceil(weights * BYTES_OF_4_BITS))


def largest(folder: Path) -> Path:
    """Return the largest file of a folder: next to a file of experts is its lock."""
    return max(folder.iterdir(), key=lambda path: path.stat().st_size)


class Ceiling:
    """The rate at which a disk gives experts: random direct reads of a file of experts.

    Args:
        path: The file.
        num_bytes: Bytes of an expert.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path, self._num_bytes = path, num_bytes
        self._rng = random.Random(SEED)
        self._num = (path.stat().st_size - BLOCK) // num_bytes
        self.is_direct = True

    def bytes_per_s(self) -> float:
        """Read for a second with as many threads as an engine has."""
        file, done = Blocks(self._path, os.O_RDONLY), list[int]()
        self.is_direct = file.is_direct
        start = time.perf_counter()

        def serve(rng: random.Random) -> None:
            room = memoryview(bytearray(self._num_bytes + BLOCK))
            first = -np.frombuffer(room, np.uint8).ctypes.data % BLOCK
            room = room[first : first + self._num_bytes]
            while time.perf_counter() - start < READ_S:
                assert file.read(room, BLOCK + rng.randrange(self._num) * self._num_bytes)
                done.append(self._num_bytes)

        seeds = [random.Random(self._rng.random()) for _ in range(NUM_THREADS)]
        threads = [threading.Thread(target=serve, args=(rng,)) for rng in seeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        file.close()
        assert len(done) >= NUM_THREADS, "each thread has read"
        return sum(done) / seconds


class Ours:
    """An engine with a share of the experts in memory.

    Args:
        folder: Checkpoint.
        experts: Folder for the file of experts.
        max_bytes: Most bytes of experts in memory.
        threads: Number of threads.
        vocab: Number of tokens of the vocabulary.
    """

    def __init__(
        self, folder: Path, experts: Path, max_bytes: int, threads: int, vocab: int
    ) -> None:
        start = time.perf_counter()
        self._engine = QLLMEngine.from_pretrained(
            folder,
            threads=threads,
            max_expert_bytes=max_bytes,
            expert_dir=str(experts),
            max_kv_tokens=KV_TOKENS,
            prefix_cache=False,
            conformance=False,
        )
        self.load_s = time.perf_counter() - start
        stats = self._engine.stats()
        self._pid, found = stats["pid"], stats["experts"]
        self.expert_bytes = found["slot_bytes"] // found["slots"]
        self.kernels = self._engine.kernels
        self.ceiling = Ceiling(largest(experts), self.expert_bytes)
        self._rng, self._vocab = np.random.default_rng(SEED), vocab

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    def _prompt(self, num: int) -> list[int]:
        return [int(i) for i in self._rng.integers(8, self._vocab, num)]

    def _missed(self, *names: str) -> int:
        stats = self._engine.stats()["experts"]
        return sum(int(stats[name]["bytes"]) for name in names)

    def _submit(self, num: int, priority: str, tokens: int) -> Any:
        sampling = SamplingParams(
            temperature=1.0, seed=int(self._rng.integers(1 << 30)), ignore_eos=True
        )
        return self._engine.submit(self._prompt(num), priority, tokens, sampling=sampling)

    def decode(self, table: Table, rounds: int, tokens: int) -> dict[str, Any]:
        """Measure answers of one BE request against the disk."""
        self._submit(1, "BE", tokens).result(LONGEST_S)
        shares, rates, speeds, mb, over = [], [], [], [], []
        energy = list[Run]()
        for _ in range(rounds):
            before, missed, read = self.ceiling.bytes_per_s(), self._missed("BE"), self._read()
            start = time.perf_counter()
            with metered(energy) as computed:
                self._submit(1, "BE", tokens).result(LONGEST_S)
                computed.append(tokens)
            seconds = time.perf_counter() - start
            missed, read = self._missed("BE") - missed, self._read() - read
            assert missed > 0, "a part of the experts is not in memory"
            rates.append((before + self.ceiling.bytes_per_s()) / 2)
            shares.append(missed / rates[-1] / seconds)
            speeds.append(tokens / seconds)
            mb.append(missed / tokens / 1e6)
            over.append(read / missed)
        share, speed, rate = paired(shares), paired(speeds), paired([r / 1e9 for r in rates])
        reached = share.value >= LEAST_SHARE
        table.add("decode: share of the disk's ceiling", share.text(), f">= {LEAST_SHARE}", reached)
        how = "direct reads" if self.ceiling.is_direct else "reads through the cache"
        table.add(f"  disk, GB/s of {how}", rate.text())
        table.add("  decode, tokens/s", speed.text(), energy=energy)
        table.add("  MB missed per token", paired(mb).text(0))
        table.add("  bytes read by the system / missed", paired(over).text())
        found = {"share": share, "disk_gb_s": rate, "tokens_per_s": speed, "mb_per_token": mb}
        return found | {"read_over_missed": over, "is_direct": self.ceiling.is_direct}

    def _read(self) -> int:
        return read_bytes(self._pid)

    def _ttft_ms(self, num: int) -> float:
        start = time.perf_counter()
        self._submit(num, "LS", 1).result(LONGEST_S)
        return (time.perf_counter() - start) * 1e3

    def ttft(self, table: Table, rounds: int) -> dict[str, Any]:
        """Measure TTFT of LS requests alone and beside a BE request that misses, in turns."""
        rows = {}
        for num in LS_LENGTHS:
            alone, beside = list[float](), list[float]()
            self._ttft_ms(num)
            for _ in range(rounds):
                alone += [self._ttft_ms(num) for _ in range(3)]
                missed = self._missed("BE")
                be = self._submit(1, "BE", KV_TOKENS - 64)
                time.sleep(0.5)
                beside += [self._ttft_ms(num) for _ in range(3)]
                assert be.finish_reason is None, "there is BE work all the time"
                be.cancel()
                be.result(LONGEST_S)
                assert self._missed("BE") > missed, "the BE request misses experts"
            each = {"alone": np.array(alone), "beside": np.array(beside)}
            for p in (50, 99):
                ms = {name: quantile(p)(values) for name, values in each.items()}
                text = f"{ms['beside']:.0f} / {ms['alone']:.0f} ms"
                table.add(f"LS with a prompt of {num}: TTFT p{p}, beside BE / alone", text)
            rows[str(num)] = {"alone_ms": alone, "beside_ms": beside}
        return rows


def llama_rows(
    table: Table, python: str, file: Path, threads: int, rounds: int, tokens: int, vocab: int
) -> dict[str, Any]:
    """Measure answers of llama.cpp with a file that is mapped.

    Returns:
        Its description, its tokens/s and MB read per token; the reason if it ended.
    """
    forget(file)
    rng, speeds, mb, energy = np.random.default_rng(SEED), [], [], list[Run]()
    try:
        rival = library(python, "llama_rate.py", file, str(threads), "mapped")
        try:
            rival.rates([int(rng.integers(8, vocab))], tokens)
            for _ in range(rounds):
                before = read_bytes(rival.pid)
                with metered(energy) as computed:
                    _, token_s = rival.rates([int(rng.integers(8, vocab))], tokens)
                    computed.append(tokens)
                speeds.append(1 / token_s)
                mb.append((read_bytes(rival.pid) - before) / tokens / 1e6)
        finally:
            rival.close()
    except RivalError as error:
        table.add("llama.cpp", str(error))
        return {"error": str(error)}
    speed = paired(speeds)
    table.add("llama.cpp mapped: decode, tokens/s", speed.text(), energy=energy)
    table.add("  MB read per token", paired(mb).text(0))
    return {"about": rival.about, "tokens_per_s": speed, "mb_per_token": mb}


def once(path: Path, make: Callable[[Path], object]) -> Path:
    """Make a file or folder unless it exists. It gets its name when it is complete."""
    if not path.exists():
        part = path.with_name(f"{path.name}.part")
        if part.is_dir():
            shutil.rmtree(part)
        make(part)
        part.rename(path)
    return path


def check_room(place: Path, num_bytes: int) -> None:
    """Refuse a folder on a disk with less than so many free bytes."""
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise SystemExit(
            f"{place} has {free / 1e9:.1f} GB free, and the bench writes {num_bytes / 1e9:.1f} GB: "
            "give another --dir, or --layers"
        )


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on a disk")
    parser.add_argument("--keep", action="store_true", help="leave the files, to use them again")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--llama", help="python of an environment with xllamacpp")
    parser.add_argument("--quick", action="store_true", help="only shows that it runs")
    parser.add_argument("--out", type=result_file)
    args = parser.parse_args()
    if args.quick:
        args.layers, args.rounds = QUICK_LAYERS, 1
    return args


def measured(args: argparse.Namespace, place: Path, table: Table) -> dict[str, Any]:
    """Write the files into a folder, measure both sides, and return the rows."""
    shape, layers, rounds = QUICK if args.quick else SHAPE, args.layers, args.rounds
    vocab, own = shape["vocab_size"], expert_bytes(shape)
    experts = layers * shape["num_experts"] * own
    check_room(place, int((3.3 if args.keep else 2.2) * (experts + 3 * vocab * 2048)))
    folder, files = place / f"int4-{layers}", place / f"experts-{layers}"
    start = time.perf_counter()
    once(folder, lambda part: write(part, layers, shape))
    table.add("checkpoint written, s", f"{time.perf_counter() - start:.0f}")
    forget(*folder.glob("*.safetensors"))
    max_bytes = int(SHARE * experts)
    with limited(max_bytes + REST_BYTES) as limit:
        ours = Ours(folder, files, max_bytes, args.threads, vocab)
        try:
            table.add(
                "limit of memory / all experts, GB", f"{limit / 1e9:.2f} / {experts / 1e9:.2f}"
            )
            table.add("loaded, s", f"{ours.load_s:.0f}")
            found = {"decode": ours.decode(table, rounds, args.tokens)}
            found["ttft"] = ours.ttft(table, rounds)
        finally:
            ours.close()
    found |= {"limit_bytes": limit, "expert_bytes": ours.expert_bytes, "load_s": ours.load_s}
    found |= {"max_expert_bytes": max_bytes, "kernels": ours.kernels}
    if args.llama is None:
        table.add("llama.cpp", "not measured: give --llama PYTHON")
        return found
    if not args.keep:
        shutil.rmtree(folder)
        shutil.rmtree(files)
    start = time.perf_counter()
    file = once(place / f"q4_0-{layers}.gguf", lambda part: write_gguf(part, layers, shape))
    table.add("GGUF written, s", f"{time.perf_counter() - start:.0f}")
    with limited(max_bytes + REST_BYTES):
        rows = llama_rows(table, args.llama, file, args.threads, rounds, args.tokens, vocab)
    found["llama"] = rows
    speed = found["decode"]["tokens_per_s"]
    if isinstance(rows.get("tokens_per_s"), Estimate):
        ratio = speed.value / rows["tokens_per_s"].value
        table.add("decode: speed over that of llama.cpp", f"{ratio:.2f}x")
    return found


def main() -> None:
    """Measure, print the table and the result."""
    args, table = arguments(), Table()
    if args.keep:
        args.dir.mkdir(parents=True, exist_ok=True)
        rows = measured(args, args.dir, table)
    else:
        with tempfile.TemporaryDirectory(dir=args.dir) as place:
            rows = measured(args, Path(place), table)
    names = ("threads", "layers", "rounds", "tokens", "quick")
    config = {name: getattr(args, name) for name in names} | {"seed": SEED}
    result = {"bench": "experts_30b", "machine": machine(), "config": config, "rows": plain(rows)}
    table.finish(result, args.out)


if __name__ == "__main__":
    main()
