"""The application for Ray Serve: one deployment of engines, and one that speaks HTTP."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException

from qllm.config import engine_config
from qllm.errors import ConfigError
from qllm.frontend.tokenizer import tokenizer_of
from qllm.ingress.front_end import MAX_OPEN
from qllm.llm import QLLMEngine
from qllm.server.app import create_app
from qllm.server.config import ServerConfig, load_config
from qllm.torchless import forgo_torch
from qllm.types import Priority

from .client import RayClient
from .replica import EngineReplica
from .router import EngineRouter
from .scaling import Scaling

ENGINES, HTTP = "engines", "http"
"""Names of the two deployments."""
APP = "qllm"
"""Name of the application where none is given."""
NOT_HERE = ("role", "listen", "engine_address", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
"""Settings of a server that Ray Serve's own proxy, or its handles, take the place of."""


class RaySettings(BaseModel):
    """The table `ray` of the settings of a server. The string below a field is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(1, ge=1)
    route: str = "class"
    """How a request finds its engine."""
    cpus: float | None = Field(None, ge=0)
    """CPUs that Ray counts for one replica; by default `threads`, else 1."""
    gpus: float | None = Field(None, ge=0)
    """By default 1 with a device that is none, else 0."""
    resources: dict[str, float] = {}
    """Further ones that a node must have, by name."""
    per_node: int | None = Field(None, ge=1)
    """Most replicas on one node; None leaves it to their resources."""
    ls_ttft_ms: float | None = Field(None, gt=0)
    """Target for first tokens of LS: over it there are to be more replicas. By default `ls_slo`."""
    be_tokens: int | None = Field(None, ge=1)
    """BE tokens to be computed per replica, over which there are to be more; None never."""
    window_s: float = Field(30.0, gt=0)
    """Over which both are looked at."""
    up_after_s: float = Field(10.0, ge=0)
    """For which more must be wanted before there are."""
    down_after_s: float = Field(300.0, ge=0)
    """For which fewer must be."""
    stats_s: float = Field(1.0, gt=0)
    """How often replicas tell routers what they have to do."""
    health_s: float = Field(5.0, gt=0)
    """How often each is asked whether it is well."""

    @model_validator(mode="after")
    def _ordered(self) -> "RaySettings":
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas={self.max_replicas} must be at least "
                f"min_replicas={self.min_replicas}"
            )
        return self


def settings_of(config: ServerConfig) -> RaySettings:
    """The checked table `ray`.

    Raises:
        ConfigError: A name is unknown, a value is not allowed, or something is set that goes with
            other ways to serve.
    """
    wrong = [name for name in NOT_HERE if name in config.model_fields_set]
    if wrong:
        raise ConfigError(f"{wrong[0]} does not go with Ray: its own proxy and handles do that")
    try:
        return RaySettings(**(config.ray or {}))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(("ray", *map(str, first["loc"])))
        known = ", ".join(RaySettings.model_fields)
        text = f"{where}={first['input']!r:.200}: {first['msg']}; settings: {known}"
        raise ConfigError(text) from None


def config_of(args: Mapping[str, Any], environ: Mapping[str, str]) -> ServerConfig:
    """Settings from what `serve run` or a Serve config gives an application.

    Args:
        args: Settings of a server by name, those of a table as TABLE.NAME; `config` is a TOML file.
        environ: The environment.

    Raises:
        ConfigError: A name is unknown or a value is not allowed.
    """
    flags: dict[str, Any] = {"ray": {}}
    for name, value in args.items():
        table, dot, inner = name.partition(".")
        if dot:
            flags.setdefault(table, {})[inner] = value
        elif name != "config":
            flags[name] = value
    file = args.get("config")
    return load_config(None if file is None else Path(file), environ, flags)


class HttpFrontEnd:
    """HTTP in front of the engines: the server's own application over a `RayClient`.

    Args:
        config: Settings.
        engines: Handle of their deployment.
    """

    def __init__(self, config: ServerConfig, engines: Any) -> None:
        forgo_torch()
        self._config, self._engines = config, engines

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Meet the engines, once the first is there."""
        self._engine = over(self._engines, self._config)
        return create_app(self._engine, self._config)

    def check_health(self) -> None:
        """Raise once it cannot serve."""
        self._engine.raise_if_closed()

    def __del__(self) -> None:
        """Called by Ray Serve when it has drained."""
        if (engine := getattr(self, "_engine", None)) is not None:
            engine.close()


