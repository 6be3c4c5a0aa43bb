"""Where engines are placed, and what is lost with a node: several nodes of Ray on this machine."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from clusters import ARGS, EXACT, PORT, long, paused, replicas, states, until
from ray import serve
from ray.cluster_utils import Cluster

import qllm.ray
from qllm.llm import QLLMEngine
from qllm.ray.run import ENVIRONMENT, patiently


@pytest.fixture(scope="module")
def head() -> Iterator[Cluster]:
    """A node that has a place for no engine."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        cluster = patiently(
            lambda: Cluster(initialize_head=True, head_node_args={"num_cpus": 0}), lambda: None
        )
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        yield cluster
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def node_of(process: int) -> int:
    """The process of the node that a worker belongs to: its parent."""
    stat = Path(f"/proc/{process}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def another(head: Cluster, **resources: Any) -> Any:
    """A further node."""
    return patiently(lambda: head.add_node(num_cpus=4, **resources), lambda: None)


def begin(**more: Any) -> None:
    """As `serve.run`, which waits for all replicas; this for the first."""
    args = {**ARGS, "ray.cpus": 1, "ray.min_replicas": 2, "ray.max_replicas": 2, **more}
    application = qllm.ray.app(args)
    threading.Thread(
        target=serve.run, args=(application,), kwargs={"name": "qllm"}, daemon=True
    ).start()
    until(lambda: "qllm" in serve.status().applications and states()["RUNNING"])


def test_engines_are_placed_by_node_and_a_node_that_dies_loses_nothing(head: Cluster) -> None:
    """One engine a node, where there is a resource by a name of ours."""
    another(head)
    first = another(head, resources={"engines": 2})
    begin(**{"ray.per_node": 1, "ray.resources": {"engines": 1}})
    with (
        qllm.ray.connect() as engines,
        QLLMEngine.from_pretrained("tiny", threads=1, exactness=EXACT) as alone,
    ):
        assert states() == {"RUNNING": 1, "STARTING": 1}, "the other waits for a node"
        (there,) = replicas()
        another(head, resources={"engines": 2})
        until(lambda: states()["RUNNING"] == 2 and len(engines.client.engines()) == 2)
        nodes = {node_of(process) for process in replicas()}
        assert len(nodes) == 2
        handles = [paused(engines, seed) for seed in range(4)]
        assert [found["BE"] for found in engines.client.engines()] == [2, 2]
        head.remove_node(first, allow_graceful=False)
        until(lambda: not Path(f"/proc/{there}").exists())
        for handle in handles:
            handle.resume()
        expected = [long(alone, seed).result(timeout=600).token_ids for seed in range(4)]
        assert [handle.result(timeout=600).token_ids for handle in handles] == expected
        until(lambda: there not in replicas())
