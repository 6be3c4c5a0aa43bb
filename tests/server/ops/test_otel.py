from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from qllm import QLLMEngine
from tests.support.serving import serving
from tests.support.waiting import wait_for


def test_requests_are_spans_of_their_callers_trace(
    engine: QLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    with serving(engine) as served:
        for stream in (False, True):
            body = {"prompt": "a", "max_tokens": 3, "stream": stream}
            served.post("/v1/completions", body, headers=headers)

        def spans() -> list[Any]:
            found = exporter.get_finished_spans()
            return [s for s in found if s.name == "POST /v1/completions"]

        wait_for(lambda: len(spans()) == 2)
    for span in spans():
        assert f"{span.context.trace_id:032x}" == trace_id
        assert span.attributes["http.response.status_code"] == 200
