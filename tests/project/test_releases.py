"""`make test-releases`: which releases it asks, and what it calls a difference."""

import random
import re
from typing import Any

import pytest
from packaging.version import Version

from qllm.models.parts.fingerprints import TESTED_TRANSFORMERS
from scripts import releases


def test_the_tested_release_is_that_of_the_fingerprints() -> None:
    assert str(releases.tested()) == TESTED_TRANSFORMERS


@pytest.mark.parametrize("seed", range(3))
def test_the_lowest_the_tested_and_the_newest_are_asked(seed: int) -> None:
    lowest = re.search(r">=([\d.]+)", str(releases.allowed().specifier))
    assert lowest is not None
    inside = [Version(lowest[1]), Version("5.20.1"), Version("5.23.0"), Version("5.99.1")]
    there = [Version("4.57.6"), Version("5.16.1"), Version("6.0.0"), *inside]
    random.Random(seed).shuffle(there)
    tested = releases.tested()
    assert releases.chosen(there, every=False) == [tested, inside[0], inside[-1]]
    every = releases.chosen(there, every=True)
    assert every[0] == tested
    assert sorted(every) == sorted({tested, *inside})
    with pytest.raises(SystemExit, match="is not among"):
        releases.chosen([v for v in there if v != tested], every=False)


def test_every_thing_that_must_be_the_same_is_compared() -> None:
    expected: dict[str, Any] = {key: [key, 1] for key in releases.SAME}
    expected["parts"] = "by their source: norm"
    assert releases.differences(expected, {**expected, "parts": "by a trial: norm"}) == []
    for key in releases.SAME:
        said = releases.differences(expected, {**expected, key: [key, 2]})
        assert said == [f"{key}: {[key, 2]}, not {[key, 1]}"]
        assert len(releases.differences(expected, {k: v for k, v in expected.items() if k != key}))
    unknown = "norm: its own module (not rms)"
    assert releases.differences(expected, {**expected, "parts": unknown}) == [f"parts: {unknown}"]
