"""The application on an existing cluster, or on a new one of this process: `qllm serve --ray`."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray import serve as ray_serve

from qllm.errors import ConfigError
from qllm.ray.deploy import APP, build
from qllm.server.config import ServerConfig

LOG = logging.getLogger("qllm")
STORE_BYTES = 128 << 20
"""Size of the object store of a cluster that is started here. Requests and tokens are small."""

LOOK_S = 0.2
"""Seconds between two checks of an application that drains."""
START_TRIES = 3
"""Number of tries to start a node of Ray. A node fails after 30 s, a fixed limit. The next try is
faster, because its files are cached."""
ENVIRONMENT = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # 5, after which it kills its proxy: too soon
    "RAY_worker_niceness": "0",  # 15, so on cores that others use too, engines hardly ran
}
"""Environment of a cluster that is started here, unless the caller's environment sets the names."""


def serve(config: ServerConfig) -> None:
    """See `qllm.ray.serve`."""
    if config.port == 0:
        raise ConfigError("port=0 does not go with Ray, whose proxy takes a port by its number")
    application = build(config)
    stop = threading.Event()
    is_ours = start()
    before = {  # only now, because Ray installs handlers of its own, which abort
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        ray_serve.start(http_options={"host": config.host, "port": config.port})
        ray_serve.run(application, name=APP)
        LOG.info("%s at http://%s:%d", config.model_name, config.host, config.port)
        stop.wait()
        drain()
    finally:
        if is_ours:
            ray_serve.shutdown()
            ray.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)


def drain() -> None:
    """Delete the application and wait until its replicas have finished their requests.

    Ray itself would wait only 60 s, whatever `drain_s` is.
    """
    ray_serve.delete(APP, _blocking=False)
    while APP in ray_serve.status().applications:
        time.sleep(LOOK_S)


def start() -> bool:
    """Join a cluster, or start one; return True if this process started the cluster."""
    if ray.is_initialized():
        return False
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError:
        start_here()
        return True
    return False


def start_here(**settings: Any) -> None:
    """Start a cluster in this process.

    Args:
        **settings: Arguments of `ray.init`.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    how = {"include_dashboard": False, "object_store_memory": STORE_BYTES, "log_to_driver": False}
    patiently(lambda: ray.init(**{**how, **settings}), ray.shutdown)


def patiently(begin: Callable[[], Any], undo: Callable[[], Any]) -> Any:
    """Start a node of Ray, and try again if that has failed.

    Args:
        begin: Function that starts the node.
        undo: Function that is called before another try.
    """
    for left in reversed(range(START_TRIES)):
        try:
            return begin()
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise
            undo()
    raise AssertionError("the last try returns or raises")
