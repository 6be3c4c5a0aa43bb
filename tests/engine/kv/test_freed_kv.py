"""An evicted request's KV is freed: frames that had its row never touch that memory again.

Slabs are mapped here page by page, and evicting takes every right to their pages away, so that a
read or a write of a stale address ends the process (a forked child) with SIGSEGV.
"""

import ctypes
import faulthandler
import mmap
import os
import resource
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qllm.kernels import cpu
from qllm.runner.frame import Frame
from qllm.runner.kv import SlabKV
from qllm.runner.runner import TorchRunner
from qllm.scheduler.program import START, Index, Program
from qllm.types import Grain
from tests.support.families import VOCAB as FAMILY_VOCAB
from tests.support.families import make_model
from tests.support.sweeps import (
    GREEDY,
    LAYERS,
    VOCAB,
    Poll,
    compiled,
    model_of,
    next_row,
    prompt_of,
    runner_of,
)

assert min(FAMILY_VOCAB, VOCAB) == VOCAB, "prompts must fit both vocabularies"
EVICTED = 1
PROT_NONE, PROT_ALL = 0, mmap.PROT_READ | mmap.PROT_WRITE
MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen3": lambda: model_of("qwen3"),
    "latents": lambda: make_model("deepseek_v3", torch.bfloat16),
    "ops one by one": lambda: model_of("part_torch"),
}


