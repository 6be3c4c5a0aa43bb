"""What routers and the autoscaler are told of a replica, and how many replicas that asks for."""

import json
import pickle
import random
from types import SimpleNamespace
from typing import Any

import pytest

from qllm.errors import ConfigError
from qllm.fleet.routes import Backlog
from qllm.ray.load import ReplicaLoad, added, be_tokens, front_end_of
from qllm.ray.scaling import BE_TOKENS, LATENESS, Scaling, wanted
from qllm.ray.settings import RaySettings, config_of, default_target, settings_of
from qllm.ray.wire import Ask, Local
from qllm.types import Priority, Slo

MS = 1_000_000
LS, BE = int(Priority.LS), int(Priority.BE)


def opened(load: ReplicaLoad, key: str, priority: int = LS, at_ns: int = 0, **slo: float) -> None:
    load.opened(key, priority, at_ns, Slo(**slo), 100, 10)


def test_a_request_is_counted_from_its_arrival_to_its_end() -> None:
    load = ReplicaLoad()
    opened(load, "a-1")
    opened(load, "a-2", BE)
    opened(load, "b-1", BE)
    assert load.counts() == {
        "a": [(1, 1, 100, 10), (1, 1, 100, 10)],
        "b": [(0, 0, 0, 0), (1, 1, 100, 10)],
    }
    load.token("a-1", 5)
    load.token("a-1", 6)
    assert load.counts()["a"][0] == (1, 0, 0, 8)
    load.changed("a-1", BE)
    assert load.counts()["a"] == [(0, 0, 0, 0), (2, 1, 100, 18)]
    for key in ("a-1", "a-2", "a-2", "b-1"):
        load.closed(key)
    assert load.counts() == {}


def test_what_is_unknown_changes_nothing() -> None:
    load = ReplicaLoad()
    load.token("a-1", 1)
    load.changed("a-1", BE)
    load.closed("a-1")
    assert load.counts() == {}


def test_counts_stay_those_of_the_open_requests_whatever_happens() -> None:
    rng, load, model = random.Random(0), ReplicaLoad(), {}
    for number in range(2000):
        key = f"{rng.choice('xyz')}-{number}"
        opened(load, key, rng.choice((LS, BE)))
        model[key] = key
        some = rng.choice(list(model))
        match rng.randrange(3):
            case 0:
                load.token(some, number)
            case 1:
                load.changed(some, rng.choice((LS, BE)))
            case _:
                load.closed(some)
                del model[some]
    both = added(load.counts())
    assert both[0].num + both[1].num == len(model)
    for key in list(model):
        load.closed(key)
    assert load.counts() == {}


def test_backlogs_are_added_without_those_of_some_front_ends() -> None:
    load = ReplicaLoad()
    opened(load, "a-1")
    opened(load, "b-1", BE)
    opened(load, "c-2", BE)
    load.token("c-2", 1)
    told = json.loads(json.dumps(load.counts()))
    assert added(told) == (Backlog(1, 1, 100, 10), Backlog(2, 1, 100, 19))
    assert added(told, without={"a", "c"}) == (Backlog(), Backlog(1, 1, 100, 10))
    assert added({}) == (Backlog(), Backlog())
    assert be_tokens(told) == 119
    assert front_end_of("a-b-7") == "a-b"


def test_lateness_is_the_90th_percentile_of_ls_over_target() -> None:
    load = ReplicaLoad(ttft_ms=100.0)
    for number in range(10):
        opened(load, f"a-{number}")
        load.token(f"a-{number}", (number + 1) * 20 * MS)
        load.token(f"a-{number}", 10**9)  # a later token is no first one
    for number in range(10):
        opened(load, f"a-be-{number}", BE)
        load.token(f"a-be-{number}", 10**9)
    assert load.lateness(MS) == pytest.approx(1.8)


def test_a_target_of_its_own_counts_and_without_one_nothing_does() -> None:
    load = ReplicaLoad()
    opened(load, "a-1")
    load.token("a-1", 500 * MS)
    assert load.lateness(500 * MS) == 0.0
    opened(load, "a-2", ttft_ms=50.0)
    load.token("a-2", 100 * MS)
    assert load.lateness(500 * MS) == 2.0


def test_first_tokens_are_forgotten_after_the_window() -> None:
    load = ReplicaLoad(ttft_ms=100.0, window_s=1.0)
    opened(load, "a-1")
    load.token("a-1", 300 * MS)
    assert load.lateness(1_300 * MS) == 3.0
    assert load.lateness(1_301 * MS) == 0.0


def test_a_request_that_had_its_first_token_elsewhere_is_not_late() -> None:
    load = ReplicaLoad(ttft_ms=100.0)
    load.opened("a-1", LS, 0, Slo(), 100, 10, is_moved=True)
    assert load.lateness(900 * MS) == 0.0
    load.token("a-1", 900 * MS)
    assert load.lateness(900 * MS) == 0.0


