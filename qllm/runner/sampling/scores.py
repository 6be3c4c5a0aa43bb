"""Log-probabilities of prompts, computed in HEAD before sampling, for requests with the setting.

A unit of this work is one block of the vocabulary for a block of positions, or one row of logits to
read:

    positions   [0, R)                          [R, 2R)
    units       vocabulary 0 .. V-1, rows       vocabulary 0 .. V-1, rows       ...

So a segment stays within its bound, and at most R rows of logits exist at once.
"""

from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from qllm.models.discover import ModelParts
from qllm.models.logits import LogitRule
from qllm.runner.sampling.definition import SampledRow, choose_all, readable
from qllm.runner.sampling.limits import Rules
from qllm.types import Logprobs, PromptLogprobs, Sampled, SamplingParams


class Head(Protocol):
    """The output head as vocabulary blocks (`runner.layers.linears.Head`)."""

    num_blocks: int
    norm: Callable[[Tensor], Tensor]

    def __call__(self, x_BD: Tensor, block: int) -> Tensor: ...


class ScoreCosts(Protocol):
    """The amounts of work that fit into a segment (`runner.cuts.CutCosts`)."""

    def head_blocks(self, num_rows: int, num_blocks: int) -> int: ...
    def rows_to_read(self, vocab_size: int) -> int: ...


class Score:
    """The log-probabilities of one prompt, and the progress of their computation.

    Args:
        member: Index of the request's row in HEAD.
        chunks: Last hidden states of the prompt before the norm, one tensor per pass.
        targets: Tokens whose log-probabilities are computed, one for each hidden state.
        num_top: Number of alternatives to report.
        shape: Blocks of the vocabulary, and positions per block.
    """

    def __init__(
        self,
        member: int,
        chunks: Sequence[Tensor],
        targets: Sequence[int],
        num_top: int,
        shape: tuple[int, int],
    ) -> None:
        self.member, self.num_top = member, num_top
        self.targets = list(targets)
        self._sampling = SamplingParams(temperature=0, logprobs=num_top)
        self.found = PromptLogprobs.empty(num_top)
        self.blocks: list[Tensor] = []
        """Logits of the current block of positions, each [R, up to the head's block_size]."""
        self._chunks = list(chunks)
        self._num_blocks, self._rows = shape
        self._normed_RD: Tensor | None = None
        full, rest = divmod(len(self.targets), self._rows)
        per_block = self._num_blocks + self._rows
        self.num_units = full * per_block + (self._num_blocks + rest) * (rest > 0)

    def run(self, head: Head, parts: ModelParts, costs: ScoreCosts, unit: int) -> int:
        """Run some units from `unit` on; return the first unit that is not done."""
        block, at = divmod(unit, self._num_blocks + self._rows)
        first = block * self._rows
        rows = min(self._rows, len(self.targets) - first)
        if at < self._num_blocks:
            if self._normed_RD is None:
                self._normed_RD = head.norm(self._hidden(first, first + rows))
            stop = min(self._num_blocks, at + costs.head_blocks(rows, self._num_blocks))
            self.blocks += [head(self._normed_RD, i) for i in range(at, stop)]
            return unit + stop - at
        at -= self._num_blocks
        vocab = sum(x.shape[1] for x in self.blocks)
        stop = min(rows, at + costs.rows_to_read(vocab))
        for r in range(at, stop):
            self.found.add(self._read(r, self.targets[first + r], parts.logit_rule))
        if stop == rows:
            self.blocks, self._normed_RD = [], None
        return unit + stop - at

    def _hidden(self, start: int, stop: int) -> Tensor:
        """Return hidden states of the tokens [start, stop) without a copy of other tokens."""
        found, at = [], 0
        for chunk in self._chunks:
            if at < stop and start < at + len(chunk):
                found.append(chunk[max(0, start - at) : stop - at])
            at += len(chunk)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _read(self, row: int, target: int, rule: LogitRule | None) -> Logprobs:
        logits_V = torch.cat([block[row] for block in self.blocks])
        if rule is not None:
            logits_V = rule(logits_V)
        given = SampledRow(readable(logits_V), self._sampling, 0, rules=Rules(forced=target))
        [choice] = choose_all([given])
        if choice.logprobs is None:
            raise ValueError(
                f"the log-probability of prompt token {len(self.found.chosen) + 1} is not a "
                "number; the model's output is broken"
            )
        return choice.logprobs

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        normed = [] if self._normed_RD is None else [self._normed_RD]
        return [*self._chunks, *self.blocks, *normed]

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield named copies of the tensors, from which `restored` makes the same object."""
        numbers = [self.member, self.num_top, self._num_blocks, self._rows]
        yield "numbers", torch.tensor(numbers)
        yield "targets", torch.tensor(self.targets, dtype=torch.int64)
        yield "x", torch.cat(self._chunks)
        yield "chosen", torch.tensor(self.found.chosen, dtype=torch.float32)
        yield "top", torch.tensor(self.found.top, dtype=torch.float32)
        yield "top_ids", torch.tensor(self.found.top_ids, dtype=torch.int64)
        for i, block in enumerate(self.blocks):
            yield f"block.{i}", block.clone()

    @classmethod
    def restored(cls, tensors: dict[str, Tensor]) -> "Score":
        """Restore the object from an `export`."""
        member, num_top, num_blocks, rows = tensors["numbers"].tolist()
        score = cls(
            member, [tensors["x"]], tensors["targets"].tolist(), num_top, (num_blocks, rows)
        )
        score.found = PromptLogprobs(
            num_top,
            array("f", tensors["chosen"].tolist()),
            array("f", tensors["top"].tolist()),
            array("I", tensors["top_ids"].tolist()),
        )
        num = sum(name.startswith("block.") for name in tensors)
        score.blocks = [tensors[f"block.{i}"] for i in range(num)]
        return score


class Scores:
    """The prompts of one HEAD op, one after the other."""

    def __init__(self, each: Sequence[Score] = ()) -> None:
        self.each = tuple(each)
        self.num_units = sum(score.num_units for score in each)

    def run(
        self,
        head: Head,
        parts: ModelParts,
        costs: ScoreCosts,
        unit: int,
        dead: Container[int],
    ) -> int:
        """Run some units from `unit` on; return the next unit. Units of dead rows are skipped."""
        before = 0
        for score in self.each:
            if unit < before + score.num_units:
                if score.member in dead:
                    return before + score.num_units
                return before + score.run(head, parts, costs, unit - before)
            before += score.num_units
        return unit

    def add_to(self, member: int, sampled: Sampled) -> Sampled:
        """Add the prompt's log-probabilities to the first token of a row."""
        for score in self.each:
            if score.member == member:
                return sampled._replace(prompt=score.found)
        return sampled

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        return [x for score in self.each for x in score.tensors()]

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield named copies of the tensors, from which `restored` makes the same object."""
        for i, score in enumerate(self.each):
            for name, x in score.export():
                yield f"score.{i}.{name}", x

    @classmethod
    def restored(cls, tensors: dict[str, Tensor]) -> "Scores":
        """Restore the object from an `export`."""
        parts: dict[int, dict[str, Any]] = {}
        for name, x in tensors.items():
            if name.startswith("score."):
                _, i, rest = name.split(".", 2)
                parts.setdefault(int(i), {})[rest] = x
        return cls([Score.restored(parts[i]) for i in sorted(parts)])


NO_SCORES = Scores()
