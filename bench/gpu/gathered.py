"""The end of an op on ranks (`qllm/cuda/csrc/gathered_norm.h`) with all ranks on one device.

A case's buffers hold on each rank what that rank would have computed, and NaN elsewhere. Results
are compared bit by bit with `expected`, a plain definition. Without a GPU the host build of the
kernel runs, with threads as ranks.
"""

import ctypes
import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bench.gpu.kernels import seconds
from qllm.cuda.calls import Size, cuda_calls
from qllm.cuda.gathered_norm import CSRC, KERNEL, RANKS, compile_norm

MOST_RANKS, CHAINS, ALIGNMENT = 8, 16, 256
BLOCKS, THREADS = 8, 256
DEADLINE_NS = 5_000_000_000
LATE = "late"


class Arguments(ctypes.Structure):
    """`GatheredNorm` in csrc/gathered_norm.h."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "width", "top_k")),
        *((name, c_int64) for name in ("parts", "slots", "residual", "sums", "normed")),
        *((name, c_int64) for name in ("signals", LATE)),
        ("columns", c_int64 * (MOST_RANKS + 1)),
        *((name, c_void_p) for name in ("owners", "gates", "weight")),
        ("deadline_ns", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        *((name, c_int32) for name in ("wide_gates", "has_parts", "rounds_once", "unused")),
    )


class Case(NamedTuple):
    """An op's end, as one process has it; tensors are on the CPU."""

    residual_TD: Tensor
    parts_TD: Tensor | None
    """Outputs of a product, which ranks split by columns; None without one."""
    columns: list[int]
    """First column of each rank, then the width."""
    slots_TKD: Tensor | None
    """Outputs of experts; None without routed experts."""
    owners_TK: Tensor
    """Ranks of the slots, int32."""
    gates_TK: Tensor
    """Factors of the slots, fp32 or bf16."""
    weight_D: Tensor
    """Weight of the norm, fp32."""
    eps: float
    scale: float
    """Factor of what is added to the residual."""
    rounds_once: bool

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.columns) - 1


