"""Cost files: the costs of one model on one machine, and the origin of the numbers.

`qllm calibrate` measures such a file, and `presets` computes one. The file is JSON:

    {"qllm_costs": 1, "model": "300m", "machine": "...", "threads": 1, "dtype": "bfloat16",
     "origin": "measured", "note": "...", "shape": {...}, "cuts": {...}, "costs": {...},
     "max_kv_tokens": 65536, "expert_bytes": 1769472, "ranks": {...}, "fit": {...}}
"""

import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator

from qllm.config import EngineConfig
from qllm.errors import ConfigError
from qllm.plan import NO_CUTS, CutRule, ModelShape
from qllm.scheduler.program import OpKind
from qllm.sim.ranks import Link, RankPrices, RankSizes, Strict
from qllm.sim.timeline import Prices, SimCosts, Work
from qllm.workloads.capacity import Capacity

VERSION = 1
_NEWER = ("move_token_ns", "task_ns", "out_token_ns", "in_token_ns")
"""Keys of `SimCosts` that older files lack."""
_PROBE_TOKENS = 1024
"""Tokens of the prompt and the context for which `capacity` is computed."""


class FileShape(Strict):
    """The fields of `qllm.plan.ModelShape`, by name."""

    num_layers: int = Field(ge=1)
    num_experts: int = Field(ge=0)
    experts_per_token: int = Field(ge=0)
    is_moe: tuple[bool, ...]
    vocab_size: int = Field(ge=1)
    max_position: int = Field(ge=1)
    recompute_above: int | None = None
    state_tokens: int = Field(default=0, ge=0)

    @field_validator("is_moe")
    @classmethod
    def _one_per_layer(cls, value: tuple[bool, ...], info: Any) -> tuple[bool, ...]:
        if len(value) != info.data.get("num_layers", len(value)):
            raise ValueError(f"{len(value)} entries for {info.data['num_layers']} layers")
        return value


class FitError(Strict):
    """Difference between the fitted and the measured times of one kind of op."""

    samples: int
    p50_percent: float
    """Median of |fitted / measured - 1|."""
    p90_percent: float
    total_percent: float
    """Relative error of the sum over all samples, with its sign."""


