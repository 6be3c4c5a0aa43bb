"""Forced calls without an engine: answers of a model that chooses tokens at random."""

import random
import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
from tokenizers import AddedToken

from qllm.frontend.detokenizer import Detokenizer
from qllm.grammar import Vocabulary
from qllm.grammar_bounds import Bounds
from qllm.models.tokenizer import load_tokenizer
from qllm.server.api.calls import Reader, make_reader
from qllm.server.tools.deltas import merged
from qllm.server.tools.forced import grammar, tokens_in
from qllm.server.tools.format import Format
from qllm.server.tools.tool_choice import Choice
from qllm.types import StructuredOutputs

BOUNDS = Bounds(text=12, items=4, others=2, depth=4, digits=(5, 4, 2))
LONGEST = 3000
"""Tokens: more than any answer within the bounds has."""
EOS = frozenset({0, 2})


def tags_of(form: Format) -> list[str]:
    """The tags of a format that its models have as tokens: those between angles or brackets."""
    texts = " ".join((*form.markup, *form.signs))
    return sorted(set(re.findall(r"<[^\s<>$]{2,40}>|\[/?[A-Z_]{3,}\]", texts)))


class Model:
    """A tokenizer that has the tags of a format as tokens, or spells them.

    Args:
        form: The format.
        has_tokens: True if the tags are tokens.
    """

    def __init__(self, form: Format, *, has_tokens: bool) -> None:
        self.form, self.tokenizer = form, deepcopy(load_tokenizer("tiny"))
        if has_tokens:
            tags = [AddedToken(tag, special=n % 2 == 0, normalized=False)
                    for n, tag in enumerate(tags_of(form))]  # fmt: skip
            self.tokenizer.add_tokens(tags)
        self.tokens = tokens_in(form, self.tokenizer)
        assert bool(self.tokens) is (has_tokens and bool(tags_of(form)))
        self.vocabulary = Vocabulary(self.tokenizer, len(self.tokenizer), EOS)
        self.vocabulary.bounds = BOUNDS

    def form_of(self, choice: Choice) -> StructuredOutputs:
        return StructuredOutputs(grammar=grammar(choice, self.form, self.tokens))

    def answer(
        self, choice: Choice, seed: int, likes: Callable[[str], bool] | None = None
    ) -> list[int]:
        """The tokens of an answer whose tokens are chosen at random among those allowed.

        Args:
            choice: Tools of which it calls some.
            seed: Seed of the random numbers.
            likes: Tells which texts of tokens the model takes where it may; None for any.
        """
        matcher, rng, said = self.vocabulary.matcher(self.form_of(choice)), random.Random(seed), []
        size = len(self.tokenizer)
        texts = [] if likes is None else [self.vocabulary.decode([i]) for i in range(size)]
        liked = {i for i, text in enumerate(texts) if likes is not None and likes(text)}
        while len(said) < LONGEST:
            assert matcher.allow(said) is None, self.vocabulary.decode(said)
            bits = np.unpackbits(matcher.words.view(np.uint8), count=size, bitorder="little")
            may_come = np.flatnonzero(bits)
            if EOS.issuperset(may_come.tolist()):
                return said
            wanted = [i for i in may_come.tolist() if i in liked]
            chosen = int(rng.choice(wanted or may_come.tolist()))
            if chosen not in EOS:
                said.append(chosen)
        raise AssertionError(f"no end: {self.vocabulary.decode(said)}")

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def takes(self, choice: Choice, ids: list[int]) -> bool:
        """Return True if the grammar of a choice takes tokens as a whole answer."""
        matcher, size = self.vocabulary.matcher(self.form_of(choice)), len(self.tokenizer)
        if matcher.allow(ids) is not None:
            return False
        bits = np.unpackbits(matcher.words.view(np.uint8), count=size, bitorder="little")
        return bool(bits[list(EOS)].any())

    def read(self, choice: Choice, ids: list[int], size: int = 1) -> dict[str, Any]:
        """The message that a server makes of tokens, which come in pieces of a size."""
        prompt = self.ids("<|start|>assistant") if self.form.has_heads else []

        def reader() -> Reader:
            return make_reader(self.tokenizer, prompt, choice, True, self.form.name)

        own, text_of = reader(), Detokenizer(self.tokenizer, reading=reader)
        made = []
        for at in range(0, len(ids), size):
            part = ids[at : at + size]
            made.append(own.push(text_of.push(part)[0], part))
        made += [own.push(text_of.finish(), ()), own.finish()]
        found = merged(made)
        for call in found.get("tool_calls", ()):
            call.pop("id")
        return found
