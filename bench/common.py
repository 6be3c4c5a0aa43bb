"""The parts that benches share: the model, prompts, statistics, results, and the machine.

The reference process imports this module too, so nothing here imports qllm.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.energy import Run, per_ktok

ROOT = Path(__file__).resolve().parent.parent
"""The repository. Benches run in it, as modules: `python -m bench.serving.peers`."""
RESULTS = ROOT / "bench" / "results"
"""Folder of the committed results."""

MODEL = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "moe_intermediate_size": 384,
    "num_experts": 24,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "max_position_embeddings": 8192,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
"""Config of a Qwen3-MoE of about 300M parameters, embeddings untied."""
EMBED_STD = 1.0
"""Standard deviation of the random embedding. At transformers' 0.02 all tokens look alike: greedy
answers repeat one token, and the router uses only a few experts."""
SPECIAL = 8
"""First id that occurs in prompts."""
RESAMPLES = 2000


def model_folder(root: str | None = None) -> Path:
    """Return the folder of the model's weights; make it on first use (seeded, bfloat16)."""
    recipe = json.dumps([MODEL, EMBED_STD], sort_keys=True)
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    folder = Path(root or "/tmp") / f"qllm-bench-{digest}"
    if not (folder / "config.json").exists():
        import torch
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(0)
        config = Qwen3MoeConfig(**MODEL, eos_token_id=None, pad_token_id=None, bos_token_id=None)
        model = Qwen3MoeForCausalLM(config)
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=EMBED_STD)
        model = model.to(torch.bfloat16)
        model.save_pretrained(folder)
    return folder


def load_model(folder: str | Path, dtype: str = "bfloat16") -> Any:
    """Load the model with transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.eval()


def active_bytes(model: Any) -> int:
    """Return the bytes of weights that one token reads: no embedding, no unused experts."""
    config = model.config
    total = 0
    for name, p in model.named_parameters():
        num = p.numel()
        if "embed_tokens" in name:
            num = config.hidden_size
        elif ".experts." in name:
            num = num * config.num_experts_per_tok // config.num_experts
        total += num * p.element_size()
    return total


# prompts


def make_prompt(rng: np.random.Generator, num_tokens: int) -> list[int]:
    """Return random ids; each prompt prefers other ids."""
    vocab = MODEL["vocab_size"] - SPECIAL
    offset = int(rng.integers(vocab))
    ids = (offset + (vocab * rng.random(num_tokens) ** 3).astype(np.int64)) % vocab + SPECIAL
    return [int(i) for i in ids]


class Job(NamedTuple):
    """One request of a workload."""

    token_ids: list[int]
    max_tokens: int


def make_jobs(seed: int, count: int, prompt: tuple[int, int], output: tuple[int, int]) -> list[Job]:
    """Return jobs with lengths uniform in [low, high]."""
    rng = np.random.default_rng(seed)
    return [
        Job(
            make_prompt(rng, int(rng.integers(prompt[0], prompt[1] + 1))),
            int(rng.integers(output[0], output[1] + 1)),
        )
        for _ in range(count)
    ]


# statistics

Statistic = Callable[[np.ndarray], float]


def median(values: np.ndarray) -> float:
    """Return the median."""
    return float(np.median(values))


def quantile(p: float) -> Statistic:
    """Return the statistic of the p-th percentile."""
    return lambda values: float(np.percentile(values, p))


def percentiles(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Return `p50` and `p99`, rounded; an empty dict without values."""
    return {f"p{p}": round(quantile(p)(np.asarray(values)), digits) for p in (50, 99) if values}


