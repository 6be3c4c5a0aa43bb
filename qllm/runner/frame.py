"""The tensors of one program: residual streams, and results inside the current layer.

master_TD   all rows; holds a row whenever the active group does not
x_TD        rows of the active group, packed; the input of the current layer
layer       inside a layer: mid_TD, routed rows (per ROUTE op), expert work, next_TD
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from qllm.errors import InvariantError
from qllm.kernels.cpu.attention import Begun
from qllm.kernels.cpu.course import Inside
from qllm.models.discover import ModelParts
from qllm.plan import Row
from qllm.runner.heads import HeadState
from qllm.runner.kv import RequestKV
from qllm.runner.layers.attention import Span, Step
from qllm.runner.layers.deltas import Carried
from qllm.runner.layers.drivers import Rope, Routed
from qllm.runner.layers.drivers import RouterExtras as Parts
from qllm.runner.layers.work import Work
from qllm.runner.residency import Missing
from qllm.runner.rope_tables import NO_ROPES
from qllm.runner.sampling.sampler import Unread
from qllm.runner.sampling.scores import NO_SCORES, Score, Scores
from qllm.scheduler.program import Index, Program
from qllm.types import RequestId, Sampled, SamplingParams

NewStep = Callable[["Frame", int, int, int], Step]
"""Function that returns the inputs of an ATTN op. The runner finds the place of KV."""


@dataclass(slots=True)
class LayerState:
    """The results of a layer so far. They are freed when the layer's last COMBINE op ends."""

    mid_TD: Tensor | None = None
    begun: Begun | None = None
    """ATTN op that stopped between two blocks of keys."""
    routed: dict[int, Routed] = field(default_factory=dict)
    """Results of ROUTE ops, by the first token of each op."""
    work: Work | None = None
    experts_x_TD: Tensor | None = None
    weights_TK: Tensor | None = None
    next_TD: Tensor | None = None
    space: Any = None
    """`runner.buffers.LayerBuffers` that hold these tensors, if one call ran all ops."""

    def gather(self) -> Tensor:
        """Concatenate the routed rows for EXPERTS; return the ids of the experts, [T, K]."""
        parts = [self.routed[lo] for lo in sorted(self.routed)]
        one = len(parts) == 1
        self.experts_x_TD = parts[0].x_TD if one else torch.cat([p.x_TD for p in parts])
        self.weights_TK = parts[0].weights_TK if one else torch.cat([p.weights_TK for p in parts])
        return parts[0].ids_TK if one else torch.cat([p.ids_TK for p in parts])

    def tensors(self) -> list[Tensor | None]:
        """Return all tensors of the layer."""
        held = [self.mid_TD, self.next_TD, self.experts_x_TD, self.weights_TK]
        held += self.begun or ()
        for routed in list(self.routed.values()):
            held += [routed.x_TD, routed.ids_TK, routed.weights_TK]
        return [*held, None if self.work is None else self.work.slots_SD]


@dataclass(slots=True)
class SavedRows:
    """The hidden states of a row that stopped before the last layer."""

    lo: int
    hi: int
    layer: int
    """First layer that is not finished."""
    x_TD: Tensor

    def of(self, row: Row, *, is_draft: bool) -> Tensor | None:
        """Return the hidden states with which a row starts; None if they are not these.

        A draft row that has only HEAD left is the last of these rows.
        """
        if (row.hi, row.start_layer) != (self.hi, self.layer):
            return None
        if row.lo != self.lo and not (is_draft and row.lo > self.lo):
            return None
        return self.x_TD[row.lo - self.lo :]


