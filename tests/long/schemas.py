"""Accepted JSON schemas, and a check that all whole answers are valid: a table, then one JSON line.

The schemas are those of the JSON Schema Test Suite (draft 2020-12), and objects of two of them, 500
in all. `tiny` answers each accepted one with seeded random tokens; jsonschema-rs checks the answers
that end with `stop`.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema_rs

from bench.common import Table, machine
from qllm import QLLMEngine
from qllm.errors import InvalidRequestError
from qllm.types import FinishReason, SamplingParams, StructuredOutputs

SUITE = Path(__file__).with_name("json_schema_suite.json")
NUM_SCHEMAS = 500
MAX_TOKENS = 120
KEYS_OF_PLACES = ("$ref", "$id", "$anchor", "$dynamicRef", "$defs")
"""Keys with which a schema has another meaning inside another schema."""


class Outcome(NamedTuple):
    """Result of one schema."""

    schema: Any
    refused: str | None
    reason: FinishReason | None = None
    text: str = ""
    wrong: str | None = None
    """Reason why a whole answer is not valid."""


def load_schemas() -> list[Any]:
    """Return the suite's schemas, then pairs of them, always the same."""
    found: list[Any] = json.loads(SUITE.read_text())["schemas"]
    parts = [s for s in found if not any(key in json.dumps(s) for key in KEYS_OF_PLACES)]
    rng = random.Random(0)
    while len(found) < NUM_SCHEMAS:
        one, two = rng.sample(parts, 2)
        found.append(
            {
                "type": "object",
                "properties": {"a": one, "b": two},
                "required": ["a", "b"],
                "additionalProperties": False,
            }
        )
    return found


def ask(engine: QLLMEngine, schemas: Sequence[Any], seed: int = 0) -> list[Outcome]:
    """Let an engine answer with these schemas as grammars."""
    handles: list[Any] = []
    for schema in schemas:
        try:
            text = schema if isinstance(schema, dict) else json.dumps(schema)
            form = StructuredOutputs(json=text)
            sampling = SamplingParams(temperature=1.0, seed=seed, structured_outputs=form)
            handles.append(engine.submit("JSON:", "BE", MAX_TOKENS, sampling=sampling))
        except InvalidRequestError as error:
            handles.append(str(error))
    return [_outcome(*pair) for pair in zip(schemas, handles, strict=True)]


def _outcome(schema: Any, handle: Any) -> Outcome:
    if isinstance(handle, str):
        return Outcome(schema, handle)
    result = handle.result(600)
    if result.finish_reason is not FinishReason.STOP:
        return Outcome(schema, None, result.finish_reason, result.text)
    try:
        value = json.loads(result.text)
        jsonschema_rs.Draft202012Validator(schema).validate(value)
    except (ValueError, jsonschema_rs.ValidationError) as error:
        return Outcome(schema, None, result.finish_reason, result.text, str(error))
    return Outcome(schema, None, result.finish_reason, result.text)


def main() -> None:
    """Ask and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=NUM_SCHEMAS)
    args = parser.parse_args()
    with QLLMEngine.from_pretrained("tiny", conformance=False) as engine:
        found = ask(engine, load_schemas()[: args.schemas])
    taken = [x for x in found if x.refused is None]
    whole = [x for x in taken if x.reason is FinishReason.STOP]
    wrong = [x for x in whole if x.wrong is not None]
    table = Table()
    share = f"{len(taken)} of {len(found)} ({100 * len(taken) / len(found):.0f} %)"
    table.add("schemas taken", share)
    table.add("taken: ended with stop / length", f"{len(whole)} / {len(taken) - len(whole)}")
    valid = f"{len(whole) - len(wrong)} of {len(whole)}"
    table.add("whole answers that are valid", valid, "all", not wrong)
    for x in wrong:
        print(json.dumps(x.schema), repr(x.text), x.wrong)
    why = Counter((x.refused or "").partition(": ")[2][:60] for x in found if x.refused)
    numbers = {"schemas": len(found), "taken": len(taken), "whole": len(whole)}
    print(
        json.dumps(
            {"bench": "schemas", "machine": machine(), **numbers, "wrong": len(wrong)}
            | {"refused": dict(why.most_common())}
        )
    )


if __name__ == "__main__":
    main()