class Estimate(NamedTuple):
    """A number and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """Return the text for a table."""
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def estimate(
    groups: Sequence[Sequence[float]],
    statistic: Statistic,
    over: Sequence[Sequence[float]] | None = None,
    seed: int = 0,
) -> Estimate | None:
    """Return a statistic of pooled groups, or its ratio to that of other pooled groups.

    Each group (a seed's run) is resampled separately, so that every seed keeps its weight.
    """
    rng = np.random.default_rng(seed)

    def pooled(parts: Sequence[np.ndarray], again: bool) -> np.ndarray:
        if again:
            parts = [p[rng.integers(len(p), size=len(p))] for p in parts]
        return np.concatenate(parts)

    tops = [np.asarray(g, dtype=float) for g in groups if len(g)]
    bottoms = None if over is None else [np.asarray(g, dtype=float) for g in over if len(g)]
    if not tops or (bottoms is not None and not bottoms):
        return None

    def once(again: bool) -> float:
        top = statistic(pooled(tops, again))
        return top if bottoms is None else top / statistic(pooled(bottoms, again))

    draws = [once(True) for _ in range(RESAMPLES)]
    low, high = np.percentile(draws, [2.5, 97.5])
    return Estimate(once(False), float(low), float(high))


def paired(values: Sequence[float], seed: int = 0) -> Estimate:
    """Return the median of paired differences or ratios, with its interval."""
    found = estimate([values], median, seed=seed)
    assert found is not None
    return found


# the result


class UncommittedError(argparse.ArgumentTypeError):
    """A result that may not become a committed one, because no commit has its tree."""


def changed_files() -> list[str] | None:
    """Return the files that differ from the commit, without results; None without a repository."""
    command = ["git", "-C", str(ROOT), "status", "--porcelain", "-z", "--untracked-files=all"]
    command += ["--no-renames", "--", ".", f":(exclude){RESULTS.relative_to(ROOT)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return [entry[3:] for entry in done.stdout.split("\0") if entry]


def result_file(path: str | Path) -> Path:
    """Return the path of a result; the type of `--out`.

    Raises:
        UncommittedError: The path is in `bench/results/`, and the tree is not that of a commit.
    """
    path = Path(path)
    if not path.resolve().is_relative_to(RESULTS.resolve()):
        return path
    files = changed_files()
    if files is None:
        why = "git names no commit of this tree"
    elif files:
        more = ", ..." if len(files) > 3 else ""
        why = f"{len(files)} files differ from the commit ({', '.join(files[:3])}{more})"
    else:
        return path
    raise UncommittedError(
        f"{path} is a committed result, and {why}: this tree cannot be checked out "
        "again; commit first, or give --out a file outside of bench/results/"
    )


def write_result(path: Path, text: str) -> None:
    """Write a result to its file, and make the folders that the file needs.

    Raises:
        UncommittedError: The file is refused, see `result_file`.
    """
    path = result_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def print_result(result: dict[str, Any], out: Path | None) -> None:
    """Print a result as one line of JSON, the last line, with its time; write it to a file."""
    result = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())} | result
    print(json.dumps(result, separators=(",", ":")), flush=True)
    if out is not None:
        write_result(out, json.dumps(result, indent=1))


class Line(NamedTuple):
    """A row of a result."""

    name: str
    """Quantity, and its unit where `value` has none."""
    value: str
    """Measured value, with an interval where there is one."""
    target: str = "printed"
    """Target, or "printed" for a number that cannot miss: a control, a floor or a count."""
    reached: bool | None = None
    """True if the value reaches its target; None for a number that is only printed."""
    energy: str | None = None
    """Energy of the runs of a row of throughput (`energy.per_ktok`); None in other rows."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields; `energy` only where there is one."""
        return {k: v for k, v in self._asdict().items() if k != "energy" or v is not None}


def at_most(name: str, value: float, target: float, digits: int = 1) -> Line:
    """Return a row whose number reaches its target if it is not above it."""
    return Line(name, f"{value:,.{digits}f}", f"<= {target:g}", value <= target)


def at_least(
    name: str, value: float, target: float, digits: int = 2, *, energy: Sequence[Run] | None = None
) -> Line:
    """Return a row whose number reaches its target if it is not below it."""
    text = None if energy is None else per_ktok(energy)
    return Line(name, f"{value:,.{digits}f}", f">= {target:g}", value >= target, text)


def with_lines(result: dict[str, Any], lines: Sequence[Line]) -> dict[str, Any]:
    """Return a result with its rows, and the texts of those that miss their target."""
    losing = [
        f"{line.name.strip()}: {line.value} (target {line.target})"
        for line in lines
        if line.reached is False
    ]
    return result | {"lines": [line.as_json() for line in lines], "losing": losing}


class Table:
    """The rows of a result, printed as they are added."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def add(
        self,
        name: str,
        value: str,
        target: str = "printed",
        reached: bool | None = None,
        *,
        energy: Sequence[Run] | None = None,
    ) -> None:
        """Add a row and print it; `reached` is None for a number that is only printed.

        Args:
            name: Quantity, and its unit.
            value: Measured value.
            target: Target.
            reached: True if the value reaches its target.
            energy: Energy of the runs of a row of throughput, which has to be given for one.
        """
        text = None if energy is None else per_ktok(energy)
        self.lines.append(Line(name, value, target, reached, text))
        mark = {True: "ok", False: "MISSED", None: ""}[reached]
        print(f"{name:<58} {value:<34} {target:<14} {mark}", flush=True)
        if text is not None:
            print(f"  {text}", flush=True)

    @property
    def missed(self) -> bool:
        """True if a row misses its target."""
        return any(line.reached is False for line in self.lines)

    def finish(self, result: dict[str, Any], out: Path | None) -> None:
        """Print a result with these rows as JSON, in the last line, and write it to a file."""
        print_result(with_lines(result, self.lines), out)


def plain(value: Any) -> Any:
    """Convert estimates and containers to JSON values."""
    if isinstance(value, Estimate):
        return {k: round(v, 4) for k, v in value._asdict().items()}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return round(value, 5)
    return value


def without_paths(text: str) -> str:
    """Return a message for committed results, without folders of this machine."""
    for folder, name in ((ROOT, "."), (Path(sys.prefix), "VENV"), (Path.home(), "~")):
        text = text.replace(str(folder), name)
    return text


# the machine


def _first(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)


def _commit() -> str | None:
    """Return the commit of this tree, with `-dirty` if a file differs that is no result."""
    args = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12"]
    try:
        name = subprocess.run(args, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{name}-dirty" if changed_files() else name


def machine() -> dict[str, Any]:
    """Return this machine and the versions of its software."""
    import torch
    import transformers

    flags = (_first("/proc/cpuinfo", "flags") or "").split()
    return {
        "cpu": _first("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "isa": [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags],
        "memory": _first("/proc/meminfo", "MemTotal"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": _commit(),
        "gpu": None,
    }


def cpu_ticks() -> list[int]:
    """Return clock ticks of all cores: user, nice, system, idle, iowait, irq, softirq, steal."""
    return [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]


def busy_cores() -> tuple[float, float]:
    """Return the CPU seconds used so far: by the machine, by this process and its children."""
    ticks = cpu_ticks()
    idle = ticks[3] + ticks[4]
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK"), own
