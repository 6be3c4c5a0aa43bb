"""HEAD, per block of the vocabulary.

Greedy rows keep their best logit, other rows keep all logits.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from qllm.models.logits import LogitRule
from qllm.runner.layers.linears import Head, HeadBlocks
from qllm.runner.sampling.definition import confidence_of, log_total
from qllm.runner.sampling.scores import NO_SCORES, Scores
from qllm.types import Sampled


def last_tokens(x_TD: Tensor, lengths: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Return the last tokens of each row. x_TD has the rows one after the other.

    Args:
        x_TD: Hidden states of the rows' tokens.
        lengths: Number of tokens of each row.
        counts: Number of last tokens to return of each row, at least 1.
    """
    if sum(counts) == x_TD.shape[0]:
        return x_TD
    ends = accumulate(lengths)
    places = [t for end, num in zip(ends, counts, strict=True) for t in range(end - num, end)]
    return x_TD[places] if len(counts) > 1 else x_TD[places[0] : places[-1] + 1]


class HeadState:
    """The results of the vocabulary blocks that are done.

    A row here is a position at which a token is sampled. A row of the program that verifies drafted
    tokens has several positions.

    Args:
        x_BD: Hidden states of the positions, normed.
        greedy: Rows whose token is the lowest id of the largest logit.
        scores: Requested log-probabilities of the rows' prompts.
        confident: Greedy rows whose confidence is reported. If there is one, all logits of the
            blocks are computed as for rows that are not greedy, and none is kept.
    """

    def __init__(
        self,
        x_BD: Tensor,
        greedy: Sequence[int],
        scores: Scores = NO_SCORES,
        confident: Sequence[int] = (),
    ) -> None:
        self.x_BD = x_BD
        self.scores = scores
        self.greedy = tuple(greedy)
        self.rest = tuple(sorted(set(range(x_BD.shape[0])) - set(greedy)))
        self.peaks_G = array("f", [-math.inf]) * len(self.greedy)
        self.ids_G = array("q", [0]) * len(self.greedy)
        """Id of the largest logit so far of each greedy row. NaN is larger than any number."""
        self.confident = tuple(confident)
        self.totals_C = array("d", [-math.inf]) * len(self.confident)
        """Logarithm of the sum of exp(logit) so far of each confident row."""
        self.blocks: list[Tensor] = []
        """Logits of the rows that are not greedy, each [R, up to the head's block_size]."""
        self._logits_RV: Tensor | None = None
        """Memory of all blocks, in which each row is contiguous. None in a restored frame."""
        self.chosen: dict[int, Sampled] | None = None
        """Chosen tokens by row, once all blocks are done. `export` omits the tokens, because a
        restored frame chooses the same tokens again."""

    def run(self, head: Head, blocks: HeadBlocks, rule: LogitRule | None, step: int) -> None:
        """Compute some blocks, or at least one task. Greedy rows read logits after the rule.

        Args:
            head: Head of the model.
            blocks: Range of blocks, and a stop. The stop is polled between tasks if all rows are
                greedy.
            rule: Change that the model makes to its logits; None changes nothing.
            step: Number of blocks that are computed at once if some rows keep all logits.
        """
        alone = not self.rest and rule is None and not self.confident
        if alone and head.best(self.x_BD, blocks, self.peaks_G, self.ids_G):
            return
        for block in head.ready(self.x_BD, blocks, step):
            logits_BV = head(self.x_BD, block)
            if self.rest:
                rest = logits_BV[list(self.rest)] if self.greedy else logits_BV
                self._keep(rest, block * head.block_size, head.vocab_size)
            if self.greedy:
                mine = logits_BV[list(self.greedy)] if self.rest else logits_BV
                self._see(mine if rule is None else rule(mine), block * head.block_size)

    def _see(self, logits_GV: Tensor, first: int) -> None:
        x_GV = logits_GV.float().numpy()
        peaks_G, ids_G = np.frombuffer(self.peaks_G, "f"), np.frombuffer(self.ids_G, "q")
        at_G = x_GV.argmax(axis=1)
        peak_G = x_GV[np.arange(len(x_GV)), at_G]
        wins_G = (peak_G > peaks_G) | (np.isnan(peak_G) & ~np.isnan(peaks_G))
        peaks_G[wins_G], ids_G[wins_G] = peak_G[wins_G], first + at_G[wins_G]
        if self.confident:
            totals_C = np.frombuffer(self.totals_C, "d")
            own = [bisect_left(self.greedy, row) for row in self.confident]
            totals_C[:] = np.logaddexp(totals_C, log_total(x_GV[own]))

    def answers(self) -> Iterator[tuple[int, int, float]]:
        """Return row, id and logit of the greedy rows."""
        return zip(self.greedy, self.ids_G, self.peaks_G, strict=True)

    def confidence(self) -> dict[int, float]:
        """Return the confidence of the confident rows. A broken row has none."""
        peaks = dict(zip(self.greedy, self.peaks_G, strict=True))
        return {
            row: confidence_of(peaks[row], total)
            for row, total in zip(self.confident, self.totals_C, strict=True)
            if math.isfinite(total)
        }

    def _keep(self, rest_RV: Tensor, first: int, vocab_size: int) -> None:
        """Keep the logits of a block that starts with token `first`."""
        if first == 0:
            self.blocks = []
            self._logits_RV = rest_RV.new_empty(len(self.rest), vocab_size)
        if self._logits_RV is not None:
            rest_RV = self._logits_RV[:, first : first + rest_RV.shape[1]].copy_(rest_RV)
        self.blocks.append(rest_RV)

    @property
    def vocab_size(self) -> int:
        """Number of logits of a row that is not greedy."""
        return sum(block.shape[1] for block in self.blocks)

    def places_of(self, rows: Iterable[int]) -> list[int]:
        """Return the places of rows among the rows that are not greedy."""
        return [bisect_left(self.rest, row) for row in rows]

    def logits(self, places: Sequence[int]) -> Tensor:
        """Return logits [., V] of the rows at these places among the rows that are not greedy."""
        blocks = self.blocks
        if self._logits_RV is not None and len(places) == places[-1] - places[0] + 1:
            return self._logits_RV[places[0] : places[-1] + 1]
        if len(places) < len(self.rest):
            blocks = [block[list(places)] for block in blocks]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)

    def tensors(self) -> list[Tensor]:
        """Return all tensors. The numbers of greedy rows are not tensors."""
        return [self.x_BD, *self.blocks, *self.scores.tensors()]

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield named copies of the tensors, from which `restored` makes the same state."""
        yield "head.x", self.x_BD.clone()
        if self.greedy:
            yield "head.greedy", torch.tensor(self.greedy)
            yield "head.peaks", torch.tensor(self.peaks_G, dtype=torch.float32)
            yield "head.ids", torch.tensor(self.ids_G, dtype=torch.int64)
        if self.confident:
            yield "head.confident", torch.tensor(self.confident)
            yield "head.totals", torch.tensor(self.totals_C, dtype=torch.float64)
        for i, block in enumerate(self.blocks):
            yield f"head.{i}", block.clone()
        yield from self.scores.export()

    @classmethod
    def restored(cls, tensors: dict[str, Tensor]) -> "HeadState":
        """Restore the state from the tensors of `export`."""
        greedy = tensors.get("head.greedy")
        ids = () if greedy is None else greedy.tolist()
        confident = tensors.get("head.confident")
        rows = () if confident is None else confident.tolist()
        head = cls(tensors["head.x"], ids, Scores.restored(tensors), rows)
        if confident is not None:
            head.totals_C = array("d", tensors["head.totals"].tolist())
        if greedy is not None:
            head.peaks_G = array("f", tensors["head.peaks"].tolist())
            head.ids_G = array("q", tensors["head.ids"].tolist())
        num = sum(name.startswith("head.") and name[5:].isdigit() for name in tensors)
        head.blocks = [tensors[f"head.{i}"] for i in range(num)]
        return head
