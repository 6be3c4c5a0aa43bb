"""The command `qllm rank`: one rank of a model, for an engine on another host."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qllm.cli.app import Threads, app, clean, quiet
from qllm.cores import usable_cores
from qllm.logs import configured

if TYPE_CHECKING:
    from torch import nn

    from qllm.sharded.hosts import Asked


@app.command()
@clean
def rank(
    model: Annotated[str, typer.Argument(help="The model of the engine: alias, folder or hub id.")],
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Address for the engine's --tp-hosts, in a private network."
        ),
    ],
    secret_file: Annotated[
        Path | None, typer.Option(help="File with the engine's secret; loopback needs none.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code of the checkpoint.")
    ] = False,
    threads: Threads = None,
) -> None:
    """Compute a share of each step for an engine on another host; `qllm docs design/sharded`.

    An engine connects, the rank loads its share of the weights, and ends with the engine. Then the
    next engine may connect. Ctrl-C ends the command.
    """
    quiet()
    from qllm.ingress.remote.meeting import parse_address, read_secret
    from qllm.models.loader import load
    from qllm.sharded.host_rank import RankServer

    address = parse_address(listen)
    secret = read_secret(secret_file, address)

    def loaded(asked: "Asked") -> "nn.Module":
        return load(
            model,
            dtype=None if dtype == "auto" else dtype,
            trust_remote_code=trust_remote_code,
            expert_weights=asked.expert_weights,
            tp=asked.size,
            depth=asked.depth,
        ).model

    with (
        configured("text"),
        closing(RankServer(address, secret, loaded, threads or usable_cores())) as server,
    ):
        typer.echo(f"qllm rank: listening at {server.address} for engines that serve {model}")
        server.serve()
