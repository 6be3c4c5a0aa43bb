"""What an engine and its front ends say to each other when they meet."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from qllm.config import EngineConfig
from qllm.ingress.remote.meeting import Meeting
from qllm.plan import ModelShape
from qllm.types import RequestId, Sampled, SamplingParams


class Source(NamedTuple):
    """Where the KV of a request waits that another engine has handed over."""

    address: str
    """HOST:PORT at which that engine meets others."""
    ticket: str
    """Names the KV there, and nobody guesses it."""


class ModelInfo(NamedTuple):
    """What the front end knows of a model that may be loaded in another process."""

    name: str
    shape: ModelShape
    eos_token_ids: frozenset[int]
    sampling_defaults: dict[str, Any]
    """Keywords of SamplingParams for requests without any, from the generation config."""
    drivers: tuple[str, ...]
    kernels: dict[str, str]
    vocabulary: str | None
    """Digest of the tokenizer's vocabulary, if there is a tokenizer: front ends use the same."""
    weights: str = ""
    """Digest of the weights, of an engine that other processes may meet."""
    software: str = ""
    """Releases and kernels that decide bits, of such an engine."""


class Start(NamedTuple):
    """The first message to the engine's process: what to load and how to serve it."""

    model: str
    load: dict[str, Any]
    """Keywords of `loader.load`."""
    policy: str | bytes
    """A name, or a pickled object."""
    policy_settings: Mapping[str, Any] | None
    config: EngineConfig
    threads: int | None
    listen: str | None
    """Path of a socket at which further front ends may attach."""
    quiet: bool
    """No progress bars and warnings of the libraries below."""
    meeting: Meeting | None = None
    """Where front ends of other hosts may meet the engine."""
    takes_digest: bool = False
    """Whether the card says which weights and software it has."""


class Hello(NamedTuple):
    """The answer to a front end that attaches; four descriptors follow."""

    info: ModelInfo
    config: EngineConfig
    trace_meta: dict[str, Any]
    model: str
    trust_remote_code: bool


class EngineCard(NamedTuple):
    """The description of an engine that front ends of other hosts get; it survives JSON."""

    info: ModelInfo
    config: EngineConfig
    trace_meta: dict[str, Any]
    model: str

    def to_json(self) -> dict[str, Any]:
        """As a message."""
        info = self.info._asdict()
        info["shape"] = self.info.shape._asdict()
        info["eos_token_ids"] = sorted(self.info.eos_token_ids)
        return {
            "info": info,
            "config": asdict(self.config),
            "trace_meta": self.trace_meta,
            "model": self.model,
        }


@dataclass(slots=True)
class Restored:
    """A request of a checkpoint on its way to the front end."""

    number: RequestId
    name: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int
    sampled: list[Sampled] = field(default_factory=list)

    def on_token(self, sampled: Sampled) -> bool:
        """Take one of the tokens that it had already."""
        self.sampled.append(sampled)
        return False
