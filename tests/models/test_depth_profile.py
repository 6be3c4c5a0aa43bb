"""`qllm.models.depth_profile`: a file that belongs to its weights, and errors that say why not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qllm.errors import ConfigError, ModelError
from qllm.models.depth_profile import (
    EDGES,
    MOST_BYTES,
    NAME,
    Bin,
    DepthEntry,
    DepthProfile,
    parsed,
    place_of,
    read,
    require_writable,
    weights_digest,
    write,
)
from qllm.models.folders import locate

NUM = len(EDGES)
SAME = (Bin(10, 10),) * NUM


def entry(depth: int, bins: tuple[Bin, ...] = SAME, **more: Any) -> DepthEntry:
    found: dict[str, Any] = {
        "agreement": {"chat": 0.5}, "alone_per_s": 10.0, "batch_per_s": 40.0,
        "prompt_per_s": 90.0, "weight_bytes": depth * 1000, "kv_tokens": 1024,
    }  # fmt: skip
    return DepthEntry(depth=depth, bins=bins, **{**found, **more})


def profile_of(weights: str, *depths: int, **more: Any) -> DepthProfile:
    entries = tuple(entry(depth, **more) for depth in depths)
    return DepthProfile("tiny", weights, depths[-1], 1 << 31, 8, entries)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the model `tiny`."""
    _, tiny = locate("tiny", weights=True, code=False)
    shutil.copytree(tiny, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_file_is_read_as_it_was_written(folder: Path) -> None:
    found = profile_of(weights_digest(str(folder)), 1, 3, 4)
    write(found, place_of(str(folder)))
    assert [path.name for path in folder.glob("qllm*")] == [NAME]
    assert read(str(folder)) == found


def test_a_copy_has_the_digest_of_the_original(folder: Path) -> None:
    (folder / "model.safetensors").touch()
    assert weights_digest(str(folder)) == weights_digest("tiny")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_profile_of_other_weights_is_refused(folder: Path, name: str) -> None:
    write(profile_of(weights_digest(str(folder)), 4), place_of(str(folder)))
    content = bytearray((folder / name).read_bytes())
    content[-4096:] = bytes(byte ^ 1 for byte in content[-4096:])  # what a training step changes
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match="is the profile of other weights: of 'tiny' with"):
        read(str(folder))


def test_a_model_without_a_profile_says_how_to_make_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no profile of depths in .* make it with qllm profile"):
        read(str(folder))
    with pytest.raises(ConfigError, match="known aliases"):
        read("no-such-model")
    write(profile_of("x", 4), place_of(str(folder)))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        read(str(folder))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda _: "", "JSONDecodeError"),
        (lambda _: "[1]", "TypeError"),
        (lambda x: {**x, "version": 2}, "version 2 is not 1"),
        (lambda x: {k: v for k, v in x.items() if k != "weights"}, "KeyError"),
        (lambda x: {**x, "depths": []}, "do not ascend"),
        (lambda x: {**x, "depths": x["depths"][::-1]}, "do not ascend"),
        (lambda x: {**x, "depths": [{**x["depths"][0], "depth": 0}]}, "do not ascend"),
        (lambda x: {**x, "layers": 5}, "the last depth is 4, and the model has 5"),
        (lambda x: {**x, "layers": True}, "True is no count"),
        (lambda x: with_first(x, bins=[[1, 2]] * NUM), "the bins of depth 2"),
        (lambda x: with_first(x, bins=[[1, 1]]), "the bins of depth 2"),
        (lambda x: with_first(x, agreement={"a": 1.5}), "1.5 is no share"),
        (lambda x: with_first(x, per_s=[0, 1, 2]), "0 is no rate"),
        (lambda x: with_first(x, per_s=[float("nan"), 1, 1]), "nan is no rate"),
        (lambda _: "x" * (MOST_BYTES + 1), "more than 4,096 bytes"),
        (lambda _: "[" * 4000, "RecursionError|JSONDecodeError"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(folder: Path, change: Any, why: str) -> None:
    changed = change(json.loads(profile_of("x", 2, 4).text()))
    text = changed if isinstance(changed, str) else json.dumps(changed)
    place_of(str(folder)).write_text(text)
    with pytest.raises(ConfigError, match=why):
        read(str(folder))


def with_first(found: dict[str, Any], **change: Any) -> dict[str, Any]:
    first, *rest = found["depths"]
    return {**found, "depths": [{**first, **change}, *rest]}


def test_twelve_depths_of_four_texts_fit_and_more_is_refused(tmp_path: Path) -> None:
    bins = (Bin(4096, 2048),) * NUM
    texts = {f"text {n}": 0.1234 for n in range(4)}
    rates = {"alone_per_s": 123.4567, "batch_per_s": 1234.5678, "prompt_per_s": 12345.678}
    sizes = {"weight_bytes": 12 << 30, "kv_tokens": 1 << 22}
    more: dict[str, Any] = {"bins": bins, "agreement": texts, **rates, **sizes}
    found = profile_of("0" * 32, *range(1, 13), **more)
    assert len(found.text()) < MOST_BYTES
    with pytest.raises(ConfigError, match=r"bytes, at most 4,096 are allowed; name fewer depths"):
        write(profile_of("0" * 32, *range(1, 40), **more), tmp_path / NAME)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_takes_no_file_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    require_writable(tmp_path / NAME)
    for path, why in (tmp_path, "is a folder"), (tmp_path / "no" / "x", "cannot be written to"):
        with pytest.raises(ConfigError, match=why):
            require_writable(path)
    with pytest.raises(ConfigError, match="cannot be written to"):
        write(profile_of("x", 4), tmp_path / "no" / "x")


def test_low_is_the_confidence_below_which_most_tokens_differ() -> None:
    def low(*agreed: int) -> float:
        return entry(2, tuple(Bin(10, one) for one in agreed)).low

    assert low(10, 10, 10, 10, 10, 10, 10) == 0
    assert low(0, 0, 0, 5, 6, 9, 10) == 0.5
    assert low(4, 5, 5, 5, 5, 5, 5) == 0.1
    assert low(9, 4, 9, 9, 9, 9, 9) == 0.25
    assert low(0, 0, 0, 0, 0, 0, 4) == 1.0
    assert entry(2, (Bin(0, 0),) * NUM).low == 0


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=NUM, max_size=NUM))
@settings(max_examples=50)
def test_any_counts_come_back(pairs: list[tuple[int, int]]) -> None:
    bins = tuple(Bin(max(pair), min(pair)) for pair in pairs)
    found = profile_of("x", 1, 2, bins=bins)
    assert parsed(found.text()) == found
    assert 0 <= found.depths[0].agreed <= 1
