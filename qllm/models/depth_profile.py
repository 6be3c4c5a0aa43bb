"""The profile of a model's depths, a file beside its weights: `qllm profile MODEL --depths`.

    model, digest of the weights, layers, budget of memory
    per depth: agreement with the whole model, by text and by confidence;
               tokens per second, bytes of the weights, tokens of KV that fit

The file belongs to the weights that were measured, and is refused for other weights.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qllm.errors import ConfigError, shown
from qllm.models.folders import GGUF, locate, weight_files
from qllm.models.weights.sampled import sampled

NAME = "qllm-depths.json"
"""Name of the file in a model's folder. Beside a GGUF file it follows the name of that file."""
MOST_BYTES = 4096
"""Most bytes of the file."""
VERSION = 1
EDGES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
"""Least confidence of each bin. A token's confidence is the largest probability of its
distribution."""


class Bin(NamedTuple):
    """The positions of a depth whose tokens have about the same confidence."""

    num: int
    """Number of positions."""
    agreed: int
    """Number of them at which the token is that of the whole model."""


class DepthEntry(NamedTuple):
    """The measured numbers of a model that is cut at one depth."""

    depth: int
    agreement: Mapping[str, float]
    """Part of the positions whose token is that of the whole model, per kind of text."""
    bins: tuple[Bin, ...]
    """Positions of all texts by confidence, one for each of `EDGES`."""
    alone_per_s: float
    """Tokens per second of one request that decodes alone."""
    batch_per_s: float
    """Tokens per second of `batch` requests that decode together."""
    prompt_per_s: float
    """Tokens of a prompt per second, of one request alone."""
    weight_bytes: int
    kv_tokens: int
    """Tokens of KV that an engine of this depth gets with the profile's budget of memory."""

    @property
    def num(self) -> int:
        """Number of positions that were compared."""
        return sum(one.num for one in self.bins)

    @property
    def agreed(self) -> float:
        """Part of all positions whose token is that of the whole model."""
        return sum(one.agreed for one in self.bins) / max(1, self.num)

    @property
    def low(self) -> float:
        """Confidence below which a token of this depth is low.

        It is the upper edge of the highest bin in which less than half of the tokens agree. It is 0
        if there is no such bin, and 1 if the highest bin of all is one.
        """
        for at in reversed(range(len(self.bins))):
            if 2 * self.bins[at].agreed < self.bins[at].num:
                return (*EDGES, 1.0)[at + 1]
        return 0.0


class DepthProfile(NamedTuple):
    """The numbers of several depths of one model, shallow to deep. The last is the whole model."""

    model: str
    weights: str
    """Digest of the weights: `weights_digest`."""
    layers: int
    """Number of layers of the whole model."""
    memory: int | None
    """Budget of memory for an engine, in bytes; None for what was free."""
    batch: int
    """Number of requests that decoded together."""
    depths: tuple[DepthEntry, ...]

    def text(self) -> str:
        """Return the content of the file.

        Raises:
            ConfigError: It has more than `MOST_BYTES` bytes.
        """
        depths = [
            {
                "depth": one.depth,
                "agreement": {name: round(x, 4) for name, x in one.agreement.items()},
                "bins": [list(x) for x in one.bins],
                "per_s": [
                    round(x, 2) for x in (one.alone_per_s, one.batch_per_s, one.prompt_per_s)
                ],
                "weight_bytes": one.weight_bytes,
                "kv_tokens": one.kv_tokens,
            }
            for one in self.depths
        ]
        head = {
            "version": VERSION,
            "model": self.model,
            "weights": self.weights,
            "layers": self.layers,
            "memory": self.memory,
            "batch": self.batch,
            "edges": EDGES,
        }
        text = json.dumps({**head, "depths": depths}, separators=(",", ":")) + "\n"
        if (num := len(text.encode())) > MOST_BYTES:
            raise ConfigError(
                f"the profile of {len(depths)} depths on {len(self.depths[0].agreement)} texts has "
                f"{num:,} bytes, at most {MOST_BYTES:,} are allowed; name fewer depths with "
                "--candidates, or give fewer texts or shorter names"
            )
        return text


def parsed(text: str, what: str = "the profile") -> DepthProfile:
    """Read the content of a profile's file.

    Args:
        text: Content.
        what: Name of the file, for errors.

    Raises:
        ConfigError: The content is no profile of this version.
    """
    try:
        found = json.loads(text)
        if found["version"] != VERSION or tuple(found["edges"]) != EDGES:
            raise ValueError(f"version {shown(found['version'])} is not {VERSION}")
        profile = DepthProfile(
            model=str(found["model"]),
            weights=str(found["weights"]),
            layers=_count(found["layers"]),
            memory=None if found["memory"] is None else _count(found["memory"]),
            batch=_count(found["batch"]),
            depths=tuple(_entry(one) for one in found["depths"]),
        )
        _check(profile)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} is no profile of depths that this release reads ({type(error).__name__}: "
            f"{error}); write it anew with qllm profile MODEL --depths"
        ) from error
    return profile


