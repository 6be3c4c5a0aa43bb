"""Trace files of requests, in public formats or qllm's own format, read as `RequestSpec`.

| format | one row |
|---|---|
| azure | CSV `TIMESTAMP, ContextTokens, GeneratedTokens` (Azure LLM inference, 2023 and 2024) |
| burstgpt | CSV `Timestamp, Model, Request tokens, Response tokens, Total tokens, Log Type` |
| mooncake | JSON lines `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (not used) |
| qllm | JSON lines `at_s`, `priority`, `num_prompt_tokens`, `max_tokens`, `name`, `slo` |
| loadgen | one JSON object, `requests` with `t`, `cls`, `prompt_tokens`, `max_tokens` |
"""

import csv
import json
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from qllm.errors import QllmError
from qllm.private import write_private
from qllm.types import Priority, Slo
from qllm.workloads.spec import RequestSpec

Row = Mapping[str, Any]


class WorkloadFileError(QllmError, ValueError):
    """Error: a workload file cannot be read. The message names the file and the line."""


class _Format(NamedTuple):
    columns: tuple[str, ...]
    """Columns that a file of this format must have."""
    spec: Callable[[Row], RequestSpec]


def read_requests(
    path: str | os.PathLike[str],
    *,
    be_share: float | None = None,
    be_where: str | None = None,
    seed: int = 0,
    start_s: float = 0.0,
    seconds: float | None = None,
    rate_scale: float = 1.0,
    limit: int | None = None,
) -> list[RequestSpec]:
    """Read a trace file. The columns determine the format.

    The class of a row comes from `be_where`, or else from `be_share`. Without these, it comes from
    a column `priority` or `cls` ("LS", "BE" or an integer). Without such a column, every request is
    LS. Rows without output (the failed requests of BurstGPT) are skipped. Times count from the
    first row.

    Args:
        path: Path of the file.
        be_share: Part of the requests, in [0, 1], that is BE. A random draw decides for each row.
        be_where: Condition `COLUMN=VALUE`. Rows with this value are BE, the others LS.
        seed: Seed of the draw for `be_share`.
        start_s: Seconds before which arrivals are skipped.
        seconds: Seconds after `start_s`, after which arrivals are skipped.
        rate_scale: Factor on the rate. Times are divided by this factor, after the cut.
        limit: Largest number of requests.

    Raises:
        WorkloadFileError: The file is not a trace of a known format. The message has the line.
    """
    if not rate_scale > 0:
        raise WorkloadFileError(f"rate_scale={rate_scale!r} must be > 0")
    priority_of = _rule(be_share, be_where, seed)
    found = sorted(_specs(Path(path)), key=lambda x: x[2].at_s)
    if not found:
        raise WorkloadFileError(f"{path}: no requests in it")
    first_s = found[0][2].at_s
    out: list[RequestSpec] = []
    for where, row, spec in found:
        priority = priority_of(where, row, spec)
        at_s = spec.at_s - first_s - start_s
        if at_s < 0 or spec.max_tokens == 0:
            continue
        if len(out) == limit or (seconds is not None and at_s >= seconds):
            break
        name = spec.name or f"{_class_name(priority).lower()}-{len(out)}"
        out.append(replace(spec, at_s=at_s / rate_scale, priority=priority, name=name))
    if not out:
        raise WorkloadFileError(f"{path}: no request is left in the part that was asked for")
    return out


def _rule(
    be_share: float | None, be_where: str | None, seed: int
) -> Callable[[str, Row, RequestSpec], int]:
    """Return the function that determines the class of a row."""
    if be_where is not None:
        column, equals, value = be_where.partition("=")
        if not (column and equals):
            raise WorkloadFileError(f"be_where={be_where!r} must be COLUMN=VALUE")

        def by_column(where: str, row: Row, spec: RequestSpec) -> int:
            if column not in row:
                names = ", ".join(map(str, row))
                raise WorkloadFileError(f"{where}: no column {column!r}; there are {names}")
            return Priority.BE if str(row[column]).strip() == value else Priority.LS

        return by_column
    if be_share is not None:
        if not 0 <= be_share <= 1:
            raise WorkloadFileError(f"be_share={be_share!r} must be in [0, 1]")
        rng = random.Random(f"{seed} classes")
        return lambda *_: Priority.BE if rng.random() < be_share else Priority.LS
    return lambda where, row, spec: spec.priority


def write_requests(path: str | os.PathLike[str], requests: Iterable[RequestSpec]) -> None:
    """Write qllm's own format, one JSON object per line. `read_requests` returns the same requests.

    Raises:
        WorkloadFileError: A prompt is streaming, or a request follows another. The format has no
            field for these.
    """
    with write_private(path) as file:
        for r in requests:
            if r.pieces or r.follows is not None:
                raise WorkloadFileError(
                    f"{path}: {r.name} has pieces or follows another request, and the format has "
                    "no field for that; write requests that arrive whole and by themselves"
                )
            line = {
                "at_s": r.at_s,
                "priority": _class_name(r.priority),
                "num_prompt_tokens": r.num_prompt_tokens,
                "max_tokens": r.max_tokens,
                "name": r.name,
            }
            slo = {key: v for key, v in r.slo._asdict().items() if v is not None}
            file.write(json.dumps({**line, **({"slo": slo} if slo else {})}) + "\n")