@dataclass(slots=True)
class RequestState:
    """The runner's copy of a request's state."""

    ids: list[int]
    num_prompt_tokens: int
    kv: RequestKV
    num_top: int | None = None
    """Number of alternatives per prompt token; None without prompt log-probabilities."""
    drafts: tuple[int, ...] = ()
    """Drafted tokens after `ids`."""
    guess: int | None = None
    """The token that the last draft row chose; None if that row chose none."""
    kept: SavedRows | None = None
    drafted: SavedRows | None = None
    """The hidden states of the finished draft rows."""
    hidden: list[Tensor] = field(default_factory=list)
    """Final hidden states of the committed tokens, while `owes_prompt`."""

    @property
    def output_ids(self) -> list[int]:
        """Tokens produced so far."""
        return self.ids[self.num_prompt_tokens :]

    @property
    def owes_prompt(self) -> bool:
        """True if prompt log-probabilities are requested and not yet reported."""
        return self.num_top is not None and len(self.ids) == self.num_prompt_tokens

    def check(self, row: Row) -> None:
        """Raise an InvariantError unless a row starts at the request's committed position."""
        if row.hi > len(self.ids) + len(self.drafts) or row.hi > self.kv.capacity:
            raise InvariantError(f"{row} goes past the tokens of its request")
        begun = self.kv.committed if self.drafted is None else self.drafted.hi
        if not self.kv.committed <= row.lo <= begun:
            raise InvariantError(f"{row} starts off [{self.kv.committed}, {begun}] (I2)")

    def keepable(self, num_tokens: int, num_prompt_tokens: int, switch: Any) -> int:
        """See `Runner.keepable`. `switch` is the dependence of rope on the length, or None."""
        if self.kv.states.layers and num_tokens < self.kv.committed:
            return 0
        if switch is not None:
            before, after = self.num_prompt_tokens, num_prompt_tokens
            if switch.regime(before, before) != switch.regime(after, after):
                return 0
        return num_tokens

    def revise(
        self, token_ids: Sequence[int], num_top: int | None, num_kept: int, table: Sequence[int]
    ) -> None:
        """Replace the prompt. KV of the first `num_kept` tokens stays, in the blocks of `table`."""
        self.ids, self.num_prompt_tokens, self.num_top = list(token_ids), len(token_ids), num_top
        self.drafts, self.drafted = (), None
        if self.kv.written > num_kept:
            self.kv.cut(num_kept, table)
        if self.kept is not None and self.kept.hi > num_kept:
            self.kept = None
        self.hidden = []

    def evict(self) -> None:
        """Drop all computed state."""
        self.kv.clear()
        self.kept = self.drafted = None
        self.hidden = []

    def forget_begun(self) -> None:
        """Drop the data of tokens that some layers have computed, but not all layers."""
        self.kv.commit(self.kv.committed)
        self.kept = self.drafted = None

    def tokens(self, lo: int, hi: int) -> list[int]:
        """Return the tokens [lo, hi), known or drafted."""
        num = len(self.ids)
        if hi <= num:
            return self.ids[lo:hi]
        return [*self.ids[lo:], *self.drafts[max(0, lo - num) : hi - num]]

    def take(self, token_id: int) -> None:
        """Append an output token, and drop the prompt's hidden states, which are unneeded now."""
        self.ids.append(token_id)
        self.hidden, self.drafts = [], ()
        self.drafted = None

    def without_drafts(self) -> None:
        """Drop unfinished rows that verify or draft tokens, and the KV that they wrote."""
        if self.kv.written > len(self.ids):
            self.forget_begun()

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors by name, and JSON that describes the tensors.

        Unfinished rows that verify or draft tokens are left out, with the KV that they wrote.
        """
        kv, kept = dict(self.kv.export()), self.kept
        if self.kv.written > len(self.ids):
            num = self.kv.committed
            kv, kept = {name: t[:, :, :num].contiguous() for name, t in kv.items()}, None
        tensors = {**kv, **self.kv.states.export()}
        if kept is not None:
            tensors["hidden"] = kept.x_TD.clone()
        if self.hidden:
            tensors["last_hidden"] = torch.cat(self.hidden)
        meta = {
            "token_ids": list(self.ids),
            "num_prompt_tokens": self.num_prompt_tokens,
            "max_total_tokens": self.kv.capacity,
            "committed": self.kv.committed,
            "kept": None if kept is None else [kept.lo, kept.hi, kept.layer],
        }
        return tensors, meta

    def restore(
        self, tensors: dict[str, Tensor], meta: dict[str, Any], blocks: Sequence[int]
    ) -> None:
        """Restore the tensors and JSON of `export`, into blocks with room for all written KV."""
        written = [t.shape[2] for name, t in tensors.items() if name.startswith("k.")]
        self.kv.begin_restore(blocks, max(written, default=0))
        for name in tensors:
            if name.startswith("k."):
                layer = int(name[2:])
                self.kv.restore(layer, tensors[name], tensors[f"v.{layer}"])
        self.kv.states.restore(tensors)
        self.kv.committed = meta["committed"]
        if meta["kept"] is not None:
            lo, hi, layer = meta["kept"]
            self.kept = SavedRows(lo, hi, layer, tensors["hidden"])
        self.hidden = [tensors[name] for name in ("last_hidden",) if name in tensors]


def num_top_of(sampling: SamplingParams, vocab_size: int) -> int | None:
    """Return the number of alternatives per prompt token; None without prompt log-probabilities."""
    asked = sampling.prompt_logprobs
    return None if asked is None else min(asked, vocab_size)


class Frame:
    """The state of one program. `accept` makes a frame, and `finish` frees it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.grain = program.grain
        """Boundaries at which the current run may stop."""
        self.dead: set[RequestId] = set()
        self.group: int | None = None
        """Group whose rows are in `x_TD`."""
        self.x_TD: Tensor | None = None
        self.master_TD: Tensor | None = None
        self.layer = LayerState()
        self.course: Inside | None = None
        """Place inside an op where the frame is parked. Without a course the op restarts, with the
        same bits."""
        self.carried: Carried | None = None
        """States of the op inside which the frame is parked. They are stored when the op ends."""
        self.head: HeadState | None = None
        self.sampled: list[Sampled] = []
        self.unread: Unread | None = None
        self.missing: Missing | None = None
        """Experts without which the last run could not go on; None if it could."""
        self.slots_done = 0
        """Number of executed (token, layer, expert slot) triples, for I1."""
        self.rope = NO_ROPES
        self._steps: dict[tuple[int, int, int], Step] = {}
        self._tokens: dict[int, Tensor | None] = {}
        self.ahead: dict[tuple[int, bool], Any] = {}
        """`runner.sweep.LayerOps` per group and type of layer (dense or with experts)."""

    def tokens(self, group: int) -> Tensor | None:
        """Return the packed positions of a group's tokens; None if the group has all tokens."""
        if group not in self._tokens:
            program = self.program
            members = program.groups[group]
            found = None
            if len(members) != len(program.rows):
                at = program.offsets
                found = torch.cat([torch.arange(at[r], at[r + 1]) for r in members])
            self._tokens[group] = found
        return self._tokens[group]

    def ids(self, requests: Mapping[RequestId, RequestState], group: int) -> list[int]:
        """Return the token ids of a group's rows, packed. A dead row has the id 0."""
        ids: list[int] = []
        for r in self.program.groups[group]:
            row = self.program.rows[r]
            is_dead = row.request_id in self.dead
            num = row.num_tokens
            ids += [0] * num if is_dead else requests[row.request_id].tokens(row.lo, row.hi)
        return ids

    def spans(
        self, requests: Mapping[RequestId, RequestState], group: int, lo: int, hi: int
    ) -> list[Span]:
        """Return the spans of the ATTN op over tokens [lo, hi) of a group, by block of queries."""
        program = self.program
        spans: list[Span] = []
        at = -lo  # position of the row's start in the op
        for r in program.groups[group]:
            row, marks = program.rows[r], program.row_blocks[r]
            first = row.lo + max(0, -at)
            stop = min(row.hi, row.lo + hi - lo - at)
            if first < stop and row.request_id not in self.dead:
                kv = requests[row.request_id].kv
                ends = marks[bisect_left(marks, first) : bisect_left(marks, stop) + 1]
                spans.extend(Span(kv, at + a - row.lo, a, b) for a, b in pairwise(ends))
            at += row.num_tokens
        return spans

    def num_bytes(self) -> int:
        """Return the bytes of activations: residual streams, and the current layer or head.

        Callable from any thread: for a running frame the result may be outdated.
        """
        layer, head = self.layer, self.head
        held, space = [self.x_TD, self.master_TD], layer.space
        held += layer.tensors() if space is None else []
        held += [] if head is None else head.tensors()
        kept = sum(x.num_bytes for x in (space, self.course, self.carried) if x is not None)
        return kept + sum({x.data_ptr(): x.nbytes for x in held if x is not None}.values())

    def flush(self) -> None:
        """Copy the active rows back into `master_TD`."""
        if self.group is None or self.x_TD is None:
            return
        index = self.tokens(self.group)
        if index is None:
            self.master_TD = self.x_TD
        else:
            if self.master_TD is None:
                shape = (self.program.num_tokens, self.x_TD.shape[1])
                self.master_TD = self.x_TD.new_zeros(shape)
            elif self.master_TD is self.x_TD:
                self.master_TD = self.x_TD.clone()
            self.master_TD = self.master_TD.index_copy(0, index.to(self.x_TD.device), self.x_TD)
        self.group = self.x_TD = None

    def activate(self, group: int) -> Tensor:
        """Make `x_TD` hold the rows of a group."""
        if self.group != group or self.x_TD is None:
            self.flush()
            assert self.master_TD is not None
            index = self.tokens(group)
            x = self.master_TD
            if index is None:
                self.x_TD, self.master_TD = x, None
            else:
                self.x_TD = x.index_select(0, index.to(x.device))
            self.group = group
        return self.x_TD

    def rope_of(self, group: int, lo: int, hi: int, kind: str | None = None) -> Rope:
        """Return position embeddings of tokens [lo, hi) of a group; empty if the layer has none."""
        return self.rope.of(group, lo, hi, self.tokens(group), kind)

    def load_rows(self, requests: Mapping[RequestId, RequestState], parts: ModelParts) -> None:
        """Load the saved hidden states of rows that start above layer 0.

        Args:
            requests: Requests of the rows, by id.
            parts: Parts of the model, with the shape of the residual stream.

        Raises:
            InvariantError: A row does not start at its first uncomputed layer (I2).
        """
        program = self.program
        late = [r for r, row in enumerate(program.rows) if row.start_layer > 0]
        if not late:
            return
        like = parts.like
        self.master_TD = like.new_zeros((program.num_tokens, like.shape[-1]))
        for r in late:
            row = program.rows[r]
            request = requests[row.request_id]
            begun = [kept for kept in (request.kept, request.drafted) if kept is not None]
            is_draft = r in program.exits
            found = (kept.of(row, is_draft=is_draft) for kept in begun)
            x_TD = next((x for x in found if x is not None), None)
            if x_TD is None:
                raise InvariantError(f"{row} does not start at its frontier (I2)")
            self.master_TD[program.offsets[r] : program.offsets[r + 1]] = x_TD

    def save_rows(self, requests: Mapping[RequestId, RequestState], index: Index) -> None:
        """Save to their requests the hidden states of rows that are not complete at `index`."""
        program = self.program
        done = index == program.end
        for r, row in enumerate(program.rows):
            if row.request_id in self.dead:
                continue
            if done and program.frontier_layer(r, index) == program.num_layers:
                requests[row.request_id].kept = requests[row.request_id].drafted = None
            else:
                self._save(requests[row.request_id], r, index)

    def leave(self, request: RequestState, request_id: RequestId, index: Index) -> None:
        """Save one row as `save_rows` does. The frame may be inside the layer at `index`.

        Args:
            request: Request of the row.
            request_id: Id of the request.
            index: Start of the layer that the frame is in.
        """
        self._save(request, self.program.request_ids.index(request_id), index)

    def _save(self, request: RequestState, r: int, index: Index) -> None:
        program = self.program
        row, layer = program.rows[r], program.frontier_layer(r, index)
        request.kept = None
        if layer == 0:
            return
        x, begin = self.master_TD, program.offsets[r]
        if self.x_TD is not None and self.group is not None:
            members = program.groups[self.group]
            if r in members:
                x = self.x_TD
                begin = sum(program.rows[i].num_tokens for i in members[: members.index(r)])
        assert x is not None
        kept = x[begin : begin + row.num_tokens].clone()
        if r not in program.exits or layer < row.end_layer:
            request.kept = SavedRows(row.lo, row.hi, layer, kept)
        elif (before := request.drafted) is None:
            request.drafted = SavedRows(row.lo, row.hi, layer, kept)
        elif before.hi < row.hi:
            states_TD = torch.cat((before.x_TD, kept))
            request.drafted = SavedRows(before.lo, row.hi, layer, states_TD)

    def commit(self, requests: Mapping[RequestId, RequestState]) -> None:
        """Commit KV of rows that ran through the last layer, and save states for prompt scores.

        Args:
            requests: Requests of the rows, by id.
        """
        program = self.program
        ended = [(r, hi, requests[program.rows[r].request_id]) for r, hi in self._ended()]
        kept: list[tuple[RequestState, Tensor]] = []
        for r, hi, request in ended:
            if request.owes_prompt and hi < request.num_prompt_tokens:
                self.flush()
                assert self.master_TD is not None
                x_TD = self.master_TD[program.offsets[r] : program.offsets[r + 1]]
                kept.append((request, x_TD.clone()))
        for _, hi, request in ended:  # no later line can fail
            request.kv.commit(hi)
        for request, x_TD in kept:
            request.hidden.append(x_TD)

    def last_states(self) -> Iterator[tuple[RequestId, int, Tensor]]:
        """Yield request, first token and last hidden states [T, D] of each row that has ended."""
        self.flush()
        assert self.master_TD is not None
        for r, hi in self._ended():
            row, at = self.program.rows[r], self.program.offsets[r]
            yield row.request_id, row.lo, self.master_TD[at : at + hi - row.lo]

    def _ended(self) -> list[tuple[int, int]]:
        """Return the living rows that ran through the last layer, and the end of their tokens.

        Rejected drafts are no tokens.
        """
        program, rejected = self.program, self._num_rejected()
        return [
            (r, row.hi - rejected.get(row.request_id, 0))
            for r, row in enumerate(program.rows)
            if row.request_id not in self.dead and row.end_layer == program.num_layers
        ]

    def _num_rejected(self) -> dict[RequestId, int]:
        """Return the number of rejected drafts of each row that verified drafts."""
        program = self.program
        if max(program.samples) < 2:
            return {}
        chosen = Counter(s.request_id for s in self.sampled)
        counts = zip(program.request_ids, program.samples, strict=True)
        return {i: num - chosen[i] for i, num in counts if num > 1}

    def scores_of(
        self,
        requests: Mapping[RequestId, RequestState],
        members: Sequence[int],
        shape: tuple[int, int],
    ) -> Scores:
        """Return the prompts that end in this HEAD op and whose log-probabilities are requested.

        Args:
            requests: Requests of the rows, by id.
            members: Rows of HEAD.
            shape: Blocks of the vocabulary, and positions that are computed together.
        """
        found, at = [], 0
        for i, r in enumerate(members):
            row, begin = self.program.rows[r], at
            at += row.num_tokens
            if self.is_dead(r) or not (request := requests[row.request_id]).owes_prompt:
                continue
            assert self.x_TD is not None
            assert request.num_top is not None
            chunks = [*request.hidden, self.x_TD[begin:at]]
            found.append(Score(i, chunks, request.ids[1:], request.num_top, shape))
        return Scores(found) if found else NO_SCORES

    def is_dead(self, row: int) -> bool:
        """Return True if a row of the program was killed."""
        return self.program.rows[row].request_id in self.dead

    def forget_steps(self) -> None:
        """Drop the spans of ATTN ops because rows died. An op that has started restarts."""
        self._steps.clear()
        self.ahead.clear()
        self.course = self.carried = None

    def step_of(self, group: int, lo: int, hi: int, new_step: NewStep) -> Step:
        """Return the inputs of the ATTN op over tokens [lo, hi) of a group."""
        key = (group, lo, hi)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = new_step(self, group, lo, hi)
        return found

    def export(self) -> dict[str, Tensor]:
        """Return named tensors from which `restore` makes the same frame without dead rows."""
        layer = self.layer
        out: dict[str, Tensor] = {}
        named = {
            "master": self.master_TD,
            "x": self.x_TD,
            "mid": layer.mid_TD,
            "next": layer.next_TD,
            "experts_x": layer.experts_x_TD,
            "weights": layer.weights_TK,
        }
        out.update({name: t.clone() for name, t in named.items() if t is not None})
        if layer.begun is not None:
            out.update({f"begun.{n}": t.clone() for n, t in layer.begun._asdict().items()})
        for lo, routed in layer.routed.items():
            parts: dict[str, Parts | None] = {
                "x": routed.x_TD,
                "ids": routed.ids_TK,
                "weights": routed.weights_TK,
            }
            parts.update({f"kept.{name}": t for name, t in (routed.kept or {}).items()})
            for name, kept in parts.items():
                out.update(_flat(f"routed.{lo}.{name}", kept))
        if layer.work is not None:
            out["work.ids"] = layer.work.ids_TK.clone()
            out["work.slots"] = layer.work.results()
            out["work.done"] = torch.tensor(list(layer.work.done), dtype=torch.uint8)
            if layer.work.residency is not None:  # else the ids decide the order
                out["work.units"] = torch.tensor(layer.work.units)
        if self.head is not None:
            out.update(self.head.export())
        group = -1 if self.group is None else self.group
        out["numbers"] = torch.tensor([group, self.slots_done])
        return out

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the tensors of `export`.

        The caller restores the expert work, which needs its bank.
        """
        group, self.slots_done = tensors["numbers"].tolist()
        self.group = None if group < 0 else group
        self.master_TD, self.x_TD = tensors.get("master"), tensors.get("x")
        layer = self.layer
        layer.mid_TD, layer.next_TD = tensors.get("mid"), tensors.get("next")
        layer.experts_x_TD, layer.weights_TK = tensors.get("experts_x"), tensors.get("weights")
        if "begun.q" in tensors:
            layer.begun = Begun(*(tensors[f"begun.{name}"] for name in Begun._fields))
        starts = sorted({int(n.split(".")[1]) for n in tensors if n.startswith("routed.")})
        for lo in starts:
            prefix = f"routed.{lo}."
            parts = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            kept = _deep({n[5:]: t for n, t in parts.items() if n.startswith("kept.")})
            layer.routed[lo] = Routed(parts["x"], parts["ids"], parts["weights"], kept or None)
        if "head.x" in tensors:
            self.head = HeadState.restored(tensors)


def _flat(name: str, kept: Parts | None) -> dict[str, Tensor]:
    if isinstance(kept, tuple):
        return {f"{name}#{i}": t.clone() for i, t in enumerate(kept) if t is not None}
    return {} if kept is None else {name: kept.clone()}


def _deep(flat: dict[str, Tensor]) -> dict[str, Parts]:
    """Undo `_flat`. Tensors of a tuple get their old positions."""
    out: dict[str, Parts] = {n: t for n, t in flat.items() if "#" not in n}
    places: dict[str, dict[int, Tensor]] = {}
    for name, t in flat.items():
        if "#" in name:
            whole, _, place = name.rpartition("#")
            places.setdefault(whole, {})[int(place)] = t
    for name, found in places.items():
        out[name] = tuple(found.get(i) for i in range(max(found) + 1))
    return out
