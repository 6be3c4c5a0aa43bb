"""The command `qllm upcycle`: a model with experts, made from a dense model."""

import time
from pathlib import Path
from typing import Annotated

import typer

from qllm.cli.app import app, clean, quiet


@app.command()
@clean
def upcycle(
    dense: Annotated[Path, typer.Argument(help="Folder of a dense model, or a .gguf file.")],
    out: Annotated[Path, typer.Argument(help="The new folder.")],
    experts: Annotated[int, typer.Option(help="Copies of each layer's FFN.")] = 8,
    top_k: Annotated[int, typer.Option(help="Experts per token.")] = 2,
    seed: Annotated[int, typer.Option(help="Of routers and noise.")] = 0,
    noise: Annotated[
        float, typer.Option(help="Added to the copies, relative to each matrix's deviation.")
    ] = 0.0,
    train_router: Annotated[
        int, typer.Option(metavar="STEPS", help="Train the routers alone, on --text.")
    ] = 0,
    text: Annotated[Path | None, typer.Option(help="What to train the routers on.")] = None,
    dtype: Annotated[
        str, typer.Option(help="auto (that of the dense model), float32, bfloat16 or float16.")
    ] = "auto",
) -> None:
    """Make a Mixture-of-Experts model from a dense Llama, Mistral, Qwen2 or Qwen3.

    Until noise or training changes it, it answers as the dense model does, up to rounding.
    """
    quiet()
    from qllm.upcycle import train as models

    start = time.monotonic()
    recipe = models.Recipe(
        experts=experts,
        top_k=top_k,
        seed=seed,
        noise=noise,
        dtype=None if dtype == "auto" else dtype,
        train_steps=train_router,
        text=text,
    )
    made = models.upcycle(dense, out, recipe)
    typer.echo(
        f"{made.folder}: {made.architecture}, {experts} experts of which a token takes {top_k}, "
        f"{made.num_parameters / 1e6:,.0f}M parameters, {made.num_bytes / 1e9:.2f} GB, made in "
        f"{time.monotonic() - start:.0f} s"
    )
    if made.training is not None:
        before, after = made.training.busiest
        typer.echo(
            f"routers: {made.training.steps} steps, loss {made.training.losses[0]:.3f} to "
            f"{made.training.losses[-1]:.3f}; the busiest expert of a layer gets {after:.0%} of "
            f"the choices ({before:.0%} before)"
        )
