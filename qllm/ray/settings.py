"""Settings of an application on Ray: a server's settings and its table `ray`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from qllm.config import engine_config
from qllm.errors import ConfigError
from qllm.fleet.routes import load_route
from qllm.server.config import ServerConfig, load_config
from qllm.spelling import read_all
from qllm.types import Priority

NOT_HERE = ("role", "listen", "engine_address", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
"""Settings of a server that Ray Serve's own proxy, or its handles, replace."""


class RaySettings(BaseModel):
    """The table `ray` of the settings of a server. The string below a field is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_replicas: int = Field(1, ge=0)
    """Least number of engines."""
    max_replicas: int = Field(1, ge=1)
    """Most engines. Equal to `min_replicas`, the number is fixed."""
    route: str = "class"
    """Route of a request to its engine: a name, or `module:function` of yours."""
    cpus: float | None = Field(None, ge=0)
    """CPUs that Ray counts for one replica; by default `threads`, else 1."""
    gpus: float | None = Field(None, ge=0)
    """GPUs per replica; by default 1 for a GPU device, else 0."""
    resources: dict[str, float] = {}
    """Further resources that a node must have, by name."""
    per_node: int | None = Field(None, ge=1)
    """Largest number of replicas on one node; None leaves it to their resources."""
    ls_ttft_ms: float | None = Field(None, gt=0)
    """Target for first tokens of LS, above which replicas are added. By default `ls_slo`."""
    be_tokens: int | None = Field(None, ge=1)
    """BE tokens to be computed per replica, above which replicas are added; None disables this."""
    window_s: float = Field(30.0, gt=0)
    """Seconds over which both are measured."""
    up_after_s: float = Field(10.0, ge=0)
    """Seconds for which more replicas must be needed before they are started."""
    down_after_s: float = Field(300.0, ge=0)
    """Seconds for which fewer replicas must be needed before they are stopped."""
    stats_s: float = Field(1.0, gt=0)
    """Seconds between two reports of replicas' load to routers."""
    health_s: float = Field(5.0, gt=0)
    """Seconds between two health checks of a replica."""

    @field_validator("route")
    @classmethod
    def _known(cls, route: str) -> str:
        load_route(route)
        return route

    @model_validator(mode="after")
    def _ordered(self) -> "RaySettings":
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas={self.max_replicas} must be at least "
                f"min_replicas={self.min_replicas}"
            )
        return self


def settings_of(config: ServerConfig) -> RaySettings:
    """Return the checked table `ray`.

    Raises:
        ConfigError: A name is unknown, a value is not allowed, or a setting belongs to other ways
            to serve.
    """
    wrong = [name for name in NOT_HERE if name in config.model_fields_set]
    if wrong:
        raise ConfigError(f"{wrong[0]} does not go with Ray: its own proxy and handles do that")
    try:
        kinds = {name: field.annotation for name, field in RaySettings.model_fields.items()}
        return RaySettings(**read_all(config.ray or {}, kinds))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(("ray", *map(str, first["loc"])))
        known = ", ".join(RaySettings.model_fields)
        text = f"{where}={first['input']!r:.200}: {first['msg']}; settings: {known}"
        raise ConfigError(text) from None


def config_of(args: Mapping[str, Any], environ: Mapping[str, str]) -> ServerConfig:
    """Return settings from the arguments that `serve run` or a Serve config gives an application.

    Args:
        args: Settings of a server by name, table fields as TABLE.NAME; `config` is a TOML file.
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


def default_target(config: ServerConfig) -> float | None:
    """Return the target of LS requests at an engine with these settings."""
    return engine_config(config.engine).default_slo(Priority.LS).ttft_ms
