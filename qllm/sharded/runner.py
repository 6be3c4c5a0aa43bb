"""A runner whose model is split over several processes, of this host or of several.

    TorchRunner    requests, frames, programs, samples: as for one process, in rank 0's process
      RankBackend    KV in the memory of ranks
        RankCompute    embedding, layers and head, each a call of all ranks

The scheduler and the runner do not know of ranks. Other ranks hold no requests and no frames: they
get addresses of that memory with every call.
"""

import time
from collections.abc import Callable, Sequence

from torch import nn

from qllm.errors import ConfigError, DeviceError, shown
from qllm.kernels import cpu
from qllm.models.discover import ModelParts
from qllm.models.parts.inventory import described, inventory
from qllm.runner.compute import Compute, RunOp, driver_for, listed
from qllm.runner.cpu import CpuBackend
from qllm.runner.kv import RequestKV
from qllm.runner.layers.rows import PLAIN
from qllm.runner.layers.trial import Charge
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import OpKind
from qllm.sharded.group import DEADLINE_S, Calls, Group
from qllm.sharded.head import RankEmbedding, RankHead
from qllm.sharded.host_memory import HostMemory
from qllm.sharded.hosts import HostGroup
from qllm.sharded.kv import RankKV
from qllm.sharded.memory import SharedMemory
from qllm.sharded.plan import PIECE_ROWS, ROWS_FROM
from qllm.sharded.rank import SplitModel, split_model
from qllm.sharded.sweep import RankSweep


def sharded_runner(
    model: nn.Module,
    tp: int,
    *,
    max_segment_ms: float = 5.0,
    batch_invariant: bool = False,
    expert_weights: str = "auto",
    activations: str = "bf16",
    threads: int = 1,
    rows_from: int = ROWS_FROM,
    piece_rows: int = PIECE_ROWS,
    deadline_s: float = DEADLINE_S,
    hosts: Sequence[str] = (),
    secret: bytes = b"",
    clock: Callable[[], int] = time.perf_counter_ns,
) -> TorchRunner:
    """Return a runner on `tp` ranks: this process, and forked processes or those of other hosts.

    Results have the bits of `cpu_runner`.

    Args:
        model: Whole model in evaluation mode, in bf16, which no other runner drives.
        tp: Number of ranks.
        max_segment_ms: Most milliseconds of work between two boundaries.
        batch_invariant: True for level L2: see `cpu_runner`.
        expert_weights: Format of experts: see `EngineConfig`.
        activations: Dtype of the inputs of quantised products: see `EngineConfig`.
        threads: Kernel threads of each rank.
        rows_from: Least rows of an op whose output projection is split by rows. No result depends
            on this number.
        piece_rows: Least rows of a piece that goes to another host while the next is computed. No
            result depends on this number.
        deadline_s: Seconds that a rank waits for the others before all ranks fail.
        hosts: Addresses HOST:PORT of ranks 1, 2, ...; without them all ranks are on this host.
        secret: Secret that all hosts have.
        clock: Clock in nanoseconds that measures segments.

    Raises:
        ModelError: A part of the model cannot be split.
        ConfigError: The model cannot be split over so many ranks, or a setting is not possible. Or
            a host has something else than this one: see `HostGroup`.
        DeviceError: A rank did not start.
    """
    if not deadline_s > 0:
        raise ConfigError(f"deadline_s={shown(deadline_s)} is no time; use a number above 0")
    split = split_model(model, tp, expert_weights=expert_weights, activations=activations)
    rounding = expert_weights, activations
    memory = HostMemory() if hosts else SharedMemory()
    group: Calls
    if isinstance(memory, HostMemory):
        group = HostGroup(split, memory, hosts, secret, rounding, threads, deadline_s)
    else:
        group = Group(split, memory, threads, deadline_s)

    def backend(parts: ModelParts) -> RankBackend:
        compute = RankCompute(split, group, memory, (rows_from, piece_rows), threads)
        return RankBackend(split, group, memory, compute, max_segment_ms, batch_invariant)

    try:
        runner = TorchRunner(model, backend, rounding=rounding, on_ranks=True, clock=clock)
    except BaseException:
        group.close()
        raise
    runner.charge = _with_copies(runner.charge, split)
    return runner


