"""The run of `qllm serve`: load a model and serve it until SIGTERM or SIGINT."""

import asyncio
import logging
import signal
import socket
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from qllm.config import engine_config
from qllm.cores import freeze_garbage, give_memory_back
from qllm.errors import EngineClosedError, QllmError
from qllm.fleet.members import Backoff
from qllm.fleet.models import Named, refuse_same_names
from qllm.ingress.remote.meeting import Meeting, parse_address, read_secret
from qllm.llm import QLLMEngine
from qllm.server.app import Model, create_app
from qllm.server.config import ServerConfig, read_api_keys
from qllm.server.http.keys import read_rules
from qllm.server.http.tls import ssl_context
from qllm.server.ops.banner import banner, warnings
from qllm.server.ops.run import make_server
from qllm.server.ops.supervisor import PERIOD_S, Restarts, given_up
from qllm.server.requests.front import Front
from qllm.server.requests.lossy import entries_of
from qllm.server.tools.choose import check_name
from qllm.several import new_group, refuse_too_large

LOG = logging.getLogger("qllm")


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, before the model loads. It does not listen yet.

    The socket names its protocol, because asyncio sets TCP_NODELAY only on such sockets. Without
    TCP_NODELAY, an answer of two writes (head, body) waits 40 ms for the client's delayed ACK.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error
    return sock


def make_engine(config: ServerConfig, *, takes_digest: bool = False) -> QLLMEngine:
    """Load the model in its own process, or connect to an engine that already has a model.

    Args:
        config: Settings.
        takes_digest: Option of `QLLMEngine.from_pretrained`.
    """
    if config.engine_address is not None:
        fleet: dict[str, Any] = {}
        if config.is_fleet:
            backoff = Backoff(
                config.restart_backoff_s, config.restart_backoff_cap_s, config.restart_window_s
            )
            fleet = {"route": config.route, "max_replays": config.max_replays, "backoff": backoff}
            fleet["rebalance_s"] = config.rebalance_s
        return QLLMEngine.connect(
            config.engine_address,
            **fleet,
            profile=config.profile,
            secret_file=config.secret_file,
            tokenizer=config.model or None,
            trust_remote_code=config.trust_remote_code,
        )
    engine = QLLMEngine.from_pretrained(
        config.model,
        policy=config.policy,
        policy_settings=config.policy_settings,
        dtype=None if config.dtype == "auto" else config.dtype,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        threads=config.threads,
        meeting=_meeting(config),
        takes_digest=takes_digest,
        **config.engine_settings,
    )
    if config.hang_s:
        engine.end_if_stuck(config.hang_s)
    return engine


def make_engines(config: ServerConfig) -> list[Model]:
    """Load the models of a server, or connect to their engines: the first model, then the others.

    If one fails, the engines that were made are closed.

    Raises:
        ConfigError: A setting is wrong, or the models do not fit together in memory. Sizes are
            checked before the first load.
        EngineClosedError: An engine failed, or none answers.
    """
    if config.also and config.role != "frontend" and config.device == "cpu":
        shared = {"shared_cores": new_group(), **config.engine}
        config = config.model_copy(update={"engine": shared})
    configs = [config, *config.further]
    if config.lossy:
        entries_of(configs)  # before the first load
    if config.also and config.role != "frontend":
        refuse_too_large(
            [Named(c.model_name, c.model, c.engine.get("depth")) for c in configs],
            engine_config(config.engine_settings),
            dtype=config.dtype,
            device=config.device,
            trust_remote_code=config.trust_remote_code,
        )
    made: list[Model] = []
    with ExitStack() as opened:
        for own in configs:
            start = time.monotonic()
            engine = make_engine(own)
            opened.callback(engine.close)
            load_s = time.monotonic() - start
            if own.role == "frontend":
                own = _as_the_engine(own, engine)
            make = None
            if engine.fleet is None:
                make = partial(make_engine, _sized_like(own, engine))
            made.append(Model(engine, own, make, load_s))
        refuse_same_names(name for model in made for name in model.config.model_names)
        opened.pop_all()
    return made


