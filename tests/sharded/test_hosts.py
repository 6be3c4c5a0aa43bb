"""Ranks on several hosts: the bits of one process, what is refused at the start, and failures."""

import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch

from qllm.errors import ConfigError, DeviceError
from qllm.ingress.remote import meeting
from qllm.ingress.remote.meeting import Wire
from qllm.kernels import cpu
from qllm.runner.cpu import cpu_runner
from qllm.scheduler.program import START, OpKind
from qllm.sharded import host_rank
from qllm.sharded import hosts as hosts_module
from qllm.sharded.host_memory import ALL_RANKS, HostMemory, region_of
from tests.support.hosts import SECRET
from tests.support.rank_hosts import (
    NAME,
    RankHost,
    StubHost,
    host_apart,
    is_there,
    runner_over,
    start_over,
)
from tests.support.sharded import (
    CUT,
    SPLIT,
    WEIGHTS,
    assert_same,
    gathers_of,
    group_of,
    model_with,
    served,
    served_whole,
    settings_of,
    wide_model,
)
from tests.support.stops import (
    add_prompts,
    assert_same_answers,
    assert_same_ends,
    whole_program,
)
from tests.support.sweeps import GREEDY, Asked, Watched
from tests.support.waiting import wait_for

assert cpu.MISSING is None, cpu.MISSING
pytestmark = pytest.mark.usefixtures("one_thread")
whole = cache(served_whole)


@pytest.fixture
def hosts() -> Iterator[Callable[..., list[str]]]:
    """A function that starts hosts, and returns their addresses."""
    with ExitStack() as stack:

        def start(make: Callable[[], Any], num: int = 1) -> list[str]:
            places = [f"127.0.0.{2 + i}" for i in range(num)]
            made = [stack.enter_context(RankHost(lambda _: make(), place)) for place in places]
            return [host.address for host in made]

        yield start


# -- bits


@pytest.mark.sampled(10)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("name", SPLIT)
def test_hosts_have_the_bits_of_one_process(
    name: str, num: int, weights: str, hosts: Callable[..., list[str]]
) -> None:
    """Tokens, logits and KV are compared. Output projections are split by columns and by rows."""
    addresses = hosts(lambda: model_with(name, weights), num)
    runner = runner_over(addresses, model_with(name, weights), rows_from=10, **settings_of(weights))
    assert_same(served(runner), whole(name, weights))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("num", "num_tasks"), [(1, 1), (2, 1), (1, 13)])
@pytest.mark.parametrize("name", CUT)
def test_hosts_that_share_each_expert_stop_at_every_task_and_go_on(
    name: str, num: int, num_tasks: int, weights: str, hosts: Callable[..., list[str]]
) -> None:
    """Frames, KV and logits are compared after two steps in pieces, between which others run."""
    how = settings_of(weights)
    expected = cpu_runner(model_with(name, weights, 320), **how)
    addresses = hosts(lambda: model_with(name, weights, 320), num)
    found = runner_over(addresses, model_with(name, weights, 320), **how)
    for runner in (expected, found):
        add_prompts(runner, (21, 5))
    assert assert_same_answers(expected, found, num_tasks) > 100 / num_tasks
    for runner in (expected, found):
        runner.close()


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_frame_goes_on_in_one_process_or_on_hosts_that_share_each_expert(
    name: str, is_here: bool, hosts: Callable[..., list[str]]
) -> None:
    """It stops before an op that sums experts, and goes on in a runner of the other kind."""
    ranks = runner_over(hosts(lambda: model_with(name, "bf16", 320)), model_with(name, "bf16", 320))
    runners = [cpu_runner(model_with(name, "bf16", 320)), ranks]
    here, there = runners[::-1] if is_here else runners
    add_prompts(here, (21, 5))
    program = whole_program(here)
    at, wanted = START, [OpKind.EXPERTS, OpKind.COMBINE]
    while [op.kind for op in program.ops[at.op - 1 : at.op + 1]] != wanted:
        at = here.run(program, at, Asked(1))
    for request in program.request_ids:
        there.import_request(request, GREEDY, *here.export_request(request))
    there.import_frame(program, at, here.export_frame(program, at))
    for runner in (here, there):
        assert runner.run(program, at, Watched()) == program.end
    assert_same_ends(here, there, [program, program])
    for runner in runners:
        runner.close()


def test_two_networks_have_the_bits_of_one_process(record_property: Any) -> None:
    with host_apart(lambda _: model_with(NAME, "bf16", 256)) as apart:
        record_property("network", apart.network)
        runner = runner_over([apart.host.address], model_with(NAME, "bf16", 256))
        assert_same(served(runner), whole(NAME, "bf16", 256))
        found = runner_over([apart.host.address], model_with(NAME, "bf16", 256))
        expected = cpu_runner(model_with(NAME, "bf16", 256))
        for runner in (expected, found):
            add_prompts(runner, (21, 5))
        assert assert_same_answers(expected, found, 3) > 30
        for runner in (expected, found):
            runner.close()


