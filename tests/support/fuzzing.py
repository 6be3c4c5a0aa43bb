"""Generated requests against a served engine, each answer checked."""

from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from tests.support.serving import Serving

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]


def fuzz(
    served: Serving, schema: Any, path: str, method: str, mode: GenerationMode, num: int
) -> list[tuple[int, Any]]:
    """Send generated requests, check each answer; return statuses and bodies sent."""
    operation = schema[path][method.upper()]
    seen: list[tuple[int, Any]] = []

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=num,
        deadline=None,
        database=None,
        derandomize=True,
        verbosity=Verbosity.quiet,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: schemathesis.Case) -> None:
        answer = case.call(base_url=served.url, timeout=60)
        seen.append((answer.status_code, case.body))
        case.validate_response(answer, checks=CHECKS)

    check()
    return seen
