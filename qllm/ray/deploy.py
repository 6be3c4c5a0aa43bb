"""The application for Ray Serve: one deployment of engines, and one that serves HTTP."""

from typing import Any

import ray
from fastapi import FastAPI
from pydantic import SecretStr
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException

from qllm.errors import ConfigError
from qllm.frontend.tokenizer import tokenizer_of
from qllm.ingress.front_end import MAX_OPEN
from qllm.llm import QLLMEngine
from qllm.ray.client import RayClient
from qllm.ray.replica import EngineReplica
from qllm.ray.router import EngineRouter
from qllm.ray.scaling import Scaling
from qllm.ray.settings import RaySettings, default_target, settings_of
from qllm.server.app import create_app
from qllm.server.config import ServerConfig
from qllm.torchless import forgo_torch

ENGINES, HTTP = "engines", "http"
"""Names of the two deployments."""
APP = "qllm"
"""Default name of the application."""
LOGGING = {"enable_access_log": False}
"""Logging of Ray Serve: off, because the server has its own access log."""


class HttpFrontEnd:
    """The HTTP side in front of the engines: the server's own application over a `RayClient`.

    Args:
        config: Settings of the server.
        engines: Handle of the engines' deployment.
    """

    def __init__(self, config: ServerConfig, engines: Any) -> None:
        forgo_torch()
        self._config, self._engines = config, engines

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Connect to the engines, once the first one is running."""
        self._engine = over(self._engines, self._config)
        return create_app(self._engine, self._config)

    def __del__(self) -> None:
        """Close the server. Ray Serve calls this after draining."""
        if (engine := getattr(self, "_engine", None)) is not None:
            engine.close()


def over(engines: Any, config: ServerConfig | None = None) -> QLLMEngine:
    """Return one engine that stands for all engines of a deployment.

    Args:
        engines: Handle of the deployment.
        config: Settings of the server; `max_replays`, `trust_remote_code` and the table `ray`
            count. None is for batch jobs, which wait while there is no replica.
    """
    if config is None:
        client = RayClient(engines)
    else:  # with min_replicas=0, a waiting request makes Ray start a replica
        waits = settings_of(config).min_replicas == 0
        client = RayClient(engines, config.max_replays, waits=waits)
    trusts = config is not None and config.trust_remote_code
    policy = client.hello.trace_meta["policy"]
    tokenizer = tokenizer_of(client, client.hello.model, trusts)
    return QLLMEngine(client, tokenizer, policy)


def build(config: ServerConfig) -> Any:
    """Return the application for `serve.run`.

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
        logging_config=LOGGING,
    )
    target = settings.ls_ttft_ms or default_target(config)
    no_key = SecretStr("")
    without_keys = config.model_copy(
        update={
            "api_keys": no_key,
            "api_key_file": None,
            "keys_file": None,
            "admin_api_key": no_key,
        }
    )
    return front.bind(config, engines.bind(without_keys, target, settings.window_s))


def engine_options(config: ServerConfig, settings: RaySettings) -> dict[str, Any]:
    """Return options of the engines' deployment."""
    cpus = settings.cpus if settings.cpus is not None else config.threads or 1
    gpus = settings.gpus if settings.gpus is not None else float(config.device != "cpu")
    found: dict[str, Any] = {
        "name": ENGINES,
        "max_ongoing_requests": MAX_OPEN,  # the engine's own queues order requests by class
        "ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus, "resources": settings.resources},
        "graceful_shutdown_timeout_s": config.drain_s,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": settings.health_s,
        "logging_config": LOGGING,
        "health_check_timeout_s": max(30.0, 2 * settings.health_s),
        "request_router_config": RequestRouterConfig(
            request_router_class=EngineRouter,
            request_router_kwargs={"route": settings.route},
            request_routing_stats_period_s=settings.stats_s,
        ),
    }
    if settings.per_node is not None:
        found["max_replicas_per_node"] = settings.per_node
    if settings.max_replicas == settings.min_replicas:
        return found | {"num_replicas": settings.min_replicas}
    return found | {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            look_back_period_s=settings.window_s,
            upscale_delay_s=settings.up_after_s,
            downscale_delay_s=settings.down_after_s,
            policy=AutoscalingPolicy(
                policy_function=Scaling, policy_kwargs={"be_tokens_per_replica": settings.be_tokens}
            ),
        )
    }


def connected(name: str) -> QLLMEngine:
    """See `qllm.ray.connect`."""
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise ConfigError(
                "no Ray cluster is found: start an application on this machine (`qllm serve "
                "MODEL --ray`), or name a cluster in RAY_ADDRESS"
            ) from error
    try:
        engines = serve.get_deployment_handle(ENGINES, name)
    except (KeyError, RayServeException) as error:
        raise ConfigError(
            f"no application {name!r} runs: {error}; start one with `serve run`"
        ) from error
    return over(engines)
