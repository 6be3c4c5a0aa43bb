"""The class of a request, in each of its names, on every route that answers."""

from typing import Any, get_args

import pytest

from qllm.server.api.protocol import ServiceTier
from tests.support.serving import Serving, bodies

BODIES = bodies(1)
LOW = {"x-qllm-priority": "be"}


def class_of(served: Serving, path: str, headers: dict[str, str], **more: Any) -> str:
    answer = served.post(path, {**BODIES[path], **more}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert "x-qllm-ignored" not in answer.headers
    tier = answer.json()["usage" if path == "/v1/messages" else "service_tier"]
    if path == "/v1/messages":
        tier = tier["service_tier"]
    found = answer.headers["x-qllm-priority"]
    assert (tier in ("flex", "batch")) == (found == "BE")
    return found


@pytest.mark.parametrize("path", BODIES)
def test_a_class_has_the_same_names_on_every_route(served: Serving, path: str) -> None:
    for number in (-7, 0, 1, 5):
        wanted = "LS" if number <= 0 else "BE"
        assert class_of(served, path, {}, priority=number) == wanted
        assert class_of(served, path, {}, priority=number, service_tier="auto") == wanted
        assert class_of(served, path, LOW, priority=number) == "BE"
    tiers = [*get_args(ServiceTier), *(["standard_only"] if path == "/v1/messages" else [])]
    for tier in tiers:
        assert class_of(served, path, {}, service_tier=tier) == ("BE" if tier == "flex" else "LS")
        assert class_of(served, path, LOW, service_tier=tier) == "BE"
    assert class_of(served, path, {"x-qllm-priority": "LS"}, service_tier="flex") == "LS"
    assert class_of(served, path, {}) == "LS"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"priority": 1.5}, "priority"),
        ({"priority": "low"}, "priority"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"service_tier": "flex", "priority": 0}, "different classes"),
        ({"service_tier": "default", "priority": 1}, "different classes"),
    ],
)
def test_a_class_that_is_none_is_refused(
    served: Serving, path: str, fields: dict[str, Any], says: str
) -> None:
    answer = served.post(path, {**BODIES[path], **fields})
    assert (answer.status_code, says in answer.text) == (400, True), answer.text
