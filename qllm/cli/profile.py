"""The command `qllm profile`: the layers at which tokens could leave a model early, and depths."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qllm.cli.app import Memory, Threads, app, clean, engine_settings, print_table, quiet
from qllm.cli.settings import WithSettings
from qllm.errors import ConfigError, shown
from qllm.types import NS_PER_MS

if TYPE_CHECKING:
    from qllm.config import EngineConfig
    from qllm.measure.profile import Profile
    from qllm.models.depth_profile import DepthProfile


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
    depths: Annotated[
        bool,
        typer.Option(
            "--depths",
            help="Instead: measure the model cut at several depths, and write a file beside its "
            "weights. Texts of the package are the default.",
        ),
    ] = False,
    candidates: Annotated[
        str | None,
        typer.Option(metavar="E,E", help="With --depths: the depths, in place of about eight."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="With --depths: another place of the file.")
    ] = None,
    memory: Memory = None,
) -> None:
    """Measure at which layers tokens could leave the model early, and what drafts would gain."""
    from qllm.config import engine_config

    settings = engine_settings([*(setting or ()), *([f"memory={memory}"] if memory else ())])
    config = engine_config(settings)
    config.refuse_apart("a profile")
    how: dict[str, Any] = {
        "dtype": None if dtype == "auto" else dtype,
        "trust_remote_code": trust_remote_code,
    }
    if depths:
        named = None if candidates is None else _numbers(candidates)
        _depths(model, text, config, settings, output, named, tokens, threads, how)
        return
    if candidates is not None or output is not None:
        raise ConfigError("--candidates and --output go with --depths; add --depths")
    from qllm.measure.plots import pyplot

    quiet()
    pyplot()  # say that it is missing before the model is loaded
    from qllm.measure import profile as measure
    from qllm.measure.profile_figure import profile_figure
    from qllm.measure.profile_texts import read_texts, tokens_of
    from qllm.models.loader import load

    texts = read_texts(text or ())
    _make_folder(out)
    loaded = load(model, expert_weights=config.expert_weights, depth=config.depth, **how)
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


def _numbers(text: str) -> list[int]:
    """Return numbers with commas between.

    Raises:
        ConfigError: One is no number.
    """
    found = [one.strip() for one in text.split(",")]
    if not all(one.isdecimal() for one in found):
        raise ConfigError(
            f"--candidates {shown(text)} must be depths with commas between, like 2,4,6"
        )
    return [int(one) for one in found]


def _depths(
    model: str,
    text: list[str] | None,
    config: "EngineConfig",
    settings: dict[str, Any],
    output: Path | None,
    named: list[int] | None,
    tokens: int,
    threads: int | None,
    how: dict[str, Any],
) -> None:
    """Measure a model at several depths, print them, and write the file."""
    if config.depth is not None:
        raise ConfigError(
            f"depth={config.depth}: a profile of depths measures each of them; leave depth out, or "
            "name depths with --candidates"
        )
    quiet()
    from qllm.measure.depths import default_texts, profile_depths
    from qllm.measure.profile_texts import read_texts
    from qllm.models.depth_profile import place_of, require_writable, write

    texts = read_texts(text) if text else default_texts()
    place = output or place_of(model)
    require_writable(place)
    found = profile_depths(
        model, texts, config, settings, named=named, tokens=tokens, threads=threads, **how
    )
    kinds = tuple(found.depths[0].agreement)
    print_table(("depth", "agrees", *kinds, *OF_BINS), _depth_answers(found))
    served = (
        "depth", "tokens/s alone", f"{found.batch} together", "of a prompt", "weights, MiB",
        "KV tokens",
    )  # fmt: skip
    print_table(served, _depth_speeds(found))
    typer.echo(
        "agreement: part of the positions at which this depth would choose the token of the whole "
        "model; confident: largest probability of 0.9 or "
        "more; low: confidence below which most tokens differ; tokens/s: of one request, and of "
        f"{found.batch} together. Other texts have other numbers."
    )
    write(found, place)
    typer.echo(f"numbers    {place}")


MIB = 1 << 20
OF_BINS = ("confident", "of these agree", "low")
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


def _depth_answers(found: "DepthProfile") -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of answers."""
    from qllm.measure.profile import CONFIDENT
    from qllm.models.depth_profile import EDGES

    for one in found.depths:
        sure = one.bins[EDGES.index(CONFIDENT) :]
        num, agreed = sum(x.num for x in sure), sum(x.agreed for x in sure)
        yield (
            f"{one.depth} of {found.layers}",
            f"{one.agreed:.1%}",
            *(f"{share:.1%}" for share in one.agreement.values()),
            f"{num / one.num:.1%}",
            f"{agreed / num:.1%}" if num else "-",
            f"{one.low:g}",
        )


def _depth_speeds(found: "DepthProfile") -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of speeds and sizes."""
    for one in found.depths:
        yield (
            f"{one.depth} of {found.layers}",
            f"{one.alone_per_s:,.0f}",
            f"{one.batch_per_s:,.0f}",
            f"{one.prompt_per_s:,.0f}",
            f"{one.weight_bytes / MIB:,.1f}",
            f"{one.kv_tokens:,}",
        )
