"""`qllm run`: one prompt, or a conversation."""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qllm.errors import ConfigError, QllmError

from .app import INTERRUPTED, Device, Threads, app, clean, parse_setting, quiet

if TYPE_CHECKING:
    from qllm.llm import QLLMEngine
    from qllm.types import Message, Prompt


@app.command()
@clean
def run(
    model: Annotated[str, typer.Argument(help="Alias, folder or hub id; see `qllm models`.")],
    prompt: Annotated[str | None, typer.Argument(help="Without one, chat.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; by default what the model asks for.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random choices.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt instead of answering it.")
    ] = False,
    policy: Annotated[str, typer.Option(help="See `qllm policies`.")] = "qllm2",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code of the checkpoint.")
    ] = False,
    device: Device = None,
    threads: Threads = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="An engine setting, NAME=VALUE.")
    ] = None,
) -> None:
    """Answer one prompt, or chat: Ctrl-C stops an answer, Ctrl-D leaves."""
    settings = dict(parse_setting(text) for text in setting or ())
    for name in ("policy", "dtype", "trust_remote_code", "device", "threads"):
        if name in settings:
            flag = name.replace("_", "-")
            raise ConfigError(f"{name} is no setting for --set; give it as --{flag}")
    quiet()
    from qllm.llm import QLLMEngine

    with QLLMEngine.from_pretrained(
        model,
        policy=policy,
        dtype=None if dtype == "auto" else dtype,
        device=device or "cpu",
        trust_remote_code=trust_remote_code,
        threads=threads,
        **{"default_max_tokens": max_tokens, **settings},
    ) as engine:
        talk = _Talk(engine, temperature, seed, raw)
        if prompt is None:
            talk.chat()
        elif not talk.answer(prompt):
            raise typer.Exit(INTERRUPTED)


class _Talk:
    """A conversation on the terminal."""

    def __init__(
        self,
        engine: "QLLMEngine",
        temperature: float | None,
        seed: int | None,
        raw: bool,
    ) -> None:
        self._engine = engine
        self._sampling: dict[str, Any] = {}
        if temperature is not None:
            self._sampling["temperature"] = temperature
        if seed is not None:
            self._sampling["seed"] = seed
        template = getattr(engine.tokenizer, "chat_template", None)
        self._raw = raw or template is None
        self._history: list[Message] = []

    def answer(self, text: str) -> bool:
        """Stream an answer; False if it was stopped. A refused question leaves no trace."""
        from qllm.types import SamplingParams

        asked: list[Message] = [*self._history, {"role": "user", "content": text}]
        prompt: Prompt = text if self._raw else asked
        sampling = None
        if self._sampling:
            sampling = SamplingParams(
                **{"temperature": 0.0, **self._engine.sampling_defaults, **self._sampling}
            )
        handle = self._engine.submit(prompt, "LS", None, sampling=sampling)
        said: list[str] = []
        stopped = False
        try:
            for piece in handle:
                said.append(piece.text)
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            handle.cancel()
            stopped = True
        sys.stdout.write("\n")
        if not self._raw:
            self._history = [*asked, {"role": "assistant", "content": "".join(said)}]
        return not stopped

    def chat(self) -> None:
        """Read questions until the end of input."""
        with suppress(ImportError):
            import readline  # noqa: F401 - gives `input` a line editor
        tty = sys.stdin.isatty()
        if tty:
            typer.echo("Ctrl-C stops an answer, Ctrl-D leaves.", err=True)
        while True:
            try:
                text = input("> " if tty else "").strip()
            except EOFError:
                typer.echo("")
                return
            except KeyboardInterrupt:
                typer.echo("")
                continue
            if not text:
                continue
            try:
                self.answer(text)
            except QllmError as error:
                typer.echo(f"qllm: {error}", err=True)
