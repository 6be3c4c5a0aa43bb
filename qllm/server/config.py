"""Settings of the server, from a TOML file, the environment and flags; later sources win."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from qllm.config import spelled
from qllm.cores import Threads, num_threads
from qllm.errors import ConfigError, naming
from qllm.fleet.models import AUTO, parse_also, parse_engines, refuse_same_names
from qllm.hints import hint_of
from qllm.plugins import spelled_for
from qllm.spelling import read_all, read_list

PREFIX = "QLLM_"
MIB, GIB = 1 << 20, 1 << 30


class ServerConfig(BaseModel):
    """Settings of one server. File, environment, flags and their help are derived from the fields.

    A file uses the same names; engine and policy settings are its tables `engine` and
    `policy_settings`. In the environment a name is QLLM_ and the name in capitals; tables are JSON.
    `qllm.spelling` parses values given as text. The string below a field is its help.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = ""
    """Alias, folder or hub id. For a front end: its tokenizer, if not where the engine has it."""
    also: tuple[str, ...] = ()
    """Further models, each as [NAME=]MODEL[@DEPTH], or for a front end as [NAME=]ADDRESS. Requests
    name their model (docs/guides/several-engines.md)."""
    auto: bool = False
    """True to let requests name the model "auto": the server then chooses among the models that
    are whole. They need one tokenizer and one chat template (docs/guides/several-engines.md)."""
    lossy: bool = False
    """True to serve requests with `lossy: true` and the model "auto" by models that are cut, as far
    as audits show that few tokens differ. Needs `auto` (docs/guides/depths.md)."""
    max_disagreement: float = Field(0.02, gt=0, lt=1)
    """Most part of the tokens of lossy answers that may differ from the whole model's; audits
    measure it."""
    audit_share: float = Field(0.05, gt=0, le=1)
    """Part of the lossy answers that the whole model reads, as BE, after they were sent."""
    depth_profile: Path | None = None
    """File of `qllm profile --depths` for the first model; by default it is next to the weights.
    """
    served_model_name: tuple[str, ...] = ()
    """Names of the model for clients, one string or several; by default `model`. Answers contain
    the first."""
    role: Literal["all", "engine", "prefill", "decode", "frontend"] = "all"
    """"engine": no HTTP, for front ends of other hosts. "prefill", "decode": such an engine that
    migrates requests after their first token, or receives them. "frontend": HTTP and no weights;
    implied by an `engine_address`."""
    listen: str | None = None
    """HOST:PORT at which an engine meets front ends of other hosts, and other engines."""
    engine_address: str | None = None
    """HOST:PORT of the engine (role "frontend"). Several, separated by commas, are a fleet."""
    route: str = "class"
    """Rule that chooses the engine of a fleet for a request: class, length, prefix, least,
    round-robin, or your own function as module:function (docs/guides/several-engines.md)."""
    rebalance_s: float = Field(5.0, ge=0)
    """Seconds without progress after which a BE request migrates to another engine of the fleet
    that has room. Both need `handover_gib`. 0 disables (docs/guides/several-engines.md)."""
    profile: Literal["tcp", "shm", "rdma"] = "tcp"
    """Transport of the rings between two hosts; the same on both sides."""
    secret_file: Path | None = None
    """File with the secret of engine and front end; needed unless the address is loopback."""
    host: str = "127.0.0.1"
    """Address to listen at. "0.0.0.0" is reachable from other machines."""
    port: int = Field(8000, ge=0, le=65535)
    """TCP port; 0 takes a free one."""
    policy: str = "qllm2"
    """Name of the policy that chooses the next requests; `qllm policies` lists them."""
    policy_settings: dict[str, Any] = {}
    """Settings of the policy."""
    engine: dict[str, Any] = {}
    """Fields of `EngineConfig`."""
    ray: dict[str, Any] | None = None
    """Table of settings to serve on Ray (docs/guides/ray.md); it may be empty."""
    dtype: str = "auto"
    """Type of the weights and of the computation: "auto" (that of the checkpoint), "bfloat16",
    "float16" or "float32"."""
    device: str = "cpu"
    """Device: "cpu", or "cuda" where torch sees a GPU."""
    threads: Threads = None
    """Threads for computing; "auto" is the number of cores that the server may use."""
    trust_remote_code: bool = False
    """True to run modelling code that comes with the checkpoint."""
    state_dir: Path | None = None
    """Folder for batches, their files and stored responses; without it there are none. Only its
    owner may read it."""
    max_key_bytes: int = Field(10 * GIB, ge=1024)
    """Most bytes of files and responses stored for one API key; else 413."""
    state_reserve_bytes: int = Field(64 * MIB, ge=0)
    """Bytes of the disk of `state_dir` that no upload may use, at most a tenth of it; else 507."""
    api_key_file: Path | None = None
    """File with one API key per line; # begins a comment."""
    keys_file: Path | None = None
    """TOML file of API keys with a name, a default class, a best class and a limit each
    (docs/guides/serve.md)."""
    api_keys: SecretStr = SecretStr("")
    """API keys, separated by commas. Meant for the environment: other users can see flags."""
    admin_api_key: SecretStr = SecretStr("")
    """A further API key, the only one allowed to use admin endpoints (`/reset_prefix_cache`)."""
    ssl_certfile: Path | None = None
    """Certificate chain (PEM), which turns on HTTPS. It may also contain the key."""
    ssl_keyfile: Path | None = None
    """Private key of the certificate."""
    ssl_keyfile_password: SecretStr | None = None
    """Password of the key. Meant for the environment."""
    ssl_ca_certs: Path | None = None
    """Certificates of the authorities that check clients' certificates."""
    ssl_cert_reqs: Literal["none", "optional", "required"] = "none"
    """Rule for client certificates: not requested, optional, or required."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server; none by default."""
    max_ls: int = Field(256, ge=1)
    """Most LS requests in flight; more are handled by `ls_overflow`."""
    ls_overflow: Literal["demote", "refuse"] = "demote"
    """Handling of an LS request over the limit: served as BE, which a header reports, or 429."""
    objectives: dict[str, Literal["LS", "BE"]] = {}
    """Classes by the name of an InferenceObjective, which gateways send in a header. For other
    names the request's own class applies."""
    rate_per_minute: int | None = Field(None, ge=1)
    """Most POST and PUT requests of one API key per minute."""
    max_concurrent: int | None = Field(None, ge=1)
    """Most POST and PUT requests of one API key at once."""
    max_choices: int = Field(128, ge=1)
    """Most choices of one request: prompts times n."""
    max_body_bytes: int = Field(4 * MIB, ge=1024)
    """Most bytes in the body of a request, file uploads excepted."""
    max_file_bytes: int = Field(200 * MIB, ge=1024)
    """Most bytes of an uploaded file; else 413."""
    max_header_bytes: int = Field(65536, ge=1024)
    """Most bytes of the headers of a request; else 431."""
    header_timeout_s: float = Field(15, gt=0)
    """Seconds from the connection to its first whole request header."""
    max_open_prompts: int = Field(64, ge=1)
    """Most streaming prompts of one API key; else 429."""
    max_prompt_bytes: int = Field(4 * MIB, ge=1024)
    """Most bytes of a prompt that comes in pieces."""
    prompt_idle_s: float = Field(60, gt=0, le=1e6)
    """Seconds without a piece after which a streaming prompt is abandoned."""
    body_timeout_s: float = Field(30, gt=0)
    """Seconds between two pieces of a body."""
    strict_fields: bool = False
    """True to refuse every field and tool of a request that is not served (400). By default the
    server ignores those that could change the answer, and names them in the header
    `x-qllm-ignored`. It always refuses those that hold the answer."""
    tool_calls: str = "auto"
    """Format in which the model writes tool calls and reasoning: its name (docs/guides/agents.md),
    or auto, which finds it by the chat template and the tokenizer's tokens."""
    tool_ttl_s: float = Field(60, ge=0, le=1e6)
    """Seconds that the KV of an LS conversation with tools stays cached (`cache_ttl_s`), because a
    tool's result comes next; 0 disables."""
    silence_timeout_s: float | None = Field(600, gt=0, le=1e6)
    """Seconds without a token, a first or a further one, after which a request ends with 504. Batch
    lines have no such limit."""
    request_timeout_s: float | None = Field(None, gt=0, le=1e6)
    """Seconds after which a whole request ends with 504; no limit by default."""
    comment_s: float = Field(10, gt=0, le=13)
    """Seconds without a token after which a stream reports its request's state in a comment."""
    stalled_client_s: float = Field(120, gt=0, le=1e6)
    """Seconds in which a stream's client takes no bytes, after which the stream ends."""
    keep_alive_s: int = Field(65, ge=1)
    """Seconds for which an idle connection stays open."""
    shutdown_delay_s: float = Field(3, ge=0, le=3600)
    """Seconds after SIGTERM in which /ready answers 503 and requests are still served, so that load
    balancers stop sending; then the socket closes. SIGINT does not wait."""
    drain_s: int = Field(30, ge=0)
    """Seconds, after the socket closes, in which requests in flight may finish."""
    batch_concurrency: int = Field(8, ge=1)
    """Most batch lines and background responses in the engine at once."""
    max_background: int = Field(1000, ge=1)
    """Most unfinished background responses of one API key; else 429."""
    max_event_streams: int = Field(64, ge=1)
    """Most streams of one API key that read events of background responses; else 429."""
    max_restarts: int = Field(5, ge=0)
    """Most restarts of the engine within `restart_window_s`; then the server ends."""
    restart_window_s: float = Field(600, gt=0)
    """Seconds in which restarts of the engine are counted."""
    restart_backoff_s: float = Field(1, ge=0)
    """Seconds before the first restart; doubled for each further one in the window."""
    restart_backoff_cap_s: float = Field(60, ge=0)
    """Most seconds before a restart."""
    max_replays: int = Field(3, ge=0)
    """Most times that an open request is resubmitted to a new engine after one failed; 0 ends it
    with an error. Batch lines are always retried."""
    hang_s: float = Field(300, ge=0)
    """Seconds without progress after which a busy engine is killed; 0 disables."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log; json has one object per line."""
    access_log: bool = True
    """True for one line per HTTP request: status, id, class, TTFT, tokens."""

    @field_validator("also", "cors_origins", mode="before")
    @classmethod
    def _with_commas(cls, value: Any, info: ValidationInfo) -> Any:
        return read_list(str(info.field_name), value) if isinstance(value, str) else value

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        if not isinstance(value, str | list | tuple):
            return value
        names = read_list("served_model_name", value) if isinstance(value, str) else list(value)
        if not all(isinstance(name, str) and name.strip() for name in names):
            raise ValueError("a name of the model must be a string that is not empty")
        return tuple(dict.fromkeys(name.strip() for name in names))

    @field_validator("threads", mode="before")
    @classmethod
    def _count_threads(cls, value: Any) -> int | None:
        return num_threads(value)

    @property
    def is_fleet(self) -> bool:
        """True if there are several engines."""
        return "," in (self.engine_address or "")

    @property
    def further(self) -> list["ServerConfig"]:
        """The settings of each further model (`also`), with its own name, place and depth."""
        if self.role == "frontend":
            return [
                self.model_copy(
                    update={
                        "also": (),
                        "model": "",
                        "served_model_name": (one.name,) if one.name else (),
                        "engine_address": one.where,
                    }
                )
                for one in parse_engines(self.also)
            ]
        shared = {name: value for name, value in self.engine.items() if name != "depth"}
        return [
            self.model_copy(
                update={
                    "also": (),
                    "model": one.where,
                    "served_model_name": (one.name,),
                    "engine": shared if one.depth is None else {**shared, "depth": one.depth},
                }
            )
            for one in map(parse_also, self.also)
        ]

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names by which clients may request the model."""
        return self.served_model_name or (self.model,)

    @property
    def engine_settings(self) -> dict[str, Any]:
        """Settings of the engine: `engine`, and those that the role implies."""
        if self.role not in ("prefill", "decode"):
            return self.engine
        return {"handover_gib": HANDOVER_GIB, **self.engine, "role": self.role}

    @property
    def model_name(self) -> str:
        """Name of the model in answers and metrics."""
        return self.model_names[0]


def load_config(
    file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]
) -> ServerConfig:
    """Return the settings, merged from the three sources.

    Tables are merged name by name. A setting with empty text counts as absent in that source.

    Args:
        file: Path of a TOML file, or None.
        environ: Environment; names that begin with QLLM_ count.
        flags: Settings from the command line.

    Raises:
        ConfigError: A name is unknown or a value is not allowed.
    """
    merged: dict[str, Any] = {}
    sources: dict[str, Mapping[str, Any]] = {
        f"file {file}": _file(file),
        "environment": _environment(environ),
        "flags": flags,
    }
    for source, values in sources.items():
        _refuse_unknown(source, values)
        for name, value in _read(source, values).items():
            old = merged.get(name)
            both = isinstance(old, dict) and isinstance(value, dict)
            merged[name] = {**old, **value} if both else value  # type: ignore[dict-item]
    if merged.get("policy_settings"):
        policy = merged.get("policy", ServerConfig.model_fields["policy"].default)
        merged["policy_settings"] = spelled_for(policy, merged["policy_settings"])
    if merged.get("engine_address") is not None:
        merged.setdefault("role", "frontend")
    try:
        config = ServerConfig(**merged)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(x) for x in first["loc"])
        shown = "" if "key" in name else f"={first['input']!r:.200}"
        raise ConfigError(f"{name}{shown}: {first['msg']}") from None
    _check_role(config)
    for name in config.engine:
        if name in OWN_FLAGS:
            raise ConfigError(f"{name} is none of the engine's own settings; use --{_flag(name)}")
    if not config.model and config.role != "frontend":
        raise ConfigError("no model: name one on the command line, in QLLM_MODEL or in the file")
    return config


OWN_FLAGS = ("policy", "policy_settings", "dtype", "device", "threads", "trust_remote_code", "role")
"""Engine settings that have a flag of their own in the server."""


def _flag(name: str) -> str:
    return "set policy.NAME=VALUE" if name == "policy_settings" else name.replace("_", "-")


ENGINE_ROLES = ("engine", "prefill", "decode")
ROLE_NEEDS = {"listen": ENGINE_ROLES, "engine_address": ("frontend",)}
"""Addresses, each with the roles that need it; other roles must not have it."""
HANDOVER_GIB = 1.0
"""Default `handover_gib` of engines that prefill or decode."""
OF_FLEETS = ("route", "rebalance_s")
"""Settings that need several engines."""
OF_LOSSY = ("max_disagreement", "audit_share", "depth_profile")
"""Settings that need `lossy`."""
OF_ENGINES = ("policy", "policy_settings", "engine", "dtype", "device", "threads", "hang_s")
"""Settings that do not apply to a front end."""


def _check_role(config: ServerConfig) -> None:
    for name in () if config.is_fleet else OF_FLEETS:
        if name in config.model_fields_set:
            raise ConfigError(
                f"{name}={getattr(config, name)!r} chooses among engines; name several, with "
                "commas between, as engine_address"
            )
    for name, roles in ROLE_NEEDS.items():
        if (config.role in roles) != (getattr(config, name) is not None):
            goes_with = " or ".join(map(repr, roles))
            raise ConfigError(
                f"role={config.role!r} with {name}={getattr(config, name)!r}: {name}=HOST:PORT "
                f"goes with role={goes_with}, and that needs it"
            )
    _check_also(config)
    useless = [name for name in OF_ENGINES if name in config.model_fields_set]
    if config.role == "frontend" and useless:
        raise ConfigError(
            f"{useless[0]} is a setting of the engine; a front end takes the engine as it is"
        )


def _check_also(config: ServerConfig) -> None:
    """Refuse settings that cannot go with several models.

    Raises:
        ConfigError: A model is spelled wrongly, two have one name, or a setting needs one model.
    """
    _check_lossy(config)
    if not config.also:
        if config.auto:
            raise ConfigError("auto=True chooses among models; name further ones as also")
        return
    if config.auto and AUTO in (
        name for one in (config, *config.further) for name in one.model_names
    ):
        raise ConfigError(f"a model cannot be called {AUTO!r} with auto=True; give it another name")
    if config.role in ENGINE_ROLES or config.ray is not None:
        what = "ray" if config.ray is not None else f"role={config.role!r}"
        raise ConfigError(
            f"also={','.join(config.also)} with {what}: an engine serves one model; start one for "
            "each, and give the others' addresses to the front end as also"
        )
    if config.engine.get("kv_dir") is not None:
        raise ConfigError(
            f"kv_dir={config.engine['kv_dir']!r} is the file of one model, and also="
            f"{','.join(config.also)} names more; start engines with role='engine' and a kv_dir "
            "each, and give their addresses to a front end"
        )
    named = [name for one in config.further for name in one.model_names if name]
    refuse_same_names((*(name for name in config.model_names if name), *named))


def _check_lossy(config: ServerConfig) -> None:
    """Refuse settings that cannot go with lossy answers, and theirs without them.

    Raises:
        ConfigError: `lossy` is without what it needs, or one of its settings is without `lossy`.
    """
    if config.lossy and not config.auto:
        raise ConfigError('lossy=True serves requests for the model "auto"; give auto=True too')
    if config.lossy and config.role != "all":
        raise ConfigError(
            f"lossy=True with role={config.role!r}: profiles lie beside the weights, and a front "
            "end has none; serve the models with role='all'"
        )
    if config.lossy and config.max_replays == 0:
        raise ConfigError(
            "lossy=True with max_replays=0: an answer that changes its engine may have to wait for "
            "it, as after a failure; give max_replays of at least 1"
        )
    for name in OF_LOSSY:
        if name in config.model_fields_set and not config.lossy:
            raise ConfigError(f"{name} is a setting of lossy answers; give lossy=True too")


def _refuse_unknown(source: str, values: Mapping[str, Any]) -> None:
    known = list(ServerConfig.model_fields)
    for name in values:
        if name not in known:
            where = (
                f"{PREFIX}{name.upper()} in the environment"
                if source == "environment"
                else (f"{name!r} in the {source}")
            )
            raise ConfigError(
                f"unknown setting {where}{hint_of(name, known)}; known: {', '.join(known)}"
            )


def _file(path: Path | None) -> Mapping[str, Any]:
    if path is None:
        return {}
    try:
        with naming("config", path):
            return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "texts stand in quotes, and true, false and inf in lower case"
        raise ConfigError(f"{path} is not TOML: {error}; {hint}") from error


def _environment(environ: Mapping[str, str]) -> Mapping[str, str]:
    return {
        name.removeprefix(PREFIX).lower(): text
        for name, text in environ.items()
        if name.startswith(PREFIX)
    }


KINDS = {name: field.annotation for name, field in ServerConfig.model_fields.items()}


def _read(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of one source by their types, including those of the table `engine`."""
    try:
        found = read_all(values, KINDS)
        if isinstance(found.get("engine"), dict):
            found["engine"] = spelled(found["engine"])
    except ConfigError as error:
        raise ConfigError(f"{error} (in the {source})") from None
    for table in ("policy_settings", "ray"):  # their types are known once the sources are merged
        if isinstance(found.get(table), dict):
            found[table] = {name: x for name, x in found[table].items() if x != ""}
    return found


def read_api_keys(config: ServerConfig) -> tuple[str, ...]:
    """Return the API keys from file and environment; with none, every caller is allowed.

    Raises:
        ConfigError: The file was named but has no key.
    """
    keys = list(read_list("api_keys", config.api_keys.get_secret_value()))
    if config.api_key_file is not None:
        with naming("api_key_file", config.api_key_file):
            lines = config.api_key_file.read_text().splitlines()
        found = [key for line in lines if (key := line.partition("#")[0].strip())]
        if not found:
            raise ConfigError(f"{config.api_key_file} holds no API key")
        keys += found
    keys.append(config.admin_api_key.get_secret_value().strip())
    return tuple(key for key in keys if key)