def test_a_stop_takes_no_gather_of_its_own(hosts: Callable[..., list[str]]) -> None:
    runner = runner_over(hosts(lambda: wide_model(NAME)), wide_model(NAME))
    add_prompts(runner, (21, 5))
    _, *decodes = [gathers_of(runner, num) for num in (None, None, 1, 2, 7)]
    runner.close()
    assert len(set(decodes)) == 1


# -- memory


def test_memory_that_python_gives_back_is_given_back_on_the_host() -> None:
    with RankHost(lambda _: wide_model(NAME)) as host:
        runner = runner_over([host.address], wide_model(NAME))
        backend: Any = runner.backend
        memory, pid = backend._memory, backend.ranks[1]["pid"]
        before = shared_bytes(pid)
        large = memory.copy(torch.ones(32 << 20, dtype=torch.uint8))
        backend.compute.embed([1])
        assert shared_bytes(pid) - before > 30 << 20
        del large
        backend.compute.embed([1])
        assert shared_bytes(pid) - before < 2 << 20
        runner.close()


def shared_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        found = re.search(r"RssShmem:\s+(\d+) kB", file.read())
    assert found is not None
    return 1024 * int(found[1])


def test_parts_of_tensors_are_regions_with_contiguous_rows() -> None:
    memory = HostMemory()
    x = memory.empty((3, 8, 4), torch.bfloat16)
    part = region_of(x[:, 2:5], 1)
    found = (part.at - x.data_ptr(), part.row_bytes, part.stride, part.rows, part.rank)
    assert found == (16, 24, 64, 3, 1)
    memory.share(x[:, 2:5], 0)  # rank 0 is this process
    memory.share(x)
    regions, held = memory.changes()
    assert [(r.at, r.row_bytes, r.rows, r.rank) for r in regions] == [
        (x.data_ptr(), x.nbytes, 1, ALL_RANKS)
    ]
    assert held == [x]
    assert len(memory.changes()[0]) == 0


# -- failures


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_tasks", [0, 1, 30, 60])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("num", "rank"), [(1, 1), (2, 1), (2, 2)])
def test_a_rank_that_ends_or_hangs_is_an_error_that_names_its_host(
    num: int, rank: int, how: int, num_tasks: int, hosts: Callable[..., list[str]]
) -> None:
    """The host kills a rank that is stopped, and serves the next engine."""
    addresses = hosts(lambda: wide_model(NAME), num)
    runner = runner_over(addresses, wide_model(NAME), deadline_s=1.5)
    add_prompts(runner, (21, 5))
    program, at = whole_program(runner), START
    if num_tasks:
        at = runner.run(program, at, Asked(num_tasks))
    pids = group_of(runner).processes
    os.kill(pids[rank], how)
    what = {signal.SIGKILL: "process of a rank has ended", signal.SIGSTOP: "not come within 1.5 s"}
    named = re.escape(f"(rank {rank}, on {addresses[rank - 1]!r} of tp_hosts)")
    for _ in range(2):  # there is no way back
        with pytest.raises(DeviceError, match=f"{what[signal.Signals(how)]} {named}") as error:
            runner.run(program, at, Watched())
    assert runner.fault(error.value) is error.value
    runner.close()
    wait_for(lambda: not any(map(is_there, pids[1:])))
    assert_same(served(runner_over(addresses, wide_model(NAME))), whole(NAME, "bf16"))


def test_a_host_ends_a_rank_that_is_stopped_and_reads_no_more() -> None:
    """Rank 0 ends with bytes for it that were never sent."""
    with RankHost(lambda _: wide_model(NAME)) as host:
        runner = runner_over([host.address], wide_model(NAME), deadline_s=1)
        backend: Any = runner.backend
        os.kill(backend.ranks[1]["pid"], signal.SIGSTOP)
        large = backend._memory.copy(torch.ones(32 << 20, dtype=torch.uint8))
        with pytest.raises(DeviceError, match="did not come within 1 s"):
            backend.compute.embed([1])
        assert large.numel() > 0
        runner.close()
        wait_for(lambda: not is_there(backend.ranks[1]["pid"]))
        start_over(host.address)


def test_ranks_end_with_their_runner(hosts: Callable[..., list[str]]) -> None:
    runner = runner_over(hosts(lambda: wide_model(NAME), 2), wide_model(NAME))
    pids = group_of(runner).processes[1:]
    assert all(map(is_there, pids))
    runner.close()
    runner.close()
    wait_for(lambda: not any(map(is_there, pids)))


# -- checks at the start