def _as_the_engine(config: ServerConfig, engine: QLLMEngine) -> ServerConfig:
    """Return the settings of a front end, with the model and policy of its engine."""
    names = config.served_model_name or (config.model or engine.model_name,)
    policy = str(engine.policy).partition("(")[0]  # the name without parameters
    return config.model_copy(update={"served_model_name": names, "policy": policy})


def _sized_like(config: ServerConfig, engine: QLLMEngine) -> ServerConfig:
    """Return the settings with the sizes that an engine chose.

    So the next engine has the same sizes, and fits every request that the last one accepted.
    """
    sizes = {name: getattr(engine.config, name) for name in engine.client.info.chosen}
    return config.model_copy(update={"engine": {**config.engine, **sizes}})


def _meeting(config: ServerConfig) -> Meeting | None:
    if config.listen is None:
        return None
    address = parse_address(config.listen)
    return Meeting(address, config.profile, read_secret(config.secret_file, address))


def serve_engine(config: ServerConfig) -> None:
    """Load the model and serve front ends of other hosts.

    Returns after SIGTERM or SIGINT and a drain.

    Raises:
        ConfigError: A setting is wrong.
        EngineClosedError: The engine failed too often.
    """
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    start = time.monotonic()
    restarts, engine = Restarts(config), make_engine(config)
    for line in banner(engine, config, time.monotonic() - start):
        LOG.info(line)
    config = _sized_like(config, engine)
    try:
        while not stop.wait(PERIOD_S):
            if (why := engine.failure) is None:
                continue
            engine.close()
            engine = _replaced(config, restarts, stop, why) or engine
        if engine.failure is None:
            engine.drain()
            deadline = time.monotonic() + config.drain_s
            while engine.stats()["num_live"] and time.monotonic() < deadline:
                time.sleep(PERIOD_S)
    except EngineClosedError:
        if not stop.is_set():
            raise
    finally:
        engine.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _replaced(
    config: ServerConfig, restarts: Restarts, stop: threading.Event, why: str
) -> QLLMEngine | None:
    """Return a new engine; None if a signal ends the wait.

    Raises:
        EngineClosedError: The engine failed too often.
    """
    while (wait_s := restarts.wait_s(time.monotonic())) is not None:
        LOG.warning("%s; a new engine will be made in %.1f s", why, wait_s)
        if stop.wait(wait_s):
            return None
        try:
            return make_engine(config)
        except (QllmError, OSError) as error:
            why = f"no new engine could be made: {error}"
    raise EngineClosedError(given_up(why, config))


def serve(config: ServerConfig) -> None:
    """Load, listen, serve and drain. Returns when the server has ended.

    Raises:
        ConfigError: A setting is wrong. Settings are checked before the load where possible.
        EngineClosedError: The engine failed too often.
        OSError: The server cannot listen on the address.
    """
    scheme = "http" if ssl_context(config) is None else "https"
    said = warnings(config, len(read_api_keys(config)) + len(read_rules(config.keys_file)))
    check_name(config.tool_calls)
    with bound_socket(config.host, config.port) as sock:
        for text in said:
            LOG.warning(text)
        first, *others = make_engines(config)
        app = create_app(*first, others)
        front: Front = app.state.front
        server = make_server(app, config)
        for one in front.all:
            one.apart.start()
        freeze_garbage()
        give_memory_back()
        host, port = sock.getsockname()[:2]
        for model in (first, *others):
            for line in banner(model.engine, model.config, model.load_s):
                LOG.info(line)
        for line in () if front.lossy is None else front.lossy.lines():
            LOG.info(line)
        LOG.info("%s at %s://%s:%d", ", ".join(front.names), scheme, host, port)
        # uvicorn drains at SIGTERM, then raises SIGTERM again: by then no request is left
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            asyncio.run(server.serve(sockets=[sock]))
        finally:
            signal.signal(signal.SIGTERM, before)
            for one in front.all:
                one.engine.close()
        if (why := next((x.gave_up for x in front.all if x.gave_up is not None), None)) is not None:
            raise EngineClosedError(why)
