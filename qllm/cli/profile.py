"""The command `qllm profile`: the layers at which tokens could leave a model early."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qllm.cli.app import Threads, app, clean, engine_settings, print_table, quiet
from qllm.cli.settings import WithSettings
from qllm.errors import ConfigError
from qllm.types import NS_PER_MS

if TYPE_CHECKING:
    from qllm.measure.profile import Profile


@app.command(cls=WithSettings)
@clean
def profile(
    model: Annotated[str, typer.Argument(help="Alias, folder or hub id; see `qllm models`.")],
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="[NAME=]FILE",
            help="What the model reads; once for each kind of text.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for profile.json and profile.png.")] = Path(
        "qllm-profile"
    ),
    tokens: Annotated[int, typer.Option(min=32, help="Most tokens of each kind of text.")] = 2048,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code of the checkpoint.")
    ] = False,
    threads: Threads = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE: of the engine.")
    ] = None,
) -> None:
    """Measure at which layers tokens could leave the model early, and what drafts would gain."""
    from qllm.config import engine_config
    from qllm.measure.plots import pyplot

    settings = engine_settings(setting)
    config = engine_config(settings)
    config.refuse_apart("a profile")
    quiet()
    pyplot()  # say that it is missing before the model is loaded
    from qllm.measure import profile as measure
    from qllm.measure.profile_figure import profile_figure
    from qllm.measure.profile_texts import read_texts, tokens_of
    from qllm.models.loader import load

    texts = read_texts(text or ())
    _make_folder(out)
    loaded = load(
        model,
        dtype=None if dtype == "auto" else dtype,
        trust_remote_code=trust_remote_code,
        expert_weights=config.expert_weights,
        depth=config.depth,
    )
    prefix, kinds = tokens_of(loaded, texts, tokens)
    for name, kind in kinds.items():
        if len(kind.ids) < kind.num_tokens:
            typer.echo(
                f"{name}: the first {len(kind.ids):,} of {kind.num_tokens:,} tokens are used; "
                "--tokens sets how many",
                err=True,
            )
    ids = {name: kind.ids for name, kind in kinds.items()}
    found = measure.profile(loaded, ids, config, prefix=prefix, threads=threads)
    print_table(HEAD, _rows(found))
    typer.echo(_steps(found))
    typer.echo(
        "last columns: predicted tokens per second with 1, 2, 4 and 8 drafts; without drafts 1"
    )
    for name in ids if len(ids) > 1 and not found.refused else ():
        best = max(found.predictions(name), key=lambda p: p.speedup)
        typer.echo(
            f"{name}: the best is exit:{best.layer} with draft_tokens={best.draft_tokens}, "
            f"predicted {best.speedup:.2f} times the tokens per second"
        )
    typer.echo(_proposal(found, model))
    (out / "profile.json").write_text(json.dumps(found.document(), indent=1) + "\n")
    profile_figure(found, out / "profile.png")
    typer.echo(f"figure     {out / 'profile.png'}\nnumbers    {out / 'profile.json'}")


def _make_folder(out: Path) -> None:
    """Make a folder before the model is loaded, and raise ConfigError if nothing can be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {str(out)!r} is no folder and cannot be made: {error.strerror}; name a folder"
        ) from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {str(out)!r}: nothing can be written there; name another folder")


HEAD = (
    "text", "exit", "agrees", "confidence", "confident", "of these agree", "ms below",
    "1 draft", "2", "4", "8",
)  # fmt: skip


def _rows(found: "Profile") -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table: each kind of text, layer by layer."""
    for text in found.num_tokens:
        predicted = found.predictions(text)
        for e in found.of(text):
            gains = [f"{p.speedup:.2f}" for p in predicted if p.layer == e.layer]
            below_ns = found.times[1].between_ns(0, e.layer)
            sure = e.confident_agreement
            yield (
                text,
                f"{e.layer}",
                f"{e.agreement:.1%}",
                f"{e.confidence:.1%}",
                f"{e.confident:.1%}",
                "-" if sure is None else f"{sure:.1%}",
                f"{below_ns / NS_PER_MS:,.2f}",
                *(gains or "----"),
            )


def _steps(found: "Profile") -> str:
    """Return a line about the time of a step."""
    one = found.times[1]
    layers_ns = one.whole_ns - one.head_ns
    return (
        f"a step of one token after {found.context} others takes {one.whole_ns / NS_PER_MS:.2f} ms:"
        f" {layers_ns / NS_PER_MS:.2f} in {found.num_layers} layers, "
        f"{one.head_ns / NS_PER_MS:.2f} in the head"
    )


def _proposal(found: "Profile", model: str) -> str:
    """Return the proposed setting, or why there is none."""
    best = found.proposal
    if best is None:
        return f"no early exit is proposed: {found.why_none}"
    return (
        f"proposed: qllm serve {model} --set draft=exit:{best.layer} "
        f"--set draft_tokens={best.draft_tokens} (predicted: {best.speedup:.2f} times the tokens "
        "per second of a request that decodes alone)"
    )
