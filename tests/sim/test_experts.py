"""Experts on a disk in the simulator: the bytes of an engine, and the times of a disk."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.models.simulated_disk import (
    BYTES_OFF,
    FIT,
    IN_TURN,
    MOST_SKEW,
    NUM_TOKENS,
    TOGETHER,
    Live,
    Load,
    PacedDisk,
    fitted_skew,
    recorded,
    requests_of,
)
from qllm.config import EngineConfig
from qllm.engine.storage.reads import BE_SHARE, NUM_THREADS, DiskOrder, ExpertRead, Ticket
from qllm.errors import ConfigError
from qllm.kernels import cpu
from qllm.measure.disk_rate import DiskRate
from qllm.measure.random_moe import make_random_moe
from qllm.plan import ModelShape
from qllm.plugins import load_policy
from qllm.record.summary import request_metrics
from qllm.record.trace import Ran
from qllm.runner.displacing import Use
from qllm.runner.placing import Wanted
from qllm.sim.costs import CostFile, FileShape
from qllm.sim.experts import (
    ExpertsOnDisk,
    ReadingIngress,
    SkewedRouting,
    TracedRouting,
    VirtualReads,
)
from qllm.sim.presets import preset
from qllm.sim.run import Simulated, SimulatedEngine, simulate
from qllm.sim.timeline import SimCosts, expert_coverage
from qllm.types import NS_PER_MS, NS_PER_S
from qllm.workloads.spec import RequestSpec
from qllm_policies.fcfs import Fcfs
from tests.support.simulation import qllm

assert cpu.MISSING is None, cpu.MISSING


def costs_of(shape: ModelShape, **costs: float) -> CostFile:
    """Costs in which only a few things take time."""
    known = asdict(SimCosts(expert_ns=20_000, head_ns=100_000)) | costs
    return CostFile(
        model="x", machine="y", dtype="bfloat16", origin="computed", max_kv_tokens=65536,
        shape=FileShape(**shape._asdict()), costs={n: float(v) for n, v in known.items()},
        expert_bytes=4096,
    )  # fmt: skip


SMALL = ModelShape(3, 8, 2, (False, True, True), 97, 4096)


# -- bytes, against an engine


def assert_near(found: dict[str, Any], live: Live) -> None:
    for name in live.load.names:
        expected = live.stats[name]["bytes"]
        assert expected > 0
        assert abs(found[name]["bytes"] / expected - 1) <= BYTES_OFF, (name, found, live.stats)
        assert found[name]["bytes"] == found[name]["loads"] * live.expert_bytes


@pytest.mark.parametrize("num_slots", [10, 16, 24])
@pytest.mark.parametrize("load", [IN_TURN, TOGETHER], ids=["in turn", "together"])
def test_bytes_by_a_routing_trace_are_those_of_an_engine(num_slots: int, load: Load) -> None:
    """`tiny`, with 32 experts: requests one after the other of both classes, or BE together."""
    live = Live("tiny", num_slots, load)
    _, found = live.simulated(recorded(live), costs_of(live.shape))
    assert_near(found, live)
    for name in found:
        assert found[name]["uses"] == live.stats[name]["uses"]


def test_bytes_of_an_even_router_are_more_than_those_of_an_engine() -> None:
    """Tokens of a real text have more experts in common than drawn tokens."""
    live = Live(make_random_moe(size="1m"), 20, IN_TURN)
    costs = costs_of(live.shape)
    drawn, _ = live.simulated(SkewedRouting(live.shape, 0.0), costs)
    assert live.use.num_bytes <= drawn.num_bytes <= 1.6 * live.use.num_bytes
    assert_near(live.simulated(recorded(live), costs)[1], live)


def test_a_fitted_skew_reads_the_bytes_of_the_run_that_it_was_fitted_to() -> None:
    fit = Live("tiny", *FIT)
    costs = costs_of(fit.shape)
    skew = fitted_skew(fit, costs)
    found, _ = fit.simulated(SkewedRouting(fit.shape, skew), costs)
    assert found.num_bytes / fit.use.num_bytes == pytest.approx(1, abs=0.03)
    assert 0 < skew < MOST_SKEW


def test_a_declared_disk_serves_reads_one_after_the_other() -> None:
    """A read that the real disk returns too late is counted."""
    now_s, slept, took_s = 0.0, list[float](), 0.0

    def read(layer: int, expert: int, into: bytes) -> None:
        nonlocal now_s
        now_s += took_s

    disk = PacedDisk(read, 10.0, lambda: now_s, slept.append)
    disk(0, 0, bytes(20))
    disk(0, 1, bytes(20))
    assert slept == [2.0, 4.0]
    now_s, took_s = 10.0, 0.5
    disk(0, 2, bytes(20))
    assert (slept, disk.num_late) == ([2.0, 4.0, 1.5], 0)
    took_s = 5.0
    disk(0, 3, bytes(20))
    assert (slept, disk.num_late) == ([2.0, 4.0, 1.5], 1)


# -- times


def run(
    specs: list[RequestSpec], num_slots: int | None, routing: Any = None, **more: Any
) -> Simulated:
    """Serve requests of a small model; without `num_slots` all experts are in memory."""
    given = {"bytes_per_s": 4096e3, "expert_bytes": 4096} | more.pop("disk", {})
    routing = routing or SkewedRouting(SMALL, 0.0)
    disk = None
    if num_slots is not None:
        disk = ExpertsOnDisk(max_bytes=4096 * num_slots, routing=routing, **given)
    return simulate(specs, more.pop("policy", "qllm2"), costs_of(SMALL), disk=disk, **more)


def test_a_request_alone_waits_for_each_of_its_reads() -> None:
    """A decode has nothing to compute while it waits."""
    specs = requests_of([1], "B", 0.0)
    resident, found = run(specs, None), run(specs, 4)
    read_ns = NS_PER_MS
    assert resident.experts == {}
    assert found.experts["BE"]["loads"] > 50
    more_ns = found.end_ns - resident.end_ns
    assert abs(more_ns - found.experts["BE"]["loads"] * read_ns) < read_ns / 10
    assert found.experts["BE"]["waits_ms"] == pytest.approx(more_ns / NS_PER_MS, rel=0.01)
    waits = [e for e in found.events if isinstance(e, Ran) and e.why != "done"]
    assert len(waits) <= 2 * NUM_TOKENS, "one wait in each layer, for both experts"
    again = run(specs, 4)
    assert list(again.trace) == list(found.trace)
    slower = run(specs, 4, disk={"bytes_per_s": 4096e2})
    assert slower.experts["BE"]["loads"] == found.experts["BE"]["loads"]
    assert slower.end_ns - resident.end_ns == pytest.approx(10 * more_ns, rel=0.01)


def traced(*sequences: Sequence[Sequence[int]]) -> TracedRouting:
    """Routing that is the same in both layers."""
    return TracedRouting([np.array([[two, two] for two in one]) for one in sequences])


def test_ls_is_served_while_be_waits_for_a_slow_disk() -> None:
    """LS finds its experts in memory, and BE reads a different pair for each token."""
    routing = traced([(0, 1)], [(2, 3), (4, 5), (6, 7)])
    ls, be, later = requests_of([1, 40, 1], "LBL", 0.0)
    later = replace(later, at_s=30.0)
    slow = {"bytes_per_s": 4096.0}  # a read takes a second
    found = run([ls, replace(be, at_s=20.0), later], 8, _three(routing), disk=slow)
    alone = run([ls, later], 8, _three(routing, alone=True), disk=slow)
    times = {r.request_id: r for r in request_metrics(found.events)}
    by_itself = {r.request_id: r for r in request_metrics(alone.events)}
    assert found.experts["BE"]["waits_ms"] > 20_000
    assert times[2].ttft_ms is not None
    assert by_itself[1].ttft_ms is not None
    assert times[2].ttft_ms < by_itself[1].ttft_ms + 5
    assert times[2].e2e_ms < 100, "24 tokens, and no wait for the disk"
    assert times[1].e2e_ms > 20_000


def _three(routing: TracedRouting, *, alone: bool = False) -> TracedRouting:
    ls, be = routing._sequences
    return TracedRouting([ls, ls] if alone else [ls, be, ls])


def test_reads_for_ls_come_before_those_for_be() -> None:
    """An LS request that misses two experts in each layer waits for reads of BE that have begun.

    Each thread may have begun one when the request misses the experts of a layer.
    """
    prompt = [(0, 1), (2, 3), (4, 5), (6, 7)]
    routing = traced(prompt, [(0, 7)])
    be, ls = requests_of([200, 1], "BL", 2.5)
    ls = replace(ls, max_tokens=1)
    found = run([be, ls], 10, routing, disk={"bytes_per_s": 4096.0})
    times = {r.request_id: r for r in request_metrics(found.events)}
    assert times[1].ttft_ms is not None
    most = 2 * (NUM_THREADS + 2) * 1000 + 100  # two layers
    assert times[1].ttft_ms <= most
    assert times[0].ttft_ms > most


def test_an_arrival_stops_be_at_the_boundary_where_it_would_without_a_disk() -> None:
    """A run that skips boundaries has the events of one that stops at each."""
    specs = [
        *requests_of([200, 90, 40], "BBB", 0.0),
        *(replace(s, at_s=0.0123 * (i + 1)) for i, s in
          enumerate(requests_of([9, 1, 30, 5], "LLLL", 0.0))),
    ]  # fmt: skip
    traces = []
    for looks in (False, True):
        disk = ExpertsOnDisk(
            max_bytes=4096 * 7, expert_bytes=4096, bytes_per_s=4096e4,
            routing=SkewedRouting(SMALL, 0.5),
        )  # fmt: skip
        world = SimulatedEngine(
            load_policy("qllm2"), costs_of(SMALL, task_ns=50_000),
            EngineConfig(max_kv_tokens=4096), ingress=ReadingIngress, disk=disk,
        )  # fmt: skip
        if looks:
            world.runner.on_boundary = lambda: None
        for spec in specs:
            world.submit(spec, round(spec.at_s * NS_PER_S))
        world.serve(None, None)
        traces.append(list(world.record))
        assert world.experts["LS"]["loads"] > 0
        assert world.experts["BE"]["loads"] > 0
        assert not world.runner.frames
        for kept in ("_missing", "_begun", "_routed"):
            assert not getattr(world.runner, kept)
    assert traces[0] == traces[1]


def test_with_its_experts_in_slots_a_run_is_that_of_experts_in_memory() -> None:
    """The first request reads all experts that are used, long before the others arrive."""
    first, be, ls, more = requests_of([1, 300, 9, 30], "LBLL", 0.0)
    later = [replace(be, at_s=20.0), replace(ls, at_s=20.0031), replace(more, at_s=20.0237)]
    ends = []
    for num_slots in (None, 15):
        found = run([first, *later], num_slots, traced([(0, 1)]))
        events = [e for e in found.events if isinstance(e, Ran) and e.start_ns >= 20 * NS_PER_S]
        ends.append([(e.start_ns, e.at_ns, e.start, e.end, e.why) for e in events])
    assert ends[0] == ends[1]
    assert any(why != "done" for *_, why in ends[0])


def test_a_pass_computes_with_the_experts_in_slots_before_it_waits() -> None:
    found = run(requests_of([40], "B", 0.0), 7, SkewedRouting(SMALL, 0.0))
    waits = [e for e in found.events if isinstance(e, Ran) and e.why != "done"]
    assert any(e.end.pos > 0 for e in waits)


class Reads:
    """Virtual reads by themselves: a read takes 10 ns, and 4 of them its thread computes."""

    def __init__(self) -> None:
        self.at_ns, self.woken = 0, list[int]()
        disk = ExpertsOnDisk(
            max_bytes=1, expert_bytes=10, bytes_per_s=NS_PER_S, busy_share=0.4,
            routing=SkewedRouting(SMALL, 0.0),
        )  # fmt: skip
        self.all = VirtualReads(
            lambda *_: None, lambda: self.woken.append(self.all.at_ns), lambda: self.at_ns,
            DiskOrder(), disk=disk,
        )  # fmt: skip

    def put(self, *classes: str) -> list[ExpertRead]:
        made = []
        for one in classes:
            rank = (one == "B", len(made), 0)
            ticket = Ticket(len(made), rank, Use.LS if one == "L" else Use.BE, (), False, 0)
            read = ExpertRead(Wanted(0, len(made), len(made)), 0, memoryview(b""), [])
            self.all.join(ticket, read)
            self.all.expect(ticket, 1)
            made.append(read)
        self.all.put(made)
        return made

    def ended(self, at_ns: int) -> list[int]:
        """Numbers of the reads that end by a time, since the last call."""
        self.at_ns = at_ns
        return [read.wanted.expert for read in self.all.finished()]


def test_a_disk_serves_reads_one_after_the_other_and_ls_first() -> None:
    reads = Reads()
    made = reads.put("B", "B", "L", "B", "L")
    assert [read.wanted.expert for read in reads.all.running] == [2, 4]
    assert [read.begun_ns for read in (made[2], made[4])] == [0, 0]
    assert not reads.all.cancel(made[2])
    assert reads.all.cancel(made[1])
    assert reads.all.next_ns() == 10
    assert reads.ended(9) == []
    assert reads.ended(10) == [2]
    assert reads.woken == [10]
    assert made[0].begun_ns == 10
    assert reads.ended(35) == [4, 0]
    assert (reads.woken, reads.all.next_ns()) == ([10, 20], 40)
    assert reads.all.sleep()
    assert reads.ended(100) == [3]
    assert reads.woken == [10, 20, 40]
    assert reads.all.next_ns() is None


def test_threads_rest_after_reads_for_be_while_ls_exists() -> None:
    rest_ns = round(4 * (1 - BE_SHARE) / BE_SHARE)
    reads = Reads()
    reads.all.be_gentle(True)
    made = reads.put("B", "B", "B", "B", "B")
    assert reads.ended(20) == [0, 1]
    assert reads.all.next_ns() == 10 + rest_ns
    assert reads.ended(10 + rest_ns + 9) == []
    assert reads.ended(10 + rest_ns + 10) == [2]
    assert made[2].begun_ns == 10 + rest_ns
    assert made[3].begun_ns == 20 + rest_ns
    assert reads.ended(30 + rest_ns) == [3]
    assert made[4].begun_ns is None
    other = reads.put("L")
    assert other[0].begun_ns == 30 + rest_ns, "LS waits for no rest"
    reads.all.be_gentle(False)
    assert made[4].begun_ns == 30 + rest_ns, "without LS there are no rests"


# -- routing


@pytest.mark.parametrize("skew", [0.0, 0.7, 3.0])
@pytest.mark.parametrize(("num", "top_k"), [(8, 2), (24, 4), (5, 4)])
def test_drawn_tokens_use_as_many_experts_as_the_costs_expect(
    num: int, top_k: int, skew: float
) -> None:
    shape = ModelShape(4, num, top_k, (True, False, True, True), 97, 4096)
    routing = SkewedRouting(shape, skew, seed=3)
    tokens = routing.of(1, 0, 1200)
    assert tokens.shape == (1200, 3, top_k)
    assert all(len(set(row)) == top_k for row in tokens.reshape(-1, top_k).tolist())
    assert np.array_equal(routing.of(1, 700, 710), tokens[700:710])
    assert not np.array_equal(routing.of(2, 0, 1200), tokens)
    for together in (1, 4, 12):
        groups = tokens.reshape(-1, together, 3, top_k)
        sizes = [len(np.unique(g[:, layer])) for g in groups for layer in range(3)]
        expected = expert_coverage(together, num, top_k, skew)
        assert np.mean(sizes) == pytest.approx(expected, rel=0.03)
    if skew == 3.0:
        favourites = {int(np.bincount(tokens[:, layer].ravel()).argmax()) for layer in range(3)}
        assert len(favourites) > 1, "each layer has its own order"


def test_a_trace_repeats_its_sequences_and_their_tokens() -> None:
    routing = traced([(0, 1), (2, 3)], [(4, 5)])
    assert routing.of(0, 1, 4)[:, 0].tolist() == [[2, 3], [0, 1], [2, 3]]
    assert routing.of(3, 0, 2)[:, 1].tolist() == [[4, 5], [4, 5]]


# -- bad input


@pytest.mark.parametrize(
    "sequences", [[], [np.zeros((0, 2, 2))], [np.zeros((1, 2, 2)), np.zeros((1, 3, 2))]]
)
def test_a_trace_without_tokens_or_of_several_models_is_refused(sequences: Any) -> None:
    with pytest.raises(ConfigError, match="a routing trace needs at least one sequence"):
        TracedRouting(sequences)


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((5, 3, 2), dtype=np.int64),
        np.zeros((5, 2, 3), dtype=np.int64),
        np.zeros((5, 2, 2)),
        np.full((5, 2, 2), 8),
        np.full((5, 2, 2), -1),
        np.array([None]),
    ],
)
def test_a_trace_of_another_model_is_refused(tmp_path: Path, wrong: Any) -> None:
    path = tmp_path / "t.npz"
    np.savez(path, wrong)
    with pytest.raises(ConfigError, match=r"t\.npz' (has experts|is no routing trace)"):
        TracedRouting.read(path, SMALL)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    for text in (b"", b"PK\x03\x04 cut off", b"text"):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match=r"t\.npz' is no routing trace"):
            TracedRouting.read(path, SMALL)
    np.save(tmp_path / "one.npy", np.zeros((5, 2, 2), dtype=np.uint8))
    for name in ("none", "one.npy"):
        with pytest.raises(ConfigError, match="is no routing trace"):
            TracedRouting.read(tmp_path / name, SMALL)
    np.savez(path, np.zeros((5, 2, 2), dtype=np.uint8), np.ones((1, 2, 2), dtype=np.uint8))
    assert TracedRouting.read(path, SMALL).of(1, 3, 4).tolist() == [[[1, 1], [1, 1]]]


@pytest.mark.parametrize("wrong", [{"bytes_per_s": 0.0}, {"expert_bytes": 0}, {"busy_share": 1.5}])
def test_a_disk_without_a_rate_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"must be > 0, and busy_share=.* in \[0, 1\]"):
        run(requests_of([1], "B", 0.0), 4, disk=wrong)


@pytest.mark.parametrize("num_slots", [0, 1, 16, 17])
def test_memory_for_too_few_experts_or_for_all_is_refused(num_slots: int) -> None:
    with pytest.raises(ConfigError, match=r"max_expert_bytes=\d+ must be in \[8192, 65536\)"):
        run(requests_of([1], "B", 0.0), num_slots)


def test_a_policy_that_parks_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy Mlfq stops inside no pass"):
        run(requests_of([1], "B", 0.0), 4, policy="mlfq")


# -- the command


def test_qllm_sim_reads_experts_at_the_measured_rate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def rate(folder: Path, expert_bytes: int) -> DiskRate:
        asked.append((folder, expert_bytes))
        return DiskRate(2e9, True)

    monkeypatch.setattr("qllm.measure.disk_rate.disk_rate", rate)
    command = ["sim", "--workload", "S2", "--preset", "cpu", "--model", "1m", "--seconds", "0.5"]
    number = preset("cpu", "1m", "auto").expert_bytes
    disk = ["--set", f"expert_dir={tmp_path}"]
    done = qllm(*command, *disk, "--set", f"max_expert_bytes={20 * number}", "--expert-skew", "0.5")
    assert done.exit_code == 0, done.output
    assert asked == [(tmp_path, number)]
    assert f"experts of {number:,} bytes on a disk that reads 2.00 GB/s; skew" in done.output
    assert "skew of the router 0.5" in done.output
    assert done.output.count("uses of experts read") == 2
    wrong = qllm(*command, "--expert-skew", "0.5")
    assert "--expert-skew and --routing are for experts on a disk" in wrong.output
    fits = [*disk, "--set", f"max_expert_bytes={20 * number}"]
    np.savez(tmp_path / "t.npz", np.zeros((5, 4, 4), dtype=np.int16) + np.arange(4))
    trace = ["--routing", str(tmp_path / "t.npz")]
    wrong = qllm(*command, *fits, *trace, "--expert-skew", "1")
    assert "t.npz or --expert-skew 1, and not both" in wrong.output.replace("\n", "")
    asked.clear()
    done = qllm(*command, *fits, *trace)
    assert f"routing of {tmp_path / 't.npz'}" in done.output.replace("\n", "")
    assert "LS: 20 of" in done.output, "four experts in each of four layers, four ahead in vain"
    wrong = qllm(*command, *disk, "--set", f"max_expert_bytes={99 * number}")
    assert "must be in [" in wrong.output
    assert len(asked) == 1, "the disk is measured for what can be simulated"
    wrong = qllm(*command, *disk, "--set", "max_expert_bytes=99999", "--engines", "2")
    assert "a simulation without a disk has all experts in memory" in wrong.output


def test_a_configuration_with_a_disk_is_refused_without_one() -> None:
    config = EngineConfig(max_expert_bytes=1 << 20, expert_dir="x")
    with pytest.raises(ConfigError, match="a simulation without a disk has all experts"):
        SimulatedEngine(Fcfs(), preset("h100", "qwen3-moe"), config)
