"""Load a model and serve it until SIGTERM or SIGINT."""

import asyncio
import signal
import socket
import sys
from functools import partial

from qllm.errors import EngineClosedError
from qllm.llm import QLLMEngine

from .app import create_app
from .config import ServerConfig
from .front import Front
from .run import make_server


def bound_socket(host: str, port: int) -> socket.socket:
    """Take the address before the model is loaded; nobody can connect yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error
    return sock


def make_engine(config: ServerConfig) -> QLLMEngine:
    """Load the model in a process of its own."""
    engine = QLLMEngine.from_pretrained(
        config.model,
        policy=config.policy,
        policy_settings=config.policy_settings,
        dtype=None if config.dtype == "auto" else config.dtype,
        trust_remote_code=config.trust_remote_code,
        threads=config.threads,
        **config.engine,
    )
    if config.hang_s:
        engine.end_if_stuck(config.hang_s)
    return engine


def serve(config: ServerConfig) -> None:
    """Load, listen, serve, drain. Returns when the server has ended.

    Raises:
        ConfigError: A setting is wrong, before anything is loaded where possible.
        EngineClosedError: The engine ended too often.
        OSError: The address cannot be listened on.
    """
    with bound_socket(config.host, config.port) as sock:
        app = create_app(make_engine(config), config, partial(make_engine, config))
        front: Front = app.state.front
        server = make_server(app, config)
        host, port = sock.getsockname()[:2]
        sys.stderr.write(f"qllm: {config.model_name} at http://{host}:{port}\n")
        sys.stderr.flush()
        # uvicorn drains at SIGTERM, then raises it again: by now there is nothing left to end
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            asyncio.run(server.serve(sockets=[sock]))
        finally:
            signal.signal(signal.SIGTERM, before)
            front.engine.close()
        if front.gave_up is not None:
            raise EngineClosedError(front.gave_up)