def _entry(found: Mapping[str, Any]) -> DepthEntry:
    alone, batch, prompt = found["per_s"]
    return DepthEntry(
        depth=_count(found["depth"]),
        agreement={str(name): _share(x) for name, x in found["agreement"].items()},
        bins=tuple(Bin(_count(num), _count(agreed)) for num, agreed in found["bins"]),
        alone_per_s=_rate(alone),
        batch_per_s=_rate(batch),
        prompt_per_s=_rate(prompt),
        weight_bytes=_count(found["weight_bytes"]),
        kv_tokens=_count(found["kv_tokens"]),
    )


def _check(profile: DepthProfile) -> None:
    depths = [one.depth for one in profile.depths]
    if not depths or depths != sorted(set(depths)) or depths[0] < 1:
        raise ValueError(f"the depths {shown(depths)} do not ascend")
    if depths[-1] != profile.layers:
        raise ValueError(f"the last depth is {depths[-1]}, and the model has {profile.layers}")
    for one in profile.depths:
        if len(one.bins) != len(EDGES) or any(x.agreed > x.num for x in one.bins):
            raise ValueError(f"the bins of depth {one.depth} are {shown(one.bins)}")


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{shown(value)} is no count")
    return value


def _share(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{shown(value)} is no share in [0, 1]")
    return float(value)


def _rate(value: object) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{shown(value)} is no rate above 0")
    return float(value)


def place_of(model: str) -> Path:
    """Return the place of a model's profile: a file beside its weights.

    Args:
        model: An alias, a folder, a GGUF file, or a hub id.

    Raises:
        ConfigError: The name is unknown.
        ModelError: The model is not on this machine, or has no weights.
    """
    _, folder = locate(model, weights=True, code=False)
    if folder.suffix == GGUF:
        return folder.with_name(f"{folder.name}.{NAME}")
    return folder / NAME


def weights_digest(model: str) -> str:
    """Return a digest of a model's weights: sizes and a sample of the bytes of its files, config.

    Reading every byte would take as long as a load. So weights that differ in a few bytes alone may
    have the same digest. A copy of the files has the same digest.

    Args:
        model: An alias, a folder, a GGUF file, or a hub id.

    Raises:
        ConfigError: The name is unknown.
        ModelError: The model is not on this machine, or has no weights.
    """
    _, folder = locate(model, weights=True, code=False)
    is_gguf = folder.suffix == GGUF
    files = [folder] if is_gguf else [folder / "config.json", *weight_files(folder)]
    return sampled(files, times=False)


def write(profile: DepthProfile, path: Path) -> None:
    """Write a profile's file. A reader sees the old file or the new one.

    Raises:
        ConfigError: The profile is too long, or the file cannot be written.
    """
    text, new = profile.text(), path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise _unwritable(path, error) from error


def require_writable(path: Path) -> None:
    """Raise ConfigError if no file can be written at a place, before a model is measured."""
    if path.is_dir():
        raise ConfigError(f"{os.fspath(path)!r} is a folder; name a file with --output FILE")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise _unwritable(path, OSError(0, "no folder in which files can be made"))


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the profile cannot be written to {os.fspath(path)!r}: {error.strerror}; name another "
        "file with --output FILE"
    )


def read(model: str, path: Path | None = None) -> DepthProfile:
    """Read the profile of a model's depths, and compare its digest with the model's weights.

    Args:
        model: An alias, a folder, a GGUF file, or a hub id.
        path: The file; None is the one beside the weights.

    Raises:
        ConfigError: There is no such file, it is no profile, or it belongs to other weights.
        ModelError: The model is not on this machine, or has no weights.
    """
    path = path or place_of(model)
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"model {model!r} has no profile of depths in {os.fspath(path)!r} ({error.strerror}); "
            f"make it with qllm profile {model} --depths"
        ) from error
    what = f"the file {os.fspath(path)!r}"
    if len(content) > MOST_BYTES:
        raise ConfigError(
            f"{what} is no profile of depths: it has more than {MOST_BYTES:,} bytes; make it with "
            f"qllm profile {model} --depths"
        )
    profile = parsed(content.decode("utf-8", "replace"), what)
    if (digest := weights_digest(model)) != profile.weights:
        raise ConfigError(
            f"{what} is the profile of other weights: of {profile.model!r} with the digest "
            f"{profile.weights}, and the weights of {model!r} have {digest}; measure these with "
            f"qllm profile {model} --depths"
        )
    return profile
