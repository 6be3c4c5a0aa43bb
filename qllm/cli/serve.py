"""The command `qllm serve`: the HTTP server."""

import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from qllm.cli.app import (
    FAILED,
    Depth,
    Device,
    ExpertBytes,
    ExpertDir,
    Memory,
    RankHosts,
    Ranks,
    app,
    clean,
    one_line,
    parse_setting,
    quiet,
    split_settings,
)
from qllm.cli.settings import FLAGS, WithServerSettings
from qllm.errors import ConfigError, QllmError, pip_install
from qllm.logs import configured
from qllm.spelling import read_list
from qllm.torchless import forgo_torch

LOG = logging.getLogger("qllm")
OF_RAY = "ray."


@app.command(cls=WithServerSettings)
@clean
def serve(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Argument(help="Alias, folder or hub id.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            help="A further model as [NAME=]MODEL[@DEPTH]; repeat it for more. With --engine: the "
            "address of an engine of a further model."
        ),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(help="all; or engine (also prefill, decode) and frontend, on several hosts."),
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT for front ends and other engines (engine roles).")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of the engine (role frontend); several are a fleet."),
    ] = None,
    route: Annotated[
        str | None,
        typer.Option(
            help="Which engine of a fleet gets a request: class, length, prefix, least, "
            "round-robin, or module:function."
        ),
    ] = None,
    secret_file: Annotated[
        str | None, typer.Option(help="What engine and front end both know.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; repeat it for more.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[str | None, typer.Option(help="0 takes a free one.")] = None,
    policy: Annotated[str | None, typer.Option(help="See `qllm policies`.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    device: Device = None,
    threads: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER|auto",
            help="Threads to compute with; auto takes the cores that this process may use.",
        ),
    ] = None,
    memory: Memory = None,
    tp: Ranks = None,
    tp_hosts: RankHosts = None,
    depth: Depth = None,
    max_expert_bytes: ExpertBytes = None,
    expert_dir: ExpertDir = None,
    state_dir: Annotated[
        str | None,
        typer.Option(help="Folder of batches and kept responses; without one there are none."),
    ] = None,
    api_key_file: Annotated[str | None, typer.Option(help="One API key per line.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that clients must send; repeat it for more. Others on this machine see "
            "flags: prefer --api-key-file or QLLM_API_KEYS."
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code of the checkpoint.")
    ] = False,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="One engine per replica of Ray Serve: `qllm docs guides/ray`."),
    ] = False,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="NAME=VALUE: of the engine, policy.NAME of the policy, ray.NAME of Ray."
        ),
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", help="NAME=VALUE: any setting of the server."),
    ] = None,
) -> None:
    """Serve a model over HTTP, as OpenAI does; SIGTERM drains.

    Settings come from the file, then QLLM_* variables, then flags; the later wins. `qllm docs
    guides/serve` explains them.
    """
    try:
        from qllm.server.config import ENGINE_ROLES, load_config
        from qllm.server.serve import serve as run
        from qllm.server.serve import serve_engine
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs {error.name}: {pip_install('server')}") from error
    of_ray = [text for text in setting or () if text.startswith(OF_RAY)]
    if of_ray and not ray:
        raise ConfigError(f"{of_ray[0]} is a setting of Ray; give --ray too")
    engine_settings, policy_settings = split_settings(
        (text for text in setting or () if text not in of_ray),
        memory=memory,
        tp=tp,
        tp_hosts=tp_hosts,
        depth=depth,
        max_expert_bytes=max_expert_bytes,
        expert_dir=expert_dir,
    )
    named = {
        "model": model,
        "also": _all_of("also", also),
        "role": role,
        "listen": listen,
        "engine_address": engine,
        "route": route,
        "secret_file": secret_file,
        "served_model_name": _all_of("served_model_name", served_model_name),
        "host": host,
        "port": port,
        "policy": policy,
        "dtype": dtype,
        "device": device,
        "threads": threads,
        "state_dir": state_dir,
        "api_key_file": api_key_file,
        "api_keys": ",".join(_all_of("api_keys", api_key) or ()) or None,
        "trust_remote_code": trust_remote_code or None,
        "engine": engine_settings or None,
        "policy_settings": policy_settings or None,
        "ray": dict(parse_setting(text.removeprefix(OF_RAY)) for text in of_ray) if ray else None,
    }
    flags: dict[str, Any] = dict(map(parse_setting, server or ()))
    flags |= ctx.meta.get(FLAGS, {})
    flags |= {name: value for name, value in named.items() if value is not None}
    loaded = load_config(config, os.environ, flags)
    quiet()
    if loaded.ray is not None:
        from qllm.ray import serve as run
    elif loaded.device == "cpu":  # torch reports if there is a GPU
        forgo_torch()
    if loaded.role in ENGINE_ROLES:
        run = serve_engine
    with configured(loaded.log_format):
        try:
            run(loaded)
        except (QllmError, OSError) as error:  # the error is the last line of the log
            LOG.error(one_line(error))
            raise typer.Exit(FAILED) from None


def _all_of(name: str, texts: list[str] | None) -> tuple[str, ...] | None:
    """Return the items of a flag that may be repeated. Each value may be a list of items."""
    return tuple(item for text in texts or () for item in read_list(name, text)) or None
