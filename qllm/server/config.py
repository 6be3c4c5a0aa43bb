"""Settings of the server, from a TOML file, the environment and flags; the later wins."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from qllm.config import spelled
from qllm.cores import Threads, num_threads
from qllm.errors import ConfigError, naming
from qllm.hints import hint_of
from qllm.plugins import spelled_for
from qllm.spelling import read_all, read_list

PREFIX = "QLLM_"
MIB, GIB = 1 << 20, 1 << 30


class ServerConfig(BaseModel):
    """Settings of one server: the file, the environment, the flags and their help are made of it.

    A file has the same names; engine and policy settings are its tables `engine` and
    `policy_settings`. In the environment a name is QLLM_ and the name in capitals; tables are
    JSON. `qllm.spelling` reads what is written as text. The string below a field is its help.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = ""
    """Alias, folder or hub id. Of a front end: where its tokenizer is, if not there too."""
    served_model_name: tuple[str, ...] = ()
    """What clients call the model, a string or several; by default `model`. Answers have the
    first."""
    role: Literal["all", "engine", "prefill", "decode", "frontend"] = "all"
    """"engine": no HTTP, for front ends of other hosts; "prefill", "decode": such an engine that
    hands requests over once they have their first token, or takes them; "frontend": HTTP and no
    weights, which is what it is with an `engine_address`."""
    listen: str | None = None
    """HOST:PORT at which an engine meets front ends of other hosts, and other engines."""
    engine_address: str | None = None
    """HOST:PORT of the engine (role "frontend"). Several with commas between are a fleet."""
    route: str = "class"
    """Which engine of a fleet gets a request: class, length, prefix, least, round-robin, or a
    function of yours as module:function (docs/fleet.md)."""
    rebalance_s: float = Field(5.0, ge=0)
    """Seconds for which a BE request stands still at an engine of a fleet before it goes on at one
    with room, where both have `handover_gib`; 0 leaves it (docs/fleet.md)."""
    profile: Literal["tcp", "shm", "rdma"] = "tcp"
    """What the rings between two hosts go over; the same on both sides."""
    secret_file: Path | None = None
    """Holds the secret that engine and front end share; needed unless the address is loopback."""
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    """0 takes a free one."""
    policy: str = "qllm2"
    policy_settings: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    """Fields of `EngineConfig`."""
    ray: dict[str, Any] | None = None
    """Serve on Ray; a table of its settings (docs/ray.md), which may be empty."""
    dtype: str = "auto"
    device: str = "cpu"
    """"cpu", or "cuda" where torch sees a GPU."""
    threads: Threads = None
    """Threads to compute with; "auto" becomes the cores that the server may use."""
    trust_remote_code: bool = False
    state_dir: Path | None = None
    """Folder of batches, their files and kept responses; without one there are none. Only its
    owner may read it."""
    max_key_bytes: int = Field(10 * GIB, ge=1024)
    """Most bytes of files and responses that one API key keeps; else 413."""
    state_reserve_bytes: int = Field(64 * MIB, ge=0)
    """Bytes of the disk of `state_dir` that no upload may use, at most a tenth of it; else 507."""
    api_key_file: Path | None = None
    """One API key per line; # begins a comment."""
    api_keys: SecretStr = SecretStr("")
    """API keys with commas between. Meant for the environment: flags can be seen by others."""
    admin_api_key: SecretStr = SecretStr("")
    """A further API key, which alone may call what concerns all keys (`/reset_prefix_cache`)."""
    ssl_certfile: Path | None = None
    """Certificate chain (PEM): the server speaks HTTPS. It may hold the key too."""
    ssl_keyfile: Path | None = None
    """Private key of the certificate."""
    ssl_keyfile_password: SecretStr | None = None
    """Password of the key. Meant for the environment."""
    ssl_ca_certs: Path | None = None
    """Certificates of the authorities that clients' certificates are checked with."""
    ssl_cert_reqs: Literal["none", "optional", "required"] = "none"
    """Whether clients need a certificate of their own."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call; none by default."""
    max_ls: int = Field(256, ge=1)
    """Most LS requests in flight; over it see `ls_overflow`."""
    ls_overflow: Literal["demote", "refuse"] = "demote"
    """What becomes of an LS request over the limit: BE (and told so), or 429."""
    objectives: dict[str, Literal["LS", "BE"]] = {}
    """Classes by the name of an InferenceObjective, which gateways send in a header; another name
    leaves the class to the request."""
    rate_per_minute: int | None = Field(None, ge=1)
    """Most POST and PUT requests of one API key per minute."""
    max_concurrent: int | None = Field(None, ge=1)
    """Most POST and PUT requests of one API key at once."""
    max_choices: int = Field(128, ge=1)
    """Most prompts times n of one request."""
    max_body_bytes: int = Field(4 * MIB, ge=1024)
    """Most bytes in the body of a request, file uploads excepted."""
    max_file_bytes: int = Field(200 * MIB, ge=1024)
    max_header_bytes: int = Field(65536, ge=1024)
    header_timeout_s: float = Field(15, gt=0)
    """From the connection to its first whole request header."""
    max_open_prompts: int = Field(64, ge=1)
    """Most prompts of one API key that are still coming; else 429."""
    max_prompt_bytes: int = Field(4 * MIB, ge=1024)
    """Most bytes of a prompt that comes in pieces."""
    prompt_idle_s: float = Field(60, gt=0, le=1e6)
    """A prompt that gets no piece for so long is abandoned."""
    body_timeout_s: float = Field(30, gt=0)
    """Between two pieces of a body."""
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """What becomes of fields and tools of a chat, a response or a message that are not served and
    cannot change the text: ignored, and named in the header `x-qllm-ignored`, or 400."""
    tool_ttl_s: float = Field(60, ge=0, le=1e6)
    """An LS conversation with tools keeps its KV for so long (`cache_ttl_s`): the result of a call
    comes next. 0 does not."""
    silence_timeout_s: float | None = Field(600, gt=0, le=1e6)
    """A request to which no token comes for so long, the first or a further one, ends with 504.
    Batch lines have no such limit."""
    request_timeout_s: float | None = Field(None, gt=0, le=1e6)
    """A request that takes longer than this as a whole ends with 504; none by default."""
    comment_s: float = Field(10, gt=0, le=13)
    """After so long without a token a stream says where its request is, in a comment."""
    stalled_client_s: float = Field(120, gt=0, le=1e6)
    """A stream whose client takes no bytes for so long ends, and gives its seats back."""
    keep_alive_s: int = Field(65, ge=1)
    """For which an idle connection stays open."""
    shutdown_delay_s: float = Field(3, ge=0, le=3600)
    """After SIGTERM: /ready answers 503 for so long while requests are still served, so that load
    balancers look away; then the socket closes. SIGINT does not wait."""
    drain_s: int = Field(30, ge=0)
    """After that: for requests in flight to end by themselves."""
    batch_concurrency: int = Field(8, ge=1)
    """Most batch lines and responses in the background that are in the engine at once."""
    max_background: int = Field(1000, ge=1)
    """Most responses in the background of one API key that are not finished; else 429."""
    max_event_streams: int = Field(64, ge=1)
    """Most streams of one API key that read events of responses in the background; else 429."""
    max_restarts: int = Field(5, ge=0)
    """Most engines made within `restart_window_s` after one that ended; then the server ends."""
    restart_window_s: float = Field(600, gt=0)
    restart_backoff_s: float = Field(1, ge=0)
    """Before the first restart; doubled for each further one in the window."""
    restart_backoff_cap_s: float = Field(60, ge=0)
    """Most that the doubling comes to."""
    max_replays: int = Field(3, ge=0)
    """Most times that an open request goes on with a new engine after one that ended; 0 ends it
    with an error. Batch lines are asked again whatever this says."""
    hang_s: float = Field(300, ge=0)
    """An engine with work that does not come round for so long is killed; 0 never does."""
    log_format: Literal["text", "json"] = "text"
    """json: one object per line."""
    access_log: bool = True
    """One line per HTTP request: status, id, class, TTFT, tokens."""

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _with_commas(cls, value: Any) -> Any:
        return read_list("cors_origins", value) if isinstance(value, str) else value

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
        """Whether there are several engines."""
        return "," in (self.engine_address or "")

    @property
    def model_names(self) -> tuple[str, ...]:
        """All that clients may call the model."""
        return self.served_model_name or (self.model,)

    @property
    def engine_settings(self) -> dict[str, Any]:
        """Settings of the engine: `engine`, and what the role makes of it."""
        if self.role not in ("prefill", "decode"):
            return self.engine
        return {"handover_gib": HANDOVER_GIB, **self.engine, "role": self.role}

    @property
    def model_name(self) -> str:
        """What answers and metrics call the model."""
        return self.model_names[0]