def test_a_host_without_a_rank_is_named() -> None:
    with socket.create_server(("127.0.0.2", 0)) as free:
        address = f"127.0.0.2:{free.getsockname()[1]}"
    with pytest.raises(DeviceError, match=rf"{address}' does not answer as a rank: .*refused"):
        start_over(address)


def test_a_host_that_is_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "HANDSHAKE_S", 0.3)
    with socket.create_server(("127.0.0.2", 0)) as silent:
        address = f"127.0.0.2:{silent.getsockname()[1]}"
        with pytest.raises(DeviceError, match=rf"{address}' does not answer as a rank: .*silent"):
            start_over(address)


def test_a_host_with_another_secret_is_refused(hosts: Callable[..., list[str]]) -> None:
    (address,) = hosts(lambda: wide_model(NAME))
    with pytest.raises(DeviceError, match=rf"{address}' does not answer as a rank: .*secret"):
        start_over(address, secret=SECRET + b"?")
    start_over(address)


def test_a_host_that_computes_for_another_engine_is_refused(
    hosts: Callable[..., list[str]],
) -> None:
    (address,) = hosts(lambda: wide_model(NAME))
    first = runner_over([address], wide_model(NAME))
    with pytest.raises(DeviceError, match=f"{address}' computes for another engine"):
        start_over(address)
    add_prompts(first, (21, 5))
    assert gathers_of(first, None)[0] > 0, "the first engine goes on"
    first.close()
    start_over(address)


def test_a_host_that_answers_twice_is_refused() -> None:
    """Both names lead to one process."""
    with RankHost(lambda _: wide_model(NAME), "0.0.0.0") as host:
        port = host.address.rpartition(":")[2]
        names = [f"127.0.0.2:{port}", f"127.0.0.3:{port}"]
        with pytest.raises(ConfigError, match=f"{names[1]}' answers twice: .* each host once"):
            runner_over(names, wide_model(NAME))


def late_clock() -> None:
    real = time.time_ns
    host_rank.time.time_ns = lambda: real() - 60_000_000_000


def other_software() -> None:
    host_rank.software = lambda: "qllm 0"


def other_kernels() -> None:
    cpu.kind = lambda: "AVX-2000"


@pytest.mark.parametrize(
    ("before", "why"),
    [
        (other_software, "has software 'qllm 0', and this engine has 'qllm .*same release"),
        (other_kernels, "has kernels 'AVX-2000', and this engine has .*one kind"),
        (late_clock, "the clock of .* differs by 60 s .*at most 5 s are allowed"),
    ],
)
def test_a_host_with_other_software_kernels_or_time_is_refused(
    before: Callable[[], None], why: str
) -> None:
    with RankHost(lambda _: wide_model(NAME), before=before) as host:
        with pytest.raises(ConfigError, match=why) as error:
            start_over(host.address)
        assert repr(host.address) in str(error.value)


def test_a_host_with_other_weights_is_refused() -> None:
    with RankHost(lambda _: wide_model(NAME, seed=1)) as host:
        why = f"{host.address}' has another model, or other weights; give `qllm rank`"
        with pytest.raises(ConfigError, match=why):
            start_over(host.address)


def test_a_host_that_cannot_load_says_why() -> None:
    def broken(_: Any) -> Any:
        raise MemoryError("no room for weights")

    with RankHost(broken) as host:
        why = rf"(?s){host.address}' did not start its rank: .*no room for weights"
        with pytest.raises(DeviceError, match=why):
            start_over(host.address)


def test_a_rank_that_ends_while_it_loads_is_named() -> None:
    with RankHost(lambda _: os.kill(os.getpid(), signal.SIGKILL)) as host:  # type: ignore[arg-type,return-value]
        why = (
            rf"the rank on '{host.address}' ended before it had loaded its weights .*if that is -9"
        )
        with pytest.raises(DeviceError, match=why):
            start_over(host.address)


def test_a_host_that_answers_for_another_job_is_refused() -> None:
    def answer(wire: Wire) -> None:
        wire.receive()
        wire.send({"job": "0123"})

    stub = StubHost(answer)
    with pytest.raises(DeviceError, match=f"{stub.address}' answers for job '0123', and this one"):
        start_over(stub.address)
    stub.join()


def test_a_host_that_ends_after_the_proofs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def await_reset(sock: socket.socket, most_s: float) -> None:
        poll = select.poll()
        poll.register(sock, 0)
        assert poll.poll(60_000), "the host has not ended"

    def reset(wire: Wire) -> None:
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, hosts_module.RESET)

    monkeypatch.setattr(hosts_module, "keep_alive", await_reset)
    stub = StubHost(reset)
    with pytest.raises(DeviceError, match=f"{stub.address}' does not answer as a rank: "):
        start_over(stub.address)
    stub.join()