def _class_name(priority: int) -> str:
    known = {p.value: p.name for p in Priority}
    return known.get(priority, str(priority))


# -- rows


def _specs(path: Path) -> Iterator[tuple[str, Row, RequestSpec]]:
    known: _Format | None = None
    for line, row in _rows(path):
        where = f"{path}:{line}"
        if known is None:
            known = _format(row, where)
        try:
            spec = known.spec(row)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            text = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise WorkloadFileError(f"{where}: {text}") from None
        yield where, row, spec


def _format(row: Row, where: str) -> _Format:
    for known in FORMATS.values():
        if set(known.columns) <= set(row):
            return known
    allowed = "; ".join(f"{name}: {', '.join(f.columns)}" for name, f in FORMATS.items())
    raise WorkloadFileError(
        f"{where}: columns {', '.join(map(str, row))} are of no known format ({allowed})"
    )


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield line numbers and rows of a CSV file, JSON lines or a `loadgen` object."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            start = file.read(1)
            file.seek(0)
            if start == "{":
                yield from _json_rows(path, file)
            else:
                reader = csv.DictReader(file, skipinitialspace=True)
                for row in reader:
                    yield reader.line_num, row
        except UnicodeDecodeError as error:
            raise WorkloadFileError(f"{path}: not a text file ({error.reason})") from None
        except csv.Error as error:
            raise WorkloadFileError(f"{path}:{reader.line_num}: {error}") from None


def _json_rows(path: Path, file: Iterable[str]) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WorkloadFileError(f"{path}:{number}: not JSON ({error})") from None
        if not isinstance(value, dict):
            raise WorkloadFileError(f"{path}:{number}: {value!r} must be a JSON object")
        inner = value.get("requests")
        if number == 1 and isinstance(inner, list):
            yield from ((i, row) for i, row in enumerate(inner, 1))
        else:
            yield number, value


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError(f"time {value!r} must be finite")
    return seconds


def _count(row: Row, column: str, least: int) -> int:
    value = row[column]
    if value is None:
        raise ValueError(f"no value in column {column}")
    number = float(value)
    if number != int(number) or number < least:
        raise ValueError(f"{column}={value!r} must be an integer >= {least}")
    return int(number)


def _priority(value: Any) -> int:
    if value is None:
        return Priority.LS
    text = str(value).strip().upper()
    if text in Priority.__members__:
        return Priority[text]
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"priority {value!r} must be LS, BE or an integer") from None


def _spec(row: Row, at_s: float, prompt: str, output: str, priority: str) -> RequestSpec:
    slo = row.get("slo") or {}
    return RequestSpec(
        at_s=at_s,
        priority=_priority(row.get(priority)),
        num_prompt_tokens=_count(row, prompt, 1),
        max_tokens=_count(row, output, 0),
        name=str(row.get("name") or row.get("id") or ""),
        slo=Slo(**slo),
    )


def _azure(row: Row) -> RequestSpec:
    at = datetime.fromisoformat(str(row["TIMESTAMP"]))
    at_s = (at - datetime(1970, 1, 1, tzinfo=at.tzinfo)).total_seconds()
    return _spec(row, at_s, "ContextTokens", "GeneratedTokens", "priority")


def _burstgpt(row: Row) -> RequestSpec:
    at_s = _seconds(row["Timestamp"])
    return _spec(row, at_s, "Request tokens", "Response tokens", "priority")


def _mooncake(row: Row) -> RequestSpec:
    at_s = _seconds(row["timestamp"]) / 1000
    return _spec(row, at_s, "input_length", "output_length", "priority")


def _own(row: Row) -> RequestSpec:
    return _spec(row, _seconds(row["at_s"]), "num_prompt_tokens", "max_tokens", "priority")


def _loadgen(row: Row) -> RequestSpec:
    return _spec(row, _seconds(row["t"]), "prompt_tokens", "max_tokens", "cls")


FORMATS: dict[str, _Format] = {
    "azure": _Format(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure),
    "burstgpt": _Format(("Timestamp", "Request tokens", "Response tokens"), _burstgpt),
    "mooncake": _Format(("timestamp", "input_length", "output_length"), _mooncake),
    "qllm": _Format(("at_s", "num_prompt_tokens", "max_tokens"), _own),
    "loadgen": _Format(("t", "prompt_tokens", "max_tokens"), _loadgen),
}
"""Known formats, by name."""
