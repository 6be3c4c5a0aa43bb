"""Messages between an engine and its front ends when they connect."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from qllm.config import EngineConfig
from qllm.ingress.remote.meeting import Meeting
from qllm.plan import ModelShape
from qllm.types import RequestId, Sampled, SamplingParams


class Source(NamedTuple):
    """The place of the KV of a request that another engine has migrated."""

    address: str
    """HOST:PORT at which other engines reach the source engine."""
    ticket: str
    """Random, unguessable id of the KV on the source engine."""


class ModelInfo(NamedTuple):
    """Facts about a model that a front end needs. Another process may have loaded the model."""

    name: str
    shape: ModelShape
    eos_token_ids: frozenset[int]
    sampling_defaults: dict[str, Any]
    """Keywords of SamplingParams for requests without any, from the generation config."""
    drivers: tuple[str, ...]
    kernels: dict[str, str]
    vocabulary: str | None
    """Digest of the tokenizer's vocabulary, if there is one. Front ends must use the same
    vocabulary."""
    weights: str = ""
    """Digest of the weights, for an engine that other processes may meet."""
    software: str = ""
    """Releases and kernels that decide bits, for an engine that other processes may meet."""
    chosen: tuple[str, ...] = ()
    """Settings of sizes that the engine chose itself."""
    whole_layers: int = 0
    """Number of layers of the whole model. It is more than those of `shape` in a cut model."""


class Start(NamedTuple):
    """The first message to the engine's process: the model to load, and the settings."""

    model: str
    load: dict[str, Any]
    """Keywords of `loader.load`."""
    policy: str | bytes
    """The policy: a name, or a pickled object."""
    policy_settings: Mapping[str, Any] | None
    config: EngineConfig
    threads: int | None
    listen: str | None
    """Path of a socket at which further front ends may attach."""
    quiet: bool
    """True to silence progress bars and warnings of the libraries."""
    meeting: Meeting | None = None
    """Address at which front ends of other hosts connect to the engine."""
    takes_digest: bool = False
    """True if the card contains digests of weights and software."""


class Hello(NamedTuple):
    """The answer to a front end that attaches. Four file descriptors follow this message."""

    info: ModelInfo
    config: EngineConfig
    trace_meta: dict[str, Any]
    model: str
    trust_remote_code: bool


class EngineCard(NamedTuple):
    """The description of an engine for front ends of other hosts, which is sent as JSON."""

    info: ModelInfo
    config: EngineConfig
    trace_meta: dict[str, Any]
    model: str

    def to_json(self) -> dict[str, Any]:
        """Return the card as a message."""
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
        """Store a token that the request had before the checkpoint."""
        self.sampled.append(sampled)
        return False