class Pages:
    """Mapped memory of the slabs, by the `SlabKV` that holds them."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._of: dict[int, list[tuple[mmap.mmap, int, int]]] = {}

    def empty(self, kv: SlabKV, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A tensor over pages of its own."""
        count = torch.Size(shape).numel()
        size = -(-count * like.element_size() // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, size)
        out = torch.frombuffer(memory, dtype=like.dtype, count=count).view(shape)
        self._of.setdefault(id(kv), []).append((memory, out.data_ptr(), size))
        return out

    def forbid(self, kv: SlabKV) -> int:
        """Take the rights to the pages away; return how many bytes they are."""
        held = self._of.pop(id(kv), [])
        for _, address, size in held:
            if self._libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")
        self._kept = held  # stays mapped
        return sum(size for _, _, size in held)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    """Let slabs lie on pages that are forbidden once they are cleared."""
    found = Pages()
    clear = SlabKV.clear

    def reserve(self: SlabKV, k_1GTH: Tensor, v_1GTH: Tensor) -> None:
        def layers(like: Tensor) -> tuple[Tensor, ...]:
            _, heads, _, width = like.shape
            shape = (len(self.slabs), 1, heads, self.capacity, width)
            return found.empty(self, shape, like).unbind(0)

        self.slabs = list(zip(layers(k_1GTH), layers(v_1GTH), strict=True))

    def clear_and_forbid(self: SlabKV) -> None:
        clear(self)
        assert found.forbid(self) > 0, "nothing was evicted"

    monkeypatch.setattr(SlabKV, "_reserve", reserve)
    monkeypatch.setattr(SlabKV, "clear", clear_and_forbid)
    return found


def parked_inside(runner: TorchRunner, *, warm: bool) -> tuple[Program, Index]:
    """A frame of three rows that was parked inside a layer, its spans cached.

    Args:
        runner: Without requests.
        warm: The rows decode; otherwise they are prompts.
    """
    for request in range(3):
        prompt = prompt_of(9 + request, request)
        runner.add(request, prompt, GREEDY, len(prompt), 40)
    rounds = 2 if warm else 1
    for last in [False] * (rounds - 1) + [True]:
        rows = [next_row(runner, i) for i in range(3)]
        program = compiled(runner, rows, Grain.EXPERT)
        runner.accept(program)
        at = START
        while not (last and program.layer_at(at) == 1 and program.inside_layer(at)):
            at = runner.run(program, at, Poll(0, 1.0 if last else 0.0))
            if at == program.end:
                runner.finish(program)
                break
    assert at != program.end
    return program, at


def evict_and_go_on(runner: TorchRunner, *, warm: bool) -> list[int]:
    """What the engine does as a scheduler evicts a row; returns whose tokens came out."""
    program, at = parked_inside(runner, warm=warm)
    runner.kill(program, EVICTED)
    runner.evict(EVICTED)
    while at != program.end:
        at = runner.run(program, at, Poll(1, 0.3))
    return [s.request_id for s in runner.finish(program)]


def signal_of(work: Callable[[], Any]) -> int:
    """The signal that ended a forked child which did this; 0 if none did.

    Raises:
        AssertionError: The child raised.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    assert os.waitstatus_to_exitcode(status) == 0, "the child raised: see its traceback"
    return 0


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    cpu.set_threads(1)


@pytest.mark.parametrize("warm", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("name", MODELS)
def test_a_frame_never_touches_the_kv_of_an_evicted_row(
    name: str, warm: bool, pages: Pages
) -> None:
    runner = runner_of(MODELS[name](), native=True, fine=True)
    assert signal_of(lambda: evict_and_go_on(runner, warm=warm)) == 0
    assert evict_and_go_on(runner, warm=warm) == [0, 2]
    kv = runner.requests[EVICTED].kv
    assert (kv.written, kv.committed, set(kv.slabs)) == (0, 0, {None})


@pytest.mark.parametrize("name", ["qwen3", "latents"])
def test_stale_addresses_of_a_frame_end_the_process_here(
    name: str, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Frame, "forget_steps", lambda self: None)
    runner = runner_of(MODELS[name](), native=True, fine=True)
    assert signal_of(lambda: evict_and_go_on(runner, warm=False)) == signal.SIGSEGV


def served_whole(runner: TorchRunner) -> list[int]:
    """The first token of the evicted request, computed alone from its first token on."""
    program = compiled(runner, [next_row(runner, EVICTED)], Grain.EXPERT)
    assert program.rows[0].lo == 0
    runner.accept(program)
    assert runner.run(program, START, Poll(0, 0.0)) == program.end
    return [s.token_id for s in runner.finish(program)]


def test_an_evicted_row_starts_again_on_memory_of_its_own(pages: Pages) -> None:
    runner = runner_of(MODELS["qwen3"](), native=True, fine=True)
    other = runner_of(MODELS["qwen3"](), native=True, fine=True)
    evict_and_go_on(runner, warm=False)
    assert signal_of(lambda: served_whole(runner)) == 0
    prompt = prompt_of(9 + EVICTED, EVICTED)
    other.add(EVICTED, prompt, GREEDY, len(prompt), 40)
    tokens = served_whole(runner)
    assert tokens == served_whole(other)
    assert len(tokens) == 1


def test_an_evicted_row_keeps_no_hidden_states(pages: Pages) -> None:
    runner = runner_of(MODELS["qwen3"](), native=True, fine=True)
    prompt = prompt_of(9, 0)
    runner.add(0, prompt, GREEDY, len(prompt), 40)
    program = compiled(runner, [next_row(runner, 0)._replace(end_layer=2)], Grain.EXPERT)
    runner.accept(program)
    assert runner.run(program, START, Poll(0, 0.0)) == program.end
    runner.finish(program)
    assert "hidden" in runner.export_request(0)[0]
    runner.evict(0)
    tensors, about = runner.export_request(0)
    assert (tensors, about["kept"], about["committed"]) == ({}, None, 0)


def test_a_dead_row_leaves_its_request_no_hidden_states(pages: Pages) -> None:
    runner = runner_of(MODELS["qwen3"](), native=True, fine=True)
    rows = []
    for request in range(2):
        prompt = prompt_of(9 + request, request)
        runner.add(request, prompt, GREEDY, len(prompt), 40)
        rows.append(next_row(runner, request)._replace(end_layer=2))
    program = compiled(runner, rows, Grain.EXPERT)
    runner.accept(program)
    at = START
    while not program.inside_layer(at):
        at = runner.run(program, at, Poll(0, 1.0))
    runner.kill(program, EVICTED)
    runner.evict(EVICTED)
    assert runner.run(program, at, Poll(0, 0.0)) == program.end
    runner.finish(program)
    assert [runner.export_request(i)[1]["kept"] for i in range(2)] == [[0, 9, 2], None]
    rest = compiled(runner, [rows[0]._replace(start_layer=2, end_layer=LAYERS)], Grain.EXPERT)
    runner.accept(rest)
    assert runner.run(rest, START, Poll(0, 0.0)) == rest.end
    runner.finish(rest)
    assert runner.export_request(0)[1]["kept"] is None, "it is past them"