def over(engines: Any, config: ServerConfig | None = None) -> QLLMEngine:
    """All engines of a deployment as one.

    Args:
        engines: Its handle.
        config: Settings of the server: of them `max_replays` and `trust_remote_code` count.
    """
    client = RayClient(engines) if config is None else RayClient(engines, config.max_replays)
    trusts = config is not None and config.trust_remote_code
    policy = client.hello.trace_meta["policy"]
    tokenizer = tokenizer_of(client, client.hello.model, trusts)
    return QLLMEngine(client, tokenizer, policy, client.hello.config)


def build(config: ServerConfig) -> Any:
    """The application, for `serve.run`.

    Raises:
        ConfigError: A setting is wrong.
    """
    settings = settings_of(config)
    engines = serve.deployment(EngineReplica).options(**engine_options(config, settings))
    front = serve.deployment(serve.ingress()(HttpFrontEnd)).options(
        name=HTTP,
        num_replicas=1,
        max_ongoing_requests=MAX_OPEN,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.shutdown_delay_s + config.drain_s,
        health_check_period_s=settings.health_s,
    )
    target = settings.ls_ttft_ms or _default_target(config)
    without_keys = config.model_copy(update={"api_keys": SecretStr(""), "api_key_file": None})
    return front.bind(config, engines.bind(without_keys, target, settings.window_s))


def engine_options(config: ServerConfig, settings: RaySettings) -> dict[str, Any]:
    """Options of the engines' deployment."""
    cpus = settings.cpus if settings.cpus is not None else config.threads or 1
    gpus = settings.gpus if settings.gpus is not None else float(config.device != "cpu")
    found: dict[str, Any] = {
        "name": ENGINES,
        "max_ongoing_requests": MAX_OPEN,  # the engine's own queues know classes
        "ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus, "resources": settings.resources},
        "graceful_shutdown_timeout_s": config.drain_s,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": settings.health_s,
        "health_check_timeout_s": max(30.0, 2 * settings.health_s),
        "request_router_config": RequestRouterConfig(
            request_router_class=EngineRouter,
            request_router_kwargs={"route": settings.route},
            request_routing_stats_period_s=ray.stats_s,
        ),
    }
    if settings.per_node is not None:
        found["max_replicas_per_node"] = settings.per_node
    if settings.max_replicas == settings.min_replicas:
        return found | {"num_replicas": settings.min_replicas}
    return found | {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=ray.min_replicas,
            max_replicas=ray.max_replicas,
            look_back_period_s=ray.window_s,
            upscale_delay_s=ray.up_after_s,
            downscale_delay_s=ray.down_after_s,
            policy=AutoscalingPolicy(
                policy_function=Scaling, policy_kwargs={"be_tokens_per_replica": settings.be_tokens}
            ),
        )
    }


def _default_target(config: ServerConfig) -> float | None:
    """The target of LS requests that an engine with these settings has."""
    return engine_config(config.engine).default_slo(Priority.LS).ttft_ms


def connected(name: str) -> QLLMEngine:
    """See `qllm.ray.connect`."""
    ray.init(ignore_reinit_error=True, namespace=None)
    try:
        engines = serve.get_deployment_handle(ENGINES, name)
    except RayServeException as error:
        raise ConfigError(
            f"no application {name!r} runs: {error}; start one with `serve run`"
        ) from error
    return over(engines)