class CostFile(Strict):
    """Costs of a model on a machine, for the simulator."""

    qllm_costs: Literal[1] = 1
    """Version of the format."""
    model: str
    machine: str
    threads: int | None = None
    """Threads of torch; None for a machine without torch."""
    dtype: str
    origin: Literal["measured", "computed"]
    note: str = ""
    """Conditions under which the numbers hold."""
    shape: FileShape
    cuts: dict[str, float] | None = None
    """Fields of `qllm.plan.CutRule`; None cuts no op."""
    costs: dict[str, float]
    """Fields of `qllm.sim.timeline.SimCosts`, all of them."""
    max_kv_tokens: int = Field(ge=1)
    """Tokens of KV that fit on the machine."""
    expert_bytes: int = Field(ge=0)
    """Bytes of the weights of one expert of one layer."""
    ranks: RankSizes | None = None
    """Sizes by which ranks share the model; None for presets, and if it cannot be split."""
    fit: dict[str, FitError] = Field(default_factory=dict)
    """Errors of the fit by op kind; empty if the costs were not measured."""

    @field_validator("costs")
    @classmethod
    def _all_costs(cls, value: dict[str, float]) -> dict[str, float]:
        value = {**dict.fromkeys(_NEWER, 0.0), **value}
        _check_names(value, [f.name for f in fields(SimCosts)])
        for name, number in value.items():
            if not 0 <= number < float("inf"):
                raise ValueError(f"{name}={number} must be a finite number >= 0")
        return value

    @field_validator("cuts")
    @classmethod
    def _all_cuts(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None:
            _check_names(value, list(CutRule._fields))
        return value

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file.

        Raises:
            ConfigError: The file is no cost file; the message names the key.
        """
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(
                f"{os.fspath(path)}: {where + ': ' if where else ''}{first['msg']}; "
                "`qllm calibrate` writes such a file"
            ) from error

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file that `read` reads."""
        Path(path).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @property
    def title(self) -> str:
        """Return a line that names the model and machine in results."""
        threads = "" if self.threads is None else f", {self.threads} thread(s)"
        return f"{self.model} on {self.machine}{threads}, {self.dtype}; costs {self.origin}"

    def model_shape(self) -> ModelShape:
        """Return the sizes of the model that programs depend on."""
        return ModelShape(**self.shape.model_dump())

    def cut_rule(self) -> CutRule:
        """Return the rule by which the machine's runner cuts ops."""
        if self.cuts is None:
            return NO_CUTS
        values: dict[str, Any] = dict(self.cuts)
        for name in values:
            values[name] = int(values[name]) if name.endswith("_block") else values[name]
        return CutRule(**values)

    def sim_costs(self) -> SimCosts:
        """Return the cost model."""
        values: dict[str, Any] = dict(self.costs)
        return SimCosts(**{**values, "overlap": bool(values["overlap"])})

    def prices(self, num_ranks: int, link: Link) -> Prices:
        """Return the prices of ops on a number of ranks, with the costs of this file on each.

        Raises:
            ConfigError: The model cannot be split over so many ranks, or its sizes are not known.
        """
        costs, shape = self.sim_costs(), self.model_shape()
        if num_ranks == 1:
            return Prices(costs, shape)
        if self.ranks is None:
            raise ConfigError(
                f"tp={num_ranks} needs the sizes by which ranks share {self.model!r}, and these "
                "costs have none; `qllm calibrate` writes them, for models that can be split and "
                "have layers of one size: use such costs, or tp=1"
            )
        return RankPrices(costs, shape, self.ranks, num_ranks, link)

    def step_ns(self, decode_rows: int, prefill_tokens: int, context: int) -> float:
        """Return the nanoseconds of one step through all layers.

        Args:
            decode_rows: Number of requests that decode.
            prefill_tokens: Number of tokens of one prompt, from its first token on.
            context: Number of cached tokens of every decode row.
        """
        costs, shape = self.sim_costs(), self.model_shape()
        rows = decode_rows + bool(prefill_tokens)
        tokens = decode_rows + prefill_tokens
        pairs = prefill_tokens * (prefill_tokens + 1) // 2
        work = Work(tokens, rows, decode_rows * context, pairs)
        total = costs.step_ns + rows * costs.step_row_ns
        total += costs.op_ns + costs.of(OpKind.EMBED, work, shape, is_moe=False)
        total += costs.op_ns + costs.of(OpKind.HEAD, work, shape, is_moe=False)
        for is_moe in shape.is_moe:
            kinds = [OpKind.ATTN, OpKind.COMBINE]
            kinds += [OpKind.ROUTE, OpKind.EXPERTS] if is_moe else []
            total += sum(costs.op_ns + costs.of(k, work, shape, is_moe=is_moe) for k in kinds)
        return total

    def capacity(self, config: EngineConfig) -> Capacity:
        """Return the capacity that scales named workloads, with long prefills and full seats."""
        rows = config.max_num_seqs
        return Capacity(
            prefill_tokens_per_s=_PROBE_TOKENS * 1e9 / self.step_ns(0, _PROBE_TOKENS, 0),
            output_tokens_per_s=rows * 1e9 / self.step_ns(rows, 0, _PROBE_TOKENS),
            max_num_seqs=rows,
            max_kv_tokens=config.pool_tokens,
        )


def _check_names(value: dict[str, float], known: list[str]) -> None:
    unknown, missing = set(value) - set(known), set(known) - set(value)
    if unknown:
        raise ValueError(f"unknown {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    if missing:
        raise ValueError(f"{', '.join(sorted(missing))} missing")