def load_config(
    file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]
) -> ServerConfig:
    """Merge the three sources.

    Args:
        file: TOML, or None.
        environ: The environment; every name that begins with QLLM_ counts.
        flags: Those given on the command line.

    Tables are merged name by name. A setting whose text is empty is not given by that source.

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
"""What `QLLMEngine.from_pretrained` is given from settings of their own."""


def _flag(name: str) -> str:
    return "set policy.NAME=VALUE" if name == "policy_settings" else name.replace("_", "-")


ENGINE_ROLES = ("engine", "prefill", "decode")
ROLE_NEEDS = {"listen": ENGINE_ROLES, "engine_address": ("frontend",)}
"""Addresses, and the roles that make no sense without; no other has them."""
HANDOVER_GIB = 1.0
"""`handover_gib` of engines that prefill or decode, unless it is set."""
OF_FLEETS = ("route", "rebalance_s")
"""Settings that need several engines."""
OF_ENGINES = ("policy", "policy_settings", "engine", "dtype", "device", "threads", "hang_s")
"""Settings that a front end has no use for."""


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
    useless = [name for name in OF_ENGINES if name in config.model_fields_set]
    if config.role == "frontend" and useless:
        raise ConfigError(
            f"{useless[0]} is a setting of the engine; a front end takes the engine as it is"
        )


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
    """The values of one source by their types, those of the table `engine` too."""
    try:
        found = read_all(values, KINDS)
        if isinstance(found.get("engine"), dict):
            found["engine"] = spelled(found["engine"])
    except ConfigError as error:
        raise ConfigError(f"{error} (in the {source})") from None
    for table in ("policy_settings", "ray"):  # theirs are known once the sources are merged
        if isinstance(found.get(table), dict):
            found[table] = {name: x for name, x in found[table].items() if x != ""}
    return found


def read_api_keys(config: ServerConfig) -> tuple[str, ...]:
    """The API keys of file and environment; none means that everybody may call.

    Raises:
        ConfigError: The file holds no key, though it was named.
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