def random_case(
    rng: random.Random, ranks: int, rows: int, width: int, top_k: int, *, has_parts: bool = True
) -> Case:
    """Return a case; without slots it always has parts."""
    torch.manual_seed(rng.randrange(1 << 30))
    cuts = sorted(8 * rng.randrange(width // 8 + 1) for _ in range(ranks - 1))
    gates = torch.rand(rows, top_k)
    bf16 = torch.bfloat16
    return Case(
        torch.randn(rows, width).mul_(4).to(bf16),
        torch.randn(rows, width).to(bf16) if has_parts or not top_k else None,
        [0, *cuts, width],
        torch.randn(rows, top_k, width).to(bf16) if top_k else None,
        torch.randint(ranks, (rows, top_k), dtype=torch.int32),
        gates if rng.random() < 0.5 else gates.to(bf16),
        torch.rand(width) + 0.5,
        rng.choice((1e-6, 1e-5)),
        rng.choice((1.0, 0.22)),
        rng.random() < 0.5,
    )


CANCELS = (2.0**24, -(2.0**24), 1.0, -1.0, 3.0, 2.0**-8)
"""Values of slots whose sum in fp32 depends on its order."""
AMPLIFIES = 2.0**-17
"""Part of the mean of squares that is left after `eps`: one fp32 step of the mean is then more
than one bf16 step of the results."""


def sharp(case: Case) -> Case:
    """Return a case of the same shape whose bits change if an order of additions does.

    With slots, that is the order of slots. Without, it is the order of the squares of a row: all
    rows are equal, and `eps` takes away nearly all of their mean.
    """
    if case.slots_TKD is not None:
        chosen = torch.randint(len(CANCELS), case.slots_TKD.shape)
        slots = torch.tensor(CANCELS, dtype=torch.bfloat16)[chosen]
        return case._replace(slots_TKD=slots, gates_TK=torch.ones_like(case.gates_TK))
    assert case.parts_TD is not None
    size_D = torch.exp2(torch.randint(-6, 7, case.weight_D.shape)).to(torch.bfloat16)
    rows = [(x[:1] * size_D).expand_as(x).clone() for x in (case.residual_TD, case.parts_TD)]
    case = case._replace(residual_TD=rows[0], parts_TD=rows[1])
    mean = expected(case)[0][0].double().square().mean()
    return case._replace(eps=-float(mean) * (1 - AMPLIFIES))


# -- the plain definition


def expected(case: Case) -> tuple[Tensor, Tensor]:
    """Return the sums and the normed rows that all ranks must have."""
    bf16 = torch.bfloat16
    num, width = case.residual_TD.shape
    y_TD = case.parts_TD
    if case.slots_TKD is not None:
        total_TD = torch.zeros(num, width)
        for k in range(case.slots_TKD.shape[1]):
            product_TD = case.slots_TKD[:, k].float() * case.gates_TK[:, k, None].float()
            total_TD += product_TD.to(case.gates_TK.dtype).float()
        y_TD = total_TD.to(bf16) if y_TD is None else total_TD.to(bf16) + y_TD
    assert y_TD is not None
    sums_TD = case.residual_TD + (y_TD.float() * case.scale).to(bf16)
    chains = torch.zeros(num, CHAINS)
    padded = torch.nn.functional.pad(sums_TD.float(), (0, -width % CHAINS))
    for piece in padded.split(CHAINS, 1):
        chains = chains + piece * piece  # a square of bf16 is exact in fp32
    while chains.shape[1] > 1:
        left, right = chains.chunk(2, 1)
        chains = left + right
    root = (chains / width + case.eps).double().sqrt().float()  # that of fp32 may be a bit off
    scaled_TD = sums_TD.float() * (1 / root)
    if not case.rounds_once:
        scaled_TD = scaled_TD.to(bf16).float()
    return sums_TD, (case.weight_D * scaled_TD).to(bf16)


# -- all ranks in one memory


class Buffers:
    """Buffers of all ranks, one behind the other, and the arguments of the kernel.

    Args:
        case: Op's end.
        device: Device of the memory.
        blocks: Blocks of a rank.
        deadline_ns: Longest wait for a rank.
    """

    def __init__(
        self, case: Case, device: str, blocks: int = BLOCKS, deadline_ns: int = DEADLINE_NS
    ) -> None:
        num, width = case.residual_TD.shape
        ranks, top_k = case.ranks, case.gates_TK.shape[1]
        sizes = {
            "parts": 2 * num * width, "slots": 2 * num * top_k * width,
            "residual": 2 * num * width, "sums": 2 * num * width, "normed": 2 * num * width,
            "signals": 4 * blocks * ranks, LATE: 4,
        }  # fmt: skip
        self._at, end = {}, 0
        for name, size in sizes.items():
            self._at[name] = end
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.blocks, self.ranks, self._shape = blocks, ranks, (num, width)
        self.memory = torch.full((ranks, end), 255, dtype=torch.uint8)  # bf16 NaNs
        self._fill(case)
        self.memory = self.memory.to(device)
        self._kept = [
            x.to(device).contiguous() for x in (case.owners_TK, case.gates_TK, case.weight_D)
        ]
        owners, gates, weight = (x.data_ptr() for x in self._kept)
        self.arguments = Arguments(
            rows=num, width=width, top_k=top_k, **self._at, owners=owners, gates=gates,
            weight=weight, deadline_ns=deadline_ns, eps=case.eps, scale=case.scale,
            wide_gates=case.gates_TK.dtype is torch.float32, rounds_once=case.rounds_once,
            has_parts=case.parts_TD is not None,
            columns=(c_int64 * (MOST_RANKS + 1))(*case.columns),
        )  # fmt: skip

    def _fill(self, case: Case) -> None:
        num = self._shape[0]
        for rank in range(self.ranks):
            self._tensor("signals", rank, (self.blocks * self.ranks,), torch.int32).zero_()
            self._tensor(LATE, rank, (1,), torch.int32).zero_()
            lo, hi = num * rank // self.ranks, num * (rank + 1) // self.ranks
            self._tensor("residual", rank)[lo:hi] = case.residual_TD[lo:hi]
            own = slice(*case.columns[rank : rank + 2])
            if case.parts_TD is not None:
                self._tensor("parts", rank)[:, own] = case.parts_TD[:, own]
            if case.slots_TKD is not None:
                is_own = case.owners_TK == rank
                self._tensor("slots", rank, case.slots_TKD.shape)[is_own] = case.slots_TKD[is_own]

    def _tensor(
        self, name: str, rank: int, shape: tuple[int, ...] = (), kind: torch.dtype = torch.bfloat16
    ) -> Tensor:
        shape = tuple(shape) or self._shape
        num_bytes = kind.itemsize * torch.Size(shape).numel()
        start = self._at[name]
        return self.memory[rank, start : start + num_bytes].view(kind).view(shape)

    def results(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the sums and the normed rows of each rank."""
        for rank in range(self.ranks):
            yield self._tensor("sums", rank).cpu(), self._tensor("normed", rank).cpu()

    def num_late(self) -> int:
        """Return the number of ranks that waited for longer than the deadline."""
        late = [self._tensor(LATE, r, (1,), torch.int32) for r in range(self.ranks)]
        return int(torch.cat(late).sum())


class Runs(Protocol):
    """A build of the kernel."""

    def run(self, buffers: Buffers) -> None:
        """Run all ranks; a device may be busy with them after the return."""
        ...


class HostBuild:
    """The kernel on this machine, built into a folder.

    Args:
        folder: Folder of the library.
        flags: More options for the compiler.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        library = folder / "gathered_norm.so"
        command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-Wall", "-Wextra"]
        command += ["-ffp-contract=off", "-fPIC", "-shared", "-pthread", *flags]
        source = str(CSRC / "gathered_norm.cpp")
        done = subprocess.run(
            [*command, source, "-o", str(library)], capture_output=True, text=True, check=False
        )
        if done.stderr:
            raise RuntimeError(f"the host build of the kernel: {done.stderr[-2000:]}")
        self.library = ctypes.CDLL(str(library))
        self.library.qllm_run.restype = c_int64

    def run(
        self,
        buffers: Buffers,
        *,
        is_virtual: bool = True,
        threads: int = 1,
        missing: int = -1,
    ) -> None:
        """Run all ranks but the missing one, if it is one.

        Args:
            buffers: Memory and arguments.
            is_virtual: True for `Virtual`, False for `Loads`.
            threads: Threads of a block.
            missing: Rank that does not come.
        """
        parts = (c_void_p * MOST_RANKS)(*(rank.data_ptr() for rank in buffers.memory))
        grid = map(c_int64, (buffers.blocks, threads, missing))
        given = c_int64(is_virtual), ctypes.byref(buffers.arguments)
        self.library.qllm_run(c_int64(buffers.ranks), parts, *given, *grid)


class DeviceBuild:
    """The kernel on this machine's GPU, with `Virtual`, for one number of ranks."""

    def __init__(self, ranks: int) -> None:
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
        self._calls = cuda_calls()
        self._kernel = self._calls.load(compile_norm("Virtual", ranks, arch).cubin, KERNEL)

    def run(self, buffers: Buffers) -> None:
        """Launch all ranks."""
        net = (c_int64 * 2)(buffers.memory.data_ptr(), buffers.memory.stride(0))
        row_bytes = 2 * buffers.arguments.width
        size = Size((buffers.blocks, buffers.ranks, 1), THREADS, row_bytes)
        given = bytes(net), bytes(c_int64(0)), bytes(buffers.arguments)
        stream = torch.cuda.current_stream().cuda_stream
        self._calls.launch(self._kernel, size, given, stream)


# -- sections of `make gpu-check`


def compared(build: Runs, device: str, ranks: int, cases: int, most: int) -> dict[str, Any]:
    """Run random cases twice each; raise where a bit differs from the plain definition.

    Args:
        build: Kernel.
        device: Device of the memory.
        ranks: Number of ranks.
        cases: Number of cases.
        most: Width of the widest rows, over 8.
    """
    rng = random.Random(ranks)
    for _ in range(cases):
        rows, width = rng.randrange(1, 70), 8 * rng.randrange(1, most + 1)
        case = random_case(
            rng, ranks, rows, width, rng.choice((0, 0, 1, 8)), has_parts=rng.random() < 0.5
        )
        case = rng.choice((case, sharp(case)))
        buffers, wanted = Buffers(case, device, rng.choice((1, 2, BLOCKS))), expected(case)
        for _ in range(2):
            build.run(buffers)
        for rank, found in enumerate(buffers.results()):
            if buffers.num_late() or not all(map(torch.equal, found, wanted)):
                raise AssertionError(
                    f"{ranks} ranks, {rows} x {width}, top_k {case.gates_TK.shape[1]}: rank {rank} "
                    f"has other bits; {buffers.num_late()} ranks were late"
                )
    return {"cases": cases}


def timed(build: Runs, device: str, ranks: int, dry: bool) -> dict[str, Any]:
    """Measure the shapes of Qwen3-30B-A3B's layers beside the same work by torch, without copies.

    On one device nothing crosses a link, so this is the cost of the kernel's work and its meetings.
    """
    found = {}
    for rows, top_k in ((8, 8),) if dry else ((32, 8), (1024, 8), (4096, 0)):
        width = 64 if dry else 2048
        case = random_case(random.Random(0), ranks, rows, width, top_k, has_parts=False)
        buffers = Buffers(case, device)
        moved = [x.to(device) for x in case if isinstance(x, Tensor)]
        us = 1e6 * seconds([lambda buffers=buffers: build.run(buffers)], device)
        plain = 1e6 * seconds([lambda case=case, moved=moved: by_torch(case, moved)], device)
        found[f"{rows}_top_{top_k}"] = {"us": us, "torch_us": plain, "late": buffers.num_late()}
    return found


def by_torch(case: Case, moved: list[Tensor]) -> Tensor:
    """Add and norm on one rank with torch's operations, which round and order otherwise."""
    residual_TD, given, *rest = moved
    if case.slots_TKD is not None:
        given = (given * rest[1][..., None]).sum(1).to(residual_TD.dtype)
    total_TD = residual_TD + given * case.scale
    weight_D = rest[-1].to(residual_TD.dtype)
    return torch.nn.functional.rms_norm(total_TD, weight_D.shape, weight_D, case.eps)


def sections(dry: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield every section by name."""
    device = "cpu" if dry else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        host = HostBuild(Path(folder)) if dry else None
        for ranks in RANKS:

            def run(ranks: int = ranks) -> dict[str, Any]:
                build = host or DeviceBuild(ranks)
                found = compared(build, device, ranks, *(2, 20) if dry else (15, 300))
                return found | timed(build, device, ranks, dry)

            yield f"virtual_{ranks}", run
