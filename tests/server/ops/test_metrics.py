import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from qllm.llm import QLLMEngine
from qllm.server.metrics import Metrics
from tests.support.serving import Serving
from tests.support.waiting import wait_for

DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD = DOCS / "grafana.json"
ALERTS = DOCS / "alerts.yaml"
NAMES = re.compile(r"(?:qllm:|qllm_engine_process_|process_)\w+")
IDLE = {
    "num_preemptions": 0,
    "preempt_latencies_ms": [],
    "kv_blocks_used": 1,
    "kv_blocks": 4,
    "longest_segment_ms": 2.5,
    "expert_bytes": 0,
    "frames": [],
}


def samples(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_every_metric_of_the_dashboard_exists_with_its_labels(served: Serving) -> None:
    body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
    before = served.metric("qllm:generation_tokens_total", **{"class": "BE"})
    for priority in (0, 1):
        assert served.post("/v1/completions", {**body, "priority": priority}).status_code == 200
    served.get("/nothing")
    end = before + 3
    wait_for(lambda: served.metric("qllm:generation_tokens_total", **{"class": "BE"}) == end)
    served.front.metrics.batch_line(200)
    count_one_key(served)
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    for status, more in ((200, {}), (400, {"n": "no"})):  # no series before the first of them
        assert served.post("/v1/completions", body | more).status_code == status
    known = samples(served.get("/metrics").text)
    expressions = [
        target["expr"]
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel["targets"]
        if "ALERTS" not in target["expr"]
    ]
    assert len(expressions) > 20
    for expression in expressions:
        names = NAMES.findall(expression)
        assert names, expression
        for name in names:
            assert name in known, name
            labels = known[name][0][0]
            for by in re.findall(r"by \(([^)]*)\)", expression):
                assert set(re.split(r",\s*", by)) <= set(labels), (name, by)
    shown = {name for expression in expressions for name in re.findall(r"qllm:\w+", expression)}
    ends = ("_sum", "_count")
    assert not [name for name in known if name.endswith("_created")], "series of no use"
    ours = {name for name in known if name.startswith("qllm:") and not name.endswith(ends)}
    assert ours == shown, "a metric nobody sees"


def count_one_key(served: Serving) -> None:
    """The counters of keys have no series before a key has asked."""
    metrics = served.front.metrics
    metrics.of_key("0123456789abcdef", 200)
    result = served.front.engine.submit("a", max_tokens=1).result(300)
    metrics.tokens_of_key("0123456789abcdef", result)


def test_alerts_ask_for_metrics_that_exist(served: Serving) -> None:
    count_one_key(served)
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    for status, more in ((200, {}), (400, {"n": "no"})):  # no series before the first of them
        assert served.post("/v1/completions", body | more).status_code == status
    known = samples(served.get("/metrics").text)
    rules = [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]
    assert len(rules) > 5
    for rule in rules:
        assert {"alert", "expr", "for", "labels", "annotations"} >= set(rule), rule
        assert "summary" in rule["annotations"]
        names = NAMES.findall(rule["expr"])
        assert names, rule
        for name in names:
            assert name in known, name
            for label in re.findall(r"(\w+)=", rule["expr"].partition("{")[2]):
                assert label in known[name][0][0], (name, label)


def test_experts_of_a_file_are_counted_by_class() -> None:
    """Two engines in turn add up. An engine with all experts in memory has no file."""
    metrics = Metrics("m")
    zero = {"loads": 0, "bytes": 0, "waits_ms": 0}

    def look(experts: dict[str, Any]) -> dict[str, Any]:
        metrics.observe({**IDLE, "experts": experts}, {})
        return samples(metrics.render().decode())

    known = look({})
    assert known["qllm:experts_resident_perc"][0][1] == 1
    assert {value for _, value in known["qllm:expert_loads_total"]} == {0}
    first = {
        "resident": 3, "experts": 12, "waiting": 2, "blocking": {"loads": 7, "bytes": 70},
        "ahead": {"loads": 5, "bytes": 50, "unused_bytes": 10},
        "LS": {"loads": 1, "bytes": 10, "waits_ms": 2000.0},
        "BE": {"loads": 3, "bytes": 30, "waits_ms": 500.0},
    }  # fmt: skip
    for _ in range(2):
        known = look(first)
    assert known["qllm:experts_resident_perc"][0][1] == 0.25
    assert known["qllm:num_frames_waiting_for_experts"][0][1] == 2
    known = look(first | {"LS": zero | {"loads": 1, "bytes": 10}, "BE": zero, "waiting": 0})
    assert known["qllm:num_frames_waiting_for_experts"][0][1] == 0
    of_class = {
        name: {labels["class"]: value for labels, value in known[f"qllm:expert_{name}_total"]}
        for name in ("loads", "loaded_bytes", "wait_seconds")
    }
    assert of_class == {
        "loads": {"LS": 1, "BE": 3},
        "loaded_bytes": {"LS": 10, "BE": 30},
        "wait_seconds": {"LS": 2, "BE": 0.5},
    }
    assert known["qllm:expert_blocking_loads_total"][0][1] == 7
    assert known["qllm:expert_blocking_bytes_total"][0][1] == 70
    assert known["qllm:expert_ahead_loads_total"][0][1] == 5
    assert known["qllm:expert_ahead_unused_bytes_total"][0][1] == 10
    assert look({"LS": {"loads": 1, "bytes": 1, "waits_ms": 0}})  # left by engines of a fleet


def test_latencies_are_the_engines(served: Serving, engine: QLLMEngine) -> None:
    def count(name: str) -> float:
        return served.metric(f"qllm:{name}_count", **{"class": "LS"})

    def total(name: str) -> float:
        return served.metric(f"qllm:{name}_sum", **{"class": "LS"})

    names = ("time_to_first_token_seconds", "inter_token_latency_seconds",
             "e2e_request_latency_seconds")  # fmt: skip
    before = {name: (count(name), total(name)) for name in names}
    body = {"prompt": "a", "max_tokens": 9, "ignore_eos": True}
    served.post("/v1/completions", body)
    wait_for(lambda: count(names[2]) == before[names[2]][0] + 1)
    new = {name: (count(name) - before[name][0], total(name) - before[name][1]) for name in names}
    assert [new[name][0] for name in names] == [1, 8, 1]
    first, gaps, whole = (new[name][1] for name in names)
    assert whole == pytest.approx(first + gaps, abs=1e-6)
    assert 0 < first < whole < 30


def test_a_preempted_request_is_seen(served: Serving, engine: QLLMEngine) -> None:
    before = served.metric("qllm:preemptions_total")
    ids = list(range(100, 3000))
    with served.client() as client:
        for _ in range(200):  # until one comes while the long prompt is computed
            flex = client.completions.create(
                model="tiny", prompt=ids, max_tokens=1, stream=True,
                extra_body={"service_tier": "flex"},
            )  # fmt: skip
            client.completions.create(model="tiny", prompt="a", max_tokens=1)
            list(flex)
            if new := served.metric("qllm:preemptions_total") - before:
                break
    assert new
    wait_for(lambda: served.metric("qllm:request_preemptions_total", **{"class": "BE"}) > 0)
    assert served.metric("qllm:preempt_latency_seconds_count") == before + new


def test_what_runs_now(served: Serving) -> None:
    with served.client() as client:
        stream = client.completions.create(
            model="tiny", prompt="x", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        assert served.metric("qllm:num_requests_running", **{"class": "LS"}) == 1
        assert served.metric("qllm:kv_cache_usage_perc") > 0
        stream.close()
    wait_for(lambda: served.metric("qllm:num_requests_running", **{"class": "LS"}) == 0)
    wait_for(lambda: served.metric("qllm:kv_cache_usage_perc") == 0)


def test_a_preemption_is_counted_once_however_often_it_is_scraped() -> None:
    metrics = Metrics("m")
    stats = {**IDLE, "num_preemptions": 3, "preempt_latencies_ms": [1.0, 2.0, 3.0]}
    for _ in range(3):
        metrics.observe(stats, {("LS", "running"): 2})
    # the engine keeps only the last latencies: what it has forgotten is counted all the same
    metrics.observe({**stats, "num_preemptions": 7, "preempt_latencies_ms": [8.0, 9.0]}, {})
    known = samples(metrics.render().decode())
    assert known["qllm:preemptions_total"] == [({"model_name": "m"}, 7)]
    assert known["qllm:preempt_latency_seconds_count"] == [({"model_name": "m"}, 5)]
    assert known["qllm:preempt_latency_seconds_sum"][0][1] == pytest.approx(0.023)
    assert known["qllm:kv_cache_usage_perc"][0][1] == 0.25
    assert {value for _, value in known["qllm:num_requests_running"]} == {0}


def test_what_outlives_its_row_is_counted() -> None:
    """Passes that were spared, KV that moved, the prefix cache, its file; two engines in turn."""
    metrics = Metrics("m")
    file = {
        "off": None, "stored_bytes": 5, "loaded_bytes": 6, "damaged_pages": 7, "late_requests": 8,
        "kept_bytes": 9,
    }  # fmt: skip
    cache = {
        "queried_tokens": 10, "hit_tokens": 11, "evicted_pages": 12, "refused_pages": 13,
        "kept_tokens": 14, "kept_bytes": 15, "kept_state_bytes": 16, "file": file,
    }  # fmt: skip
    stats = {
        **IDLE, "num_preemptions": 1, "num_spared": 2, "swap": {"out_tokens": 3, "in_tokens": 4},
        "prefix_cache": cache,
    }  # fmt: skip
    for _ in range(2):
        metrics.observe(stats, {})
    metrics.observe({**IDLE, "num_spared": 1, "swap": {"out_tokens": 1, "in_tokens": 1}}, {})
    known = samples(metrics.render().decode())
    wanted = {
        "preemptions_spared_total": 3, "kv_swapped_out_tokens_total": 4,
        "kv_swapped_in_tokens_total": 5, "kv_file_stored_bytes_total": 5,
        "kv_file_loaded_bytes_total": 6, "kv_file_damaged_pages_total": 7,
        "kv_file_late_requests_total": 8, "prefix_cache_queried_tokens_total": 10,
        "prefix_cache_hit_tokens_total": 11, "prefix_cache_evicted_pages_total": 12,
        "prefix_cache_refused_pages_total": 13, "kv_file_up": 0, "kv_file_kept_bytes": 0,
        "prefix_cache_kept_tokens": 0,
    }  # fmt: skip
    assert {name: known[f"qllm:{name}"][0][1] for name in wanted} == wanted
    metrics.observe(stats, {})
    known = samples(metrics.render().decode())
    gauges = {
        "kv_file_up": 1, "kv_file_kept_bytes": 9, "prefix_cache_kept_tokens": 14,
        "prefix_cache_kept_bytes": 15, "prefix_cache_kept_state_bytes": 16,
    }  # fmt: skip
    assert {name: known[f"qllm:{name}"][0][1] for name in gauges} == gauges


def test_a_new_engine_counts_from_nothing_again() -> None:
    metrics = Metrics("m")
    parked, running = {"state": "parked", "bytes": 7}, {"state": "running", "bytes": 9}
    for count, frames in ((5, [parked, parked]), (2, [running, parked])):
        latencies = [1.0] * count
        metrics.observe(
            {**IDLE, "num_preemptions": count, "preempt_latencies_ms": latencies,
             "expert_bytes": 100 * count, "frames": frames, "ring_use": {"LS": 0.25, "BE": 0.5}},
            {},
        )  # fmt: skip
    known = samples(metrics.render().decode())
    assert known["qllm:preemptions_total"][0][1] == 7
    assert known["qllm:preempt_latency_seconds_count"][0][1] == 7
    assert known["qllm:expert_bytes_read_total"][0][1] == 700
    assert known["qllm:num_frames_parked"][0][1] == 1
    assert known["qllm:frames_parked_bytes"][0][1] == 7
    assert {labels["class"]: value for labels, value in known["qllm:request_ring_usage_perc"]} == {
        "LS": 0.25, "BE": 0.5,
    }  # fmt: skip
