"""Statistics of several engines merged into those of one."""

from qllm.fleet.stats import FleetStats, merged


def test_statistics_of_several_engines_are_added_up() -> None:
    first = {
        "num_live": 2,
        "longest_segment_ms": 3.0,
        "frames": [1],
        "pid": 7,
        "prefix_cache": {"hits": 1, "file": {"off": None}},
        "longest_segment_kind": "ATTN",
        "is_on": True,
        "ring_use": {"LS": 0.5, "BE": 0.25},
        "time": {"ls_s": 1.0, "min_be_share": 0.1},
        "tier": {"max_pages": 10},
    }
    second = {**first, "num_live": 3, "longest_segment_ms": 2.0, "frames": [2], "pid": 8}
    assert merged([first, second]) == {
        "num_live": 5,
        "longest_segment_ms": 3.0,
        "frames": [1, 2],
        "pid": "several",
        "prefix_cache": {"hits": 2, "file": {"off": None}},
        "longest_segment_kind": "ATTN",
        "is_on": True,
        "ring_use": {"LS": 0.5, "BE": 0.25},
        "time": {"ls_s": 2.0, "min_be_share": 0.1},
        "tier": {"max_pages": 20},
    }
    assert merged([first])["pid"] == 7
    assert merged([first, {"more": 1}])["more"] == 1


def test_an_engine_without_a_number_does_not_hide_that_of_another() -> None:
    known = {"num": 3, "file": {"pages": 2}, "kind": "ATTN", "frames": [1]}
    unknown = dict.fromkeys(known)
    assert merged([known, unknown]) == merged([unknown, known]) == known
    assert merged([unknown, unknown]) == unknown


def test_values_of_different_kinds_are_not_added() -> None:
    assert merged([{"cache": {"off": "fp32"}}, {"cache": 1}]) == {"cache": {"off": "fp32"}}
    assert merged([{"on": True}, {"on": True}]) == {"on": True}


def test_experts_that_an_engine_read_stay_counted_when_it_has_ended() -> None:
    counts = {"loads": 3, "bytes": 30, "waits_ms": 1.5}
    experts = {"resident": 2, "experts": 8, "LS": counts, "blocking": {"loads": 1, "bytes": 5}}
    stats = {"num_preemptions": 0, "preempt_latencies_ms": [], "experts": experts}
    fleet = FleetStats()
    fleet.merged({"a": stats, "b": stats})
    fleet.gone("b")
    assert fleet.merged({"a": stats})["experts"] == {
        "resident": 2,
        "experts": 8,
        "LS": {"loads": 6, "bytes": 60, "waits_ms": 3.0},
        "blocking": {"loads": 2, "bytes": 10},
    }
