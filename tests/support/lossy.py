"""A server with lossy answers, a choice that follows a script, and answers of its candidates."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qllm import SamplingParams
from qllm.fleet.choice import Candidate, Choice, Decision, Do, Rules
from qllm.fleet.lossy import Lossy
from qllm.models.depth_profile import EDGES, Bin, DepthEntry, DepthProfile, weights_digest
from qllm.types import Priority
from tests.support.replay import SETTINGS
from tests.support.serving import Serving, serving_models

WHOLE, CUT, DEEPER = NAMES = ("tiny", "tiny@2", "tiny@3")
ENGINE = {**SETTINGS, "max_kv_tokens": 4096}


def profile_of_tiny(depths: Sequence[int] = (2, 3, 4), agreement: float = 0.99) -> DepthProfile:
    """Return a made-up profile of `tiny`: a depth is the quicker the fewer layers it has."""

    def entry(depth: int) -> DepthEntry:
        part = 1.0 if depth == 4 else agreement
        bins = tuple(Bin(100, round(100 * part)) for _ in EDGES)
        return DepthEntry(depth, {"chat": part}, bins, 800 / depth, 3200 / depth, 1e3, 1000, 4096)

    return DepthProfile(
        model="tiny", weights=weights_digest("tiny"), layers=4, memory=None, batch=8,
        depths=tuple(map(entry, depths)),
    )  # fmt: skip


@contextmanager
def serving_lossy(folder: Path, **settings: Any) -> Iterator[Serving]:
    """Serve `tiny` whole, and cut after two and three layers, with lossy answers allowed."""
    file = folder / "depths.json"
    file.write_text(profile_of_tiny().text())
    given = {"also": NAMES[1:], "auto": True, "lossy": True, "depth_profile": file}
    with serving_models(**given, engine=ENGINE, threads=1, **settings) as made:
        yield made


class Script(Choice):
    """A choice of open candidates that changes its mind at given tokens, and audits nothing.

    Args:
        plan: Candidate by number of counted tokens, of all answers since the begin.
    """

    def __init__(self, plan: Mapping[int, str]) -> None:
        super().__init__([Candidate(n, "tiny", 1, n == WHOLE, 1.0, 1.0) for n in NAMES], Rules())
        for state in self._states.values():
            state.is_open = True
        self.plan, self.current = dict(plan), plan.get(0, WHOLE)
        self.num_counted = 0
        self.heard: list[Any] = []

    def on_tokens(self, name: str, confidences: Iterable[float]) -> Decision:
        found = Decision(Do.STAY, self.current)
        for confidence in confidences:
            assert 0 < confidence <= 1
            self.num_counted += 1
            if (wanted := self.plan.get(self.num_counted)) is not None:
                self.current = wanted
                found = Decision(Do.DEEPEN, wanted)
        return found

    def on_finished(self, name: str, num_tokens: int, seconds: float) -> Decision:
        self.heard.append((name, num_tokens, seconds))
        return Decision(Do.STAY, self.current)

    def is_audited(self, request_id: str, share: float = 0, seed: int = 0) -> bool:
        return False


def follow(served: Serving, choice: Choice) -> Lossy:
    """Let a server's lossy answers follow another choice; return their owner."""
    owner: Any = served.front.lossy
    found: Lossy = owner._lossy
    found._choice = choice
    return found


def parts_of(text: str) -> list[tuple[str, int, int | None]]:
    """Return candidate, first token and end of each part that an answer names."""
    found = []
    for part in text.split(","):
        name, _, rest = part.rstrip("]").partition("[")
        begin, _, end = rest.partition(":")
        found.append((name, int(begin), int(end) if end else None))
    return found


def alone(served: Serving, text: str, prompt: Sequence[int], num: int) -> list[int]:
    """Return the tokens that the named candidates give, each alone after the part before it."""
    ids: list[int] = []
    for name, begin, end in parts_of(text):
        assert begin == len(ids)
        asked = SamplingParams(temperature=0, ignore_eos=True)
        engine = served.front.of(name).engine
        most = (num if end is None else end) - begin
        if most:
            handle = engine.submit([*prompt, *ids], Priority.LS, most, sampling=asked)
            ids += handle.result(60).token_ids
    return ids
