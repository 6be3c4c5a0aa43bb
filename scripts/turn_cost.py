"""Work of the device loop's iterations, by reading and counting: no GPU is needed.

    python -m scripts.turn_cost              # instructions of the host build, by callgrind
    python -m scripts.turn_cost --sass 9.0   # and the compiled code of `qllm_turn`

The loop (`csrc/loop.h`) is built for this machine and runs under callgrind (valgrind and its
headers must be installed), with real rings and a model of 48 layers in stages of 4 that compute
nothing. `serial` counts the work of one thread in a decode step; `shared` the work that a block of
threads shares there, done by one: token records and the lane. `claim` counts the iterations that
take prompts in. Instructions depend on the compiler, not on the machine's speed. The last line of
stdout is one JSON document.

`--sass` links the kernels for an architecture (numba-cuda, NVRTC and nvJitLink) and reads them with
the disassembler of triton: registers, stack, instructions, system fences; the linker reports spills
of functions. Compiled separately (nvcc -rdc=true), functions save registers of their callers, which
`ptxas -v` counts as spills; linked, as here and in use, they do not.
"""

import argparse
import ctypes
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from bench.common import ROOT, machine
from qllm.device import deciding, lanes
from qllm.device.cubins import link_verbosely
from qllm.device.loop import DeviceLoop
from qllm.device.rank import HostRank
from qllm.device.server import address_of, attach
from qllm.ingress import Submission
from qllm.ingress.front_end import FrontEnd
from qllm.ingress.memory import ControlMemory, FrontEndMemory
from qllm.ingress.shm import Doorbell
from qllm.plan import ModelShape
from qllm.plugins import load_policy
from qllm.scheduler.decision import Limits
from qllm.types import Grain, Priority, SamplingParams, Slo

CSRC = ROOT / "qllm" / "device" / "csrc"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-DNDEBUG",
)
LAYERS, LAYERS_PER_STAGE, SEATS, PAGES, STAGE_NS = 48, 4, 32, 4096, 400_000
LONGEST = 4096
LIMITS = Limits(
    max_num_seqs=SEATS, max_step_tokens=2048, block_size=16, num_blocks=PAGES, grain=Grain.EXPERT,
    max_segment_ns=5_000_000, whole_steps=True,
)  # fmt: skip
SHAPE = ModelShape(LAYERS, 128, 8, (True,) * LAYERS, 50_000, LONGEST)
STEPS = 4
"""Decode steps that a count is averaged over."""


class Bucket(NamedTuple):
    """A copy of `qllm.cuda.lanes.Bucket`, whose import of torch takes minutes under callgrind."""

    tokens: int
    prefill: bool


class Key(NamedTuple):
    """A copy of `qllm.cuda.stages.Key`."""

    whole: bool
    start: int
    end: int
    bucket: Bucket
    embed: bool
    head: bool


class Tensor:
    """Memory with an address, as a lane describes it."""

    def __init__(self, num: int) -> None:
        self.words = np.zeros(num, np.int64)

    def data_ptr(self) -> int:
        return self.words.ctypes.data