def _with_copies(charge: Charge, split: SplitModel) -> Charge:
    """Return the bytes of a request's KV on all ranks, of which several may hold one KV head."""
    num_kept = sum(len(plan.layers[0].kv_heads) for plan in split.plan.ranks)
    num = split.plan.shape.layers[0].num_kv_heads
    return charge._replace(token_bytes=charge.token_bytes * num_kept // num)


class RankCompute(Compute):
    """The implementations of a model on its ranks.

    Args:
        split: Model and its split.
        group: Ranks.
        memory: Memory that they share.
        rows: Numbers of rows `rows_from` and `piece_rows`: see `RankSweep`.
        threads: Kernel threads of rank 0.
    """

    is_ours = True
    stops_between_keys = True

    def __init__(
        self,
        split: SplitModel,
        group: Calls,
        memory: SharedMemory,
        rows: tuple[int, int],
        threads: int,
    ) -> None:
        # The base class would pack the weights of the whole model.
        parts = split.parts
        self.rule, self.streams, self.banks = PLAIN, True, split.banks
        self.drivers = tuple(driver_for(layer, None) for layer in parts.layers)
        self.sweep = sweep = RankSweep(group, memory, split.banks, split.plan, *rows)
        self.courses = sweep.courses
        self.embed = RankEmbedding(group, memory, parts)
        self.head = RankHead(group, memory, sweep.desks, parts)
        self._threads = threads
        self._size, self._known = group.size, described(inventory(parts.layers))
        has_mlp = [layer.shared is not None or not layer.is_moe for layer in parts.layers]
        num_routers = sum(layer.router is not None for layer in parts.layers)
        self._nums = {"attention": len(parts.layers), "router": num_routers}
        self._nums |= {"mlp": sum(has_mlp)} if any(has_mlp) else {}

    def enter(self) -> None:
        """Set the threads of rank 0. Ranks have packed their weights."""
        cpu.set_threads(self._threads)

    def leave(self) -> None:
        """Do nothing: the modules have kept their weights."""

    def follow_rule(self, ops: dict[OpKind, RunOp]) -> None:
        """Do nothing: no op calls the model's code."""

    @property
    def names(self) -> dict[str, str]:
        ours, total = f"qllm {cpu.kind()}", len(self.drivers)
        layers = {name: f"{ours} ({num} of {total} layers)" for name, num in self._nums.items()}
        return layers | {
            "experts": listed(bank.kernel for bank in self.banks if bank is not None),
            "linear": "in attention",
            "head": ours,
            "sweep": f"{total} of {total} layers in one call",
            "parts": self._known,
            "ranks": str(self._size),
            "row_rule": "none",
            "missing": "none",
        }


class RankBackend(CpuBackend):
    """The CPU backend over ranks.

    Args:
        split: Model and its split.
        group: Ranks. They end with the backend.
        memory: Memory that they share.
        compute: Implementations of the model on its ranks.
        max_segment_ms: Most milliseconds of work between two boundaries.
        batch_invariant: True for level L2: see `cpu_runner`.
    """

    def __init__(
        self,
        split: SplitModel,
        group: Calls,
        memory: SharedMemory,
        compute: RankCompute,
        max_segment_ms: float,
        batch_invariant: bool,
    ) -> None:
        self.group, self._memory = group, memory
        super().__init__(split.model, split.parts, compute, max_segment_ms, batch_invariant)
        pids = zip(group.processes, split.plan.ranks, strict=True)
        here = [{"pid": pid, "weight_bytes": plan.num_bytes} for pid, plan in pids]
        places = zip(here[1:], group.hosts, strict=False)
        apart = [rank | {"host": name} for rank, name in places]
        self.ranks = [here[0], *(apart or here[1:])]
        self._heads = [plan.layers[0].kv_heads for plan in split.plan.ranks]

    def close(self) -> None:
        super().close()
        self.group.close()

    def new_kv(self, capacity: int) -> RequestKV:
        parts = self._parts
        return RankKV(parts.num_kv_layers, capacity, parts.kv_layers, self._memory, self._heads)

    def fault(self, error: Exception) -> DeviceError | None:
        if isinstance(error, DeviceError) or not self.group.has_failed:
            return error if isinstance(error, DeviceError) else None
        return DeviceError(f"the ranks have ended: {error}")
