"""The engine on a virtual clock, whose decisions a device runner does on fake streams.

The simulated runner says when a program stops and counts blocks and layers; the real one computes
the tokens, and its KV is compared with what it was whenever it comes back or is referred to.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from qllm.cuda.backend import cuda_runner
from qllm.cuda.lanes import Bucket
from qllm.cuda.pages import Spare
from qllm.engine.kv.prefix import PrefixCache
from qllm.engine.storage.pages import KvPages
from qllm.ingress import Submission
from qllm.plan import NO_CUTS, Plan, Row
from qllm.runner.runner import TorchRunner
from qllm.scheduler.compile import compile_program
from qllm.scheduler.decision import Limits
from qllm.scheduler.prefix import PageStore
from qllm.scheduler.program import START, Index, Program
from qllm.sim.runner import SimCosts
from qllm.sim.world import LIMITS, World
from qllm.types import CAPABILITIES, Cap, Grain, Sampled, SamplingParams, Slo
from tests.support.fake_streams import FakeStreams
from tests.support.families import make_model
from tests.support.replay_schedule import Always

BLOCK, PAGE = 4, 8
LONGEST = 80
"""Tokens of a request; the reference of attention computes on all of its pages."""
BUCKETS = [Bucket(8, False), Bucket(96, True)]
GREEDY = SamplingParams(temperature=0, seed=0)


def limits_of(num_blocks: int, num_swap_blocks: int, seats: int = 4) -> Limits:
    return replace(
        LIMITS,
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_swap_blocks=num_swap_blocks,
        max_num_seqs=seats,
        max_step_tokens=64,
        grain=Grain.LAYER,  # ranges of experts are other ones here and there
        capabilities=CAPABILITIES | (Cap.KV_SWAP if num_swap_blocks else Cap.NONE),
    )


def kv_bits(kv: Any) -> dict[str, torch.Tensor]:
    """All that is written of a request, and what is committed of it by itself."""
    return {name: t.clone() for name, t in kv.export()}


class Both:
    """A simulated runner that decides when to stop, and a real one that does the same."""

    def __init__(self, sim: Any, real: TorchRunner) -> None:
        self.sim, self.real = sim, real
        self.pages = KvPages(real, PAGE)
        self.sampled: dict[int, list[int]] = {}
        self.away: dict[int, dict[str, torch.Tensor]] = {}
        """KV that is swapped out, as it was."""
        self.computed: dict[tuple[int, ...], list[torch.Tensor]] = {}
        """All keys of pages that were ever computed, by the tokens up to the end of the page."""
        self.loaded: dict[int, int] = {}
        """Tokens that requests were given, until they are compared."""
        self.moved = self.compared = 0

    def __getattr__(self, name: str) -> Any:
        """Do it in both; what they are asked for is the simulated one's."""
        found = getattr(self.sim, name)
        if name in ("add", "remove", "evict", "split", "kill", "leave", "drop"):

            def both(*args: Any) -> Any:
                getattr(self.real, name)(*args)
                return found(*args)

            return both
        return found

    def accept(self, program: Program, tables: Sequence[Sequence[int]]) -> None:
        self.sim.accept(program, tables)
        self.real.accept(program, tables)
        for row in program.rows:
            self._compare(row.request_id, self.loaded.pop(row.request_id, 0))

    def _compare(self, request_id: int, num_tokens: int) -> None:
        """Whole pages that were copied in or referred to are what was computed for such tokens."""
        for hi in range(PAGE, num_tokens + 1, PAGE):
            seen = self.computed[tuple(self.real.requests[request_id].ids[:hi])]
            assert any(torch.equal(self._keys(request_id, hi), one) for one in seen)
            self.compared += 1

    def _keys(self, request_id: int, hi: int) -> torch.Tensor:
        """The keys of the page that ends at a token."""
        kv = self.real.requests[request_id].kv
        return torch.cat([kv.read(layer, hi - PAGE, hi)[0] for layer in range(3)])

    def copy_ahead(self, request_ids: Sequence[int]) -> None:
        self.real.copy_ahead(request_ids)

    def swap_out(self, request_id: int) -> None:
        kv: Any = self.real.requests[request_id].kv
        num_pages = -(-kv.written // BLOCK) if kv._memory.copies is not None else 0
        pages = list(kv.pages[:num_pages])
        layers = range(3 if pages else 0)
        self.away[request_id] = {f"{i}": _pages(kv._memory.layer(i)[0], pages) for i in layers}
        self.sim.swap_out(request_id)
        self.real.swap_out(request_id)
        self.moved += 1

    def swap_in(self, request_id: int, table: Sequence[int]) -> None:
        self.sim.swap_in(request_id, table)
        self.real.swap_in(request_id, table)
        kv: Any = self.real.requests[request_id].kv
        for name, before in self.away.pop(request_id).items():
            num = len(before) // BLOCK
            assert torch.equal(_pages(kv._memory.layer(int(name))[0], kv.pages[:num]), before)

    # -- what the prefix cache asks for

    def refer(self, request_id: int, table: Sequence[int], num_tokens: int) -> None:
        self.sim.refer(request_id, table, num_tokens)
        self.pages.refer(request_id, table, num_tokens)
        self.loaded[request_id] = num_tokens

    def kv_of(self, request_id: int) -> Any:
        return self.sim.kv_of(request_id), self.pages.kv_of(request_id)

    def copy_out(self, kv: Any, lo: int, hi: int) -> Any:
        sim, real = kv
        page = self.pages.copy_out(real, lo, hi)
        return None if page is None else Page(self.sim.copy_out(sim, lo, hi), page)

    def copy_in(self, request_id: int, lo: int, hi: int, page: Any) -> None:
        self.sim.copy_in(request_id, lo, hi, page.sim)
        self.pages.copy_in(request_id, lo, hi, page.real)
        self.loaded[request_id] = hi

    def run(self, program: Program, start: Index, stop: Any) -> Index:
        end: Index = self.sim.run(program, start, stop)
        at, limited = start, program.until(end)
        while at != end:
            at = self.real.run(limited, at, Always())
            assert at <= end
        return end

    def finish(self, program: Program) -> list[Sampled]:
        found = self.real.finish(program)
        for row in program.rows:
            state = self.real.requests.get(row.request_id)
            done = 0 if state is None else min(row.hi, state.kv.committed)
            for hi in range((row.lo // PAGE + 1) * PAGE, done + 1, PAGE):
                key = tuple(self.real.requests[row.request_id].ids[:hi])
                self.computed.setdefault(key, []).append(self._keys(row.request_id, hi))
        assert {s.request_id for s in self.sim.finish(program)} == {s.request_id for s in found}
        for token in found:
            self.sampled.setdefault(token.request_id, []).append(token.token_id)
        return found


def _pages(k_SGD: torch.Tensor, pages: Sequence[int]) -> torch.Tensor:
    slots = [page * BLOCK + i for page in pages for i in range(BLOCK)]
    return k_SGD[slots].clone()


class Page:
    """A kept page of both runners."""

    nbytes = 64

    def __init__(self, sim: Any, real: Any) -> None:
        self.sim, self.real = sim, real

    def __iter__(self) -> Any:
        return iter(self.real)


class DeviceWorld(World):
    """See the module. `install` of `fake_streams` comes first.

    Args:
        policy: Decides.
        limits: See `limits_of`.
        streams: Streams of the device.
        num_kept: Pages of the prefix cache; 0 is none.
        stages: A fake of CUDA graphs, or None to run op by op.
        family: Family of the model.
        copy_bytes: Bytes that a step copies into the prefix cache. Any number is one page here.
    """

    def __init__(
        self, policy: Any, limits: Limits, streams: FakeStreams, *, num_kept: int = 0,
        stages: Any = None, family: str = "mixtral", copy_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.real = cuda_runner(
            make_model(family), num_pages=limits.num_blocks, page_size=BLOCK,
            max_num_seqs=limits.max_num_seqs, max_total_tokens=LONGEST, buckets=BUCKETS,
            layers_per_stage=1, graphs=False if stages is None else stages,
            spare=Spare(streams, 10**6, num_kept, PAGE, limits.num_swap_blocks),
        )  # fmt: skip
        super().__init__(
            policy, limits, shape=self.real.shape, costs=SimCosts(expert_ns=200_000), cuts=NO_CUTS
        )
        self.streams, self.both = streams, Both(self.runner, self.real)
        self.loop.runner = self.loop.effects._runner = self.both  # type: ignore[assignment]
        if num_kept:
            self.loop.prefix = self.loop.effects._prefix = PrefixCache(
                self.both, "", PageStore[Any](num_kept), PAGE, self.scheduler.found, self.clock,
                self.scheduler.pool, copy_bytes, named=self.scheduler.name_pages,
            )  # fmt: skip

    def ask(
        self, priority: int, ids: Sequence[int], max_tokens: int, at_ns: int | None = None
    ) -> int:
        """Let a request with this prompt arrive."""
        at_ns = self.clock.at_ns if at_ns is None else at_ns
        request_id = len(self.submitted)
        self.submitted[request_id] = item = Submission(
            request_id=request_id, name=str(request_id), priority=priority, token_ids=tuple(ids),
            sampling=GREEDY, stop_ids=frozenset(), max_tokens=max_tokens, slo=Slo(),
            arrival_ns=at_ns, deadline_ns=None,
        )  # fmt: skip
        self.ingress.put_at(at_ns, item)
        return request_id

    def step(self) -> bool:
        ran = super().step()
        if self.loop.prefix is not None:
            self.loop.prefix.check()
        self.sums()
        return ran

    def sums(self) -> None:
        """Every slot of the host is free, or of one page or one request."""
        pages, prefix = self.real.backend.pages, self.loop.prefix
        if pages.kept is None or pages.swapped is None:
            return
        kept = 0 if prefix is None else len(prefix.store)
        assert len(pages.kept.free) + kept == pages.kept.num_slots
        kvs: list[Any] = [state.kv for state in self.real.requests.values()]
        kvs += [rest.kv[1] for rest in (() if prefix is None else prefix.rests)]
        away = [slot.number for kv in kvs for slot in kv._away]
        ahead = [slot.number for kv in kvs for slot in kv._ahead]
        held = sorted([*away, *ahead, *pages.swapped.free])
        assert held == list(range(pages.swapped.num_slots))
        assert len(away) <= self.scheduler.swap.num_used or self.scheduler._owed

    def alone(self, request_id: int) -> list[int]:
        """The tokens of a request by itself, from its first token."""
        item, real = self.submitted[request_id], self.real
        real.add(-1, item.token_ids, GREEDY, item.num_prompt_tokens, LONGEST)
        row, tokens = Row(-1, 0, item.num_prompt_tokens, 0, real.shape.num_layers), list[int]()
        table = list(range(-(-(row.hi + item.max_tokens) // BLOCK)))
        for _ in range(item.max_tokens):
            program = compile_program(
                Plan(rows=(row,)), frame_id=10**6, samples=[True], shape=real.shape, cuts=NO_CUTS
            )
            real.accept(program, [table])
            real.run(program, START, Always())
            tokens += [s.token_id for s in real.finish(program)]
            row = row._replace(lo=row.hi, hi=row.hi + 1)
        real.remove(-1)
        return tokens

    def right(self) -> None:
        """Every stream is its solo run; nothing is left over."""
        assert not self.loop.policy_errors
        assert self.scheduler.pool.num_free == self.scheduler.limits.num_blocks
        assert not self.scheduler.pool.has_names
        assert self.scheduler.swap.num_used == 0
        assert not self.real.frames
        assert not self.streams.races
        for request_id in self.submitted:
            assert self.both.sampled[request_id] == self.alone(request_id), request_id


def prompts_of(rng: random.Random, num: int, vocab: int) -> list[list[int]]:
    """Prompts of which many begin alike."""
    base = [rng.randrange(vocab) for _ in range(60)]
    return [
        base[: rng.choice([0, 8, 24, 24, 40])]
        + [rng.randrange(vocab) for _ in range(rng.randint(1, 25))]
        for _ in range(num)
    ]