def stages() -> Any:
    """Return captured stages that compute nothing, of both classes."""
    buckets = [Bucket(n, False) for n in (1, 2, 4, 8, 16, 32)]
    buckets += [Bucket(n, True) for n in (512, 2048 + SEATS)]
    keys = []
    for whole in (False, True):
        k = LAYERS if whole else LAYERS_PER_STAGE
        for bucket in buckets:
            for start in range(0, LAYERS, k):
                end = start + k
                heads = (True, False) if end == LAYERS and bucket.prefill else (end == LAYERS,)
                keys += [Key(whole, start, end, bucket, start == 0, head) for head in heads]
    most = 2048 + SEATS
    big, rows = ("ids", "pos", "slots", "seq", "gather"), ("tokens", "peaks")
    sizes = {name: most for name in big} | {"tables": SEATS * (LONGEST // 16), "num_tokens": 1}

    def lane() -> Any:
        tensors = {
            name: Tensor(sizes.get(name, 4 * (most // 16 + SEATS))) for name in lanes.TENSORS
        }
        tiles = {"max_rows": SEATS, "max_pages": LONGEST // 16, "block": 16}
        here = {name: t for name, t in tensors.items() if name not in rows}
        outs = {"tokens_R": tensors["tokens"], "peaks_R": tensors["peaks"]}
        return SimpleNamespace(
            on_device=here, hidden_SD=range(PAGES * 16 + 1), prefill_tiles=most // 16 + SEATS,
            **tiles, **outs,
        )  # fmt: skip

    return SimpleNamespace(
        captured=dict.fromkeys(keys), lanes={False: lane(), True: lane()}, num_layers=LAYERS
    )


class World:
    """A loop with one front end, on a clock that does not advance within an iteration.

    Args:
        native: Library of turn_cost.cpp.
    """

    def __init__(self, native: ctypes.CDLL) -> None:
        self.native, self.at_ns, self.number = native, 1, 0
        self.control = ControlMemory.create(0)
        rank = ctypes.cast(native.rank, ctypes.c_void_p).value
        deciding.compile_host = lambda policy: HostRank(rank, None)  # type: ignore[arg-type]
        self.stages = stages()
        pages = SimpleNamespace(page_size=16, num_pages=PAGES)
        limits = LIMITS
        self.loop = DeviceLoop(
            load_policy("qllm2"), self.stages, pages, SHAPE, limits,
            control=address_of(self.control.words), max_total_tokens=LONGEST,
            now_ns=lambda: self.at_ns, capacity=64, max_front_ends=1, ls_slots=8,
        )  # fmt: skip
        self.block = FrontEndMemory.create(0, (1 << 20,) * 4)
        bell = Doorbell.create()
        self.front_end = FrontEnd(self.block, self.control, bell, bell)
        attach(self.loop.server, self.block)
        self.loop.prepare()
        server, state, lanes_at = self.loop.addresses
        self.blocks = (ctypes.c_longlong * 4)(server, state, rank, lanes_at)

    def submit(self, priority: int, num_prompt: int) -> None:
        """Put a request into its ring."""
        self.front_end.submit(
            Submission(
                request_id=self.number, name="", priority=priority, token_ids=[5] * num_prompt,
                sampling=SamplingParams(temperature=0.0, ignore_eos=True, seed=1),
                stop_ids=frozenset(), max_tokens=256, slo=Slo(), arrival_ns=self.at_ns,
                deadline_ns=None,
            )
        )  # fmt: skip
        self.number += 1

    def turn(self, serial: bool = False, shared: bool = False) -> int:
        """Run an iteration, count these parts, and let its stage pass."""
        branch: int = self.native.take_turn(
            self.blocks, ctypes.c_longlong(self.at_ns), int(serial), int(shared)
        )
        self.at_ns += STAGE_NS
        return branch

    def steps(self, num: int, serial: bool = False, shared: bool = False) -> int:
        """Run the iterations of so many frames, from a frame's end on; return their number."""
        turns, wanted = 0, self.loop.server.block.get("next_frame_id") + num
        while True:
            is_last = self.loop.server.block.get("next_frame_id") == wanted
            layer, branch = self.loop.lanes.get("layer"), self.loop.lanes.get("branch")
            end = self.loop.keys[branch].end if branch >= 0 else layer
            if is_last and end == LAYERS:
                break
            self.turn(serial, shared)
            turns += 1
        list(self.front_end.receive())
        return turns


def run(library: str) -> None:
    """Run the iterations that count; under callgrind."""
    native = ctypes.CDLL(library)
    for priority in (Priority.LS, Priority.BE):
        for rows in (1, SEATS):
            world = World(native)
            for _ in range(rows):
                world.submit(priority, 40)
            world.steps(3)
            for what in ("serial", "shared"):
                turns = world.steps(STEPS, **{what: True})
                name = f"{what} {priority.name} {rows} {turns / STEPS:g}"
                native.report(name.encode())
    for prompt in (128, 2048):
        world = World(native)
        world.submit(Priority.LS, prompt)
        world.turn(serial=True)
        native.report(f"claim LS {prompt} 1".encode())
    world = World(native)
    for _ in range(3):
        world.turn()
    world.turn(serial=True)
    native.report(b"idle - 0 1")


def counts() -> list[dict[str, Any]]:
    """Build, run under callgrind, and return its counts."""
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/turn.so"
        source = ROOT / "scripts" / "turn_cost.cpp"
        subprocess.run(["g++", *FLAGS, f"-I{CSRC}", str(source), "-o", library], check=True)
        tool = ["valgrind", "--tool=callgrind", "--collect-atstart=no", "--error-exitcode=3"]
        tool += [f"--callgrind-out-file={folder}/out", "-q"]
        command = [sys.executable, "-m", "scripts.turn_cost", "--library", library]
        subprocess.run([*tool, *command], check=True, cwd=ROOT)
        found = []
        for file in sorted(Path(folder).glob("out.*"), key=lambda f: int(f.suffix[1:])):
            text = file.read_text()
            label = re.search(r"desc: Trigger: Client Request: (.*)", text)
            total = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
            if label is None or total is None:
                continue
            what, who, num, turns = label[1].split()
            steps = STEPS if what in ("serial", "shared") else 1
            found.append(
                {"what": what, "class": who, "rows_or_tokens": int(num), "turns": float(turns),
                 "instructions": int(total[1]) // steps}
            )  # fmt: skip
        return found


def spilled(log: str, kernel: str) -> dict[str, int]:
    """Return the bytes that a kernel and its functions spill for lack of registers, by function.

    Args:
        log: Output of `ptxas -v` for a whole program: the functions of a kernel come after it.
        kernel: Name of the kernel.
    """
    parts = re.split(r"Compiling entry function '(\w+)'", log)
    part = dict(zip(parts[1::2], parts[2::2], strict=True))[kernel]
    said = r"Function properties for (\S+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    found = re.findall(said, part)
    assert found, log
    return {name: int(n) + int(m) for name, n, m in found if int(n) + int(m)}


def sass(capability: tuple[int, int]) -> dict[str, Any]:
    """Return numbers of the compiled `qllm_turn`."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    cubin, log = link_verbosely(load_policy("qllm2"), capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def read(*command: str) -> str:
            done = [str(tools / command[0]), *command[1:], file.name]
            return subprocess.run(done, check=True, capture_output=True, text=True).stdout

        usage = read("cuobjdump", "--dump-resource-usage")
        line = re.search(r"Function qllm_turn:\s*\n\s*(.*)", usage)
        assert line is not None, usage
        numbers = dict(re.findall(r"(\w+):(\d+)", line[1]))
        text = read("cuobjdump", "-sass", "-fun", "qllm_turn")
    ops = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text)
    kinds = Counter(op.split(".")[0] for op in ops)
    return {
        "registers": int(numbers["REG"]),
        "stack_bytes": int(numbers["STACK"]),
        "spilled_bytes": spilled(log, "qllm_turn"),
        "instructions": len(ops),
        "system_fences": sum(op.startswith("MEMBAR") and "SYS" in op for op in ops),
        "byte_moves": sum(op.endswith("U8") and op[0] in "LS" for op in ops),
        "local_moves": kinds["LDL"] + kinds["STL"],
        "block_barriers": kinds["BAR"],
    }


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--library", help="take the turns with this library, under callgrind")
    parser.add_argument("--sass", help="architecture, like 9.0")
    args = parser.parse_args()
    if args.library:
        run(args.library)
        return
    out: dict[str, Any] = {"machine": machine(), "counts": counts()}
    for row in out["counts"]:
        print(row)
    if args.sass:
        major, minor = args.sass.split(".")
        out["sass"] = sass((int(major), int(minor)))
        print(out["sass"])
    print(json.dumps(out))


if __name__ == "__main__":
    main()