def test_who_still_waits_counts_once_it_is_late() -> None:
    load = ReplicaLoad(ttft_ms=100.0)
    opened(load, "a-1")
    assert load.lateness(100 * MS) == 0.0
    assert load.lateness(400 * MS) == 4.0
    load.closed("a-1")
    assert load.lateness(400 * MS) == 0.0


@pytest.mark.parametrize(
    ("now", "late", "backlog", "per_replica", "expected"),
    [
        (2, [0.2, 0.9], [0, 0], None, 2),  # in time
        (2, [0.2, 1.01], [0, 0], None, 3),  # one is late: one more at least
        (4, [1.5], [0], None, 6),
        (4, [9.0], [0], None, 8),  # at most twice
        (3, [0.4, 0.1], [0], None, 2),  # one may go
        (1, [0.0], [10**9], None, 0),  # BE work alone is no reason
        (1, [0.0], [2500], 1000, 3),
        (5, [0.0], [2500], 1000, 4),  # LS lets one go, BE needs three
        (3, [0.0], [2500], 1000, 3),
        (2, [1.2], [9000], 1000, 9),  # who asks for more
    ],
)
def test_replicas_wanted(
    now: int, late: list[float], backlog: list[float], per_replica: int | None, expected: int
) -> None:
    assert wanted(now, late, backlog, per_replica) == expected


def test_the_policy_reads_what_replicas_report() -> None:
    def context(**metrics: Any) -> Any:
        return SimpleNamespace(target_num_replicas=2, aggregated_metrics=metrics)

    policy = Scaling(be_tokens_per_replica=100)
    late = {LATENESS: {"r1": 0.7, "r2": 3.0}, BE_TOKENS: {"r1": 0.0, "r2": 50.0}}
    assert policy(context(**late)) == (4, {})
    backlog = {LATENESS: {"r1": 0.0}, BE_TOKENS: {"r1": 700.0}}
    assert policy(context(**backlog)) == (7, {})
    assert policy(context()) == (2, {})  # nothing is known: as it is


def test_where_there_is_no_replica_a_request_that_waits_brings_one() -> None:
    def context(target: int, waiting: float) -> Any:
        return SimpleNamespace(
            target_num_replicas=target, aggregated_metrics={}, total_num_requests=waiting
        )

    policy = Scaling()
    assert policy(context(0, 0.0)) == (0, {})
    assert policy(context(0, 0.3)) == (1, {})
    assert policy(context(2, 9.0)) == (2, {}), "they have not reported yet"


def test_an_ask_leaves_what_is_local_behind() -> None:
    ask = Ask("a-1", "x", 3, b"body", local=Local(item=None))  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(ask)) == Ask("a-1", "x", 3, b"body")


# -- settings


def test_settings_come_by_name_as_serve_run_gives_them(tmp_path: Any) -> None:
    file = tmp_path / "qllm.toml"
    file.write_text('model = "tiny"\nthreads = 2\n[ray]\nroute = "least"\nmax_replicas = 2\n')
    args = {"config": str(file), "threads": "1", "ray.max_replicas": "3", "engine.max_num_seqs": 4}
    config = config_of(args, {"QLLM_MAX_LS": "9"})
    assert (config.model, config.threads, config.max_ls) == ("tiny", 1, 9)
    assert config.engine == {"max_num_seqs": 4}
    settings = settings_of(config)
    assert (settings.route, settings.min_replicas, settings.max_replicas) == ("least", 1, 3)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"ray.replicas": 2}, "ray.replicas=2: Extra inputs.*settings: min_replicas, max_replicas"),
        ({"ray.max_replicas": 0}, "ray.max_replicas=0: .*greater than or equal to 1"),
        ({"ray.min_replicas": 3, "ray.max_replicas": 2}, "max_replicas=2 must be at least"),
        ({"ray.route": "nearest"}, "route='nearest' is unknown; use one of class"),
        ({"ray.ls_ttft_ms": 0}, "ray.ls_ttft_ms=0"),
        ({"ssl_certfile": "x.pem"}, "ssl_certfile does not go with Ray"),
        ({"role": "engine", "listen": "127.0.0.1:1"}, "role does not go with Ray"),
    ],
)
def test_wrong_settings_are_refused(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_of(config_of({"model": "tiny", **args}, {}))


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'modle'"):
        config_of({"modle": "tiny"}, {})


def test_the_target_is_that_of_the_engine() -> None:
    slo = {"model": "tiny", "engine.ls_slo": "ttft=500ms,tpot=100ms"}
    assert default_target(config_of(slo, {})) == 500.0
    assert default_target(config_of({"model": "tiny"}, {})) is None


def test_without_replicas_of_its_own_an_application_has_one() -> None:
    assert (RaySettings().min_replicas, RaySettings().max_replicas) == (1, 1)
