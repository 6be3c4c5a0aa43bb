"""The command `qllm run`: one prompt, or a conversation."""

import sys
from codecs import getincrementaldecoder
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qllm.cli.app import (
    INTERRUPTED,
    Depth,
    Device,
    ExpertBytes,
    ExpertDir,
    Memory,
    RankHosts,
    Ranks,
    Threads,
    app,
    clean,
    quiet,
    split_settings,
)
from qllm.cli.settings import WithSettings
from qllm.errors import InvalidRequestError, QllmError

CHUNK_BYTES = 65_536
"""Most bytes read from a pipe at once."""

if TYPE_CHECKING:
    from qllm.llm import QLLMEngine
    from qllm.record.metrics import RequestMetrics
    from qllm.types import Message, Prompt


@app.command(cls=WithSettings)
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
    stdin: Annotated[
        bool,
        typer.Option("--stdin", help="Take the prompt, or its rest, from a pipe as it comes."),
    ] = False,
    policy: Annotated[str, typer.Option(help="See `qllm policies`.")] = "qllm2",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code of the checkpoint.")
    ] = False,
    device: Device = None,
    threads: Threads = None,
    memory: Memory = None,
    tp: Ranks = None,
    tp_hosts: RankHosts = None,
    depth: Depth = None,
    max_expert_bytes: ExpertBytes = None,
    expert_dir: ExpertDir = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE: of the engine, or policy.NAME of the policy."),
    ] = None,
) -> None:
    """Answer one prompt, or chat: Ctrl-C stops an answer, Ctrl-D leaves."""
    settings, of_policy = split_settings(
        setting,
        memory=memory,
        tp=tp,
        tp_hosts=tp_hosts,
        depth=depth,
        max_expert_bytes=max_expert_bytes,
        expert_dir=expert_dir,
    )
    sampling = _sampling(temperature, seed)
    quiet()
    from qllm.config import spelled
    from qllm.llm import QLLMEngine
    from qllm.plugins import spelled_for

    with QLLMEngine.from_pretrained(
        model,
        policy=policy,
        policy_settings=spelled_for(policy, of_policy),
        dtype=None if dtype == "auto" else dtype,
        device=device or "cpu",
        trust_remote_code=trust_remote_code,
        threads=threads,
        **{"default_max_tokens": max_tokens, **spelled(settings)},
    ) as engine:
        talk = _Talk(engine, sampling, raw)
        if talk.has_no_template and not raw:
            typer.echo(f"qllm: {NO_TEMPLATE}", err=True)
        if stdin:
            if not talk.answer_stdin(prompt or ""):
                raise typer.Exit(INTERRUPTED)
        elif prompt is None:
            talk.chat()
        elif not talk.answer(prompt):
            raise typer.Exit(INTERRUPTED)


def _sampling(temperature: float | None, seed: int | None) -> dict[str, Any]:
    """Return the given keywords of SamplingParams. They are checked before a model is loaded."""
    from qllm.types import SamplingParams

    asked = {"temperature": temperature, "seed": seed}
    given: dict[str, Any] = {name: x for name, x in asked.items() if x is not None}
    SamplingParams(**given)
    return given


class _Talk:
    """A conversation on the terminal."""

    def __init__(self, engine: "QLLMEngine", sampling: dict[str, Any], raw: bool) -> None:
        self._engine = engine
        self._sampling = sampling
        template = getattr(engine.tokenizer, "chat_template", None)
        self.has_no_template = template is None
        self._raw = raw or self.has_no_template
        self._history: list[Message] = []

    def answer(self, text: str) -> bool:
        """Stream an answer; return False if it was stopped. A refused question is not stored."""
        asked: list[Message] = [*self._history, {"role": "user", "content": text}]
        prompt: Prompt = text if self._raw else asked
        said, stopped = self._show(self._engine.submit(prompt, "LS", **self._sampling))
        if not self._raw:
            self._history = [*asked, {"role": "assistant", "content": said}]
        return not stopped

    def answer_stdin(self, begin: str) -> bool:
        """Answer a prompt from a pipe, computed while it arrives; return False if it was stopped.

        Raises:
            InvalidRequestError: The prompt is not UTF-8, or too long.
        """
        first: Prompt = begin if self._raw else [{"role": "user", "content": begin}]
        decoder, num_bytes = getincrementaldecoder("utf-8")(), 0
        pipe: Any = sys.stdin.buffer
        with self._engine.open("LS", first) as prompt:
            try:
                while data := pipe.read1(CHUNK_BYTES):
                    prompt.append(decoder.decode(data))
                    num_bytes += len(data)
                prompt.append(decoder.decode(b"", final=True))
            except UnicodeDecodeError as error:
                text = f"the input is no UTF-8 near byte {num_bytes + error.start}: {error.reason}"
                raise InvalidRequestError(text) from None
            except KeyboardInterrupt:
                return False
            return not self._show(prompt.send(**self._sampling))[1]

    def _show(self, handle: Any) -> tuple[str, bool]:
        """Print an answer as it arrives; return its text, and True if it was stopped."""
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
        sys.stdout.flush()
        if not stopped:
            typer.echo(_speed(handle.result().metrics), err=True)
        return "".join(said), stopped

    def chat(self) -> None:
        """Read questions until the end of input."""
        with suppress(ImportError):
            import readline  # noqa: F401 - gives `input` a line editor
        tty = sys.stdin.isatty()
        if tty:
            typer.echo(HELP, err=True)
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
            if text.startswith("/"):
                if not self._command(text):
                    return
                continue
            try:
                self.answer(text)
            except QllmError as error:
                typer.echo(f"qllm: {error}", err=True)

    def _command(self, text: str) -> bool:
        """Do a command that begins with a slash; return False if it ends the conversation."""
        if text == "/clear":
            self._history = []
        elif text not in ("/help", "/?", "/bye"):
            typer.echo(f"qllm: {text.split()[0]!r:.40} is unknown", err=True)
        if text not in ("/clear", "/bye"):
            typer.echo(HELP, err=True)
        return text != "/bye"


NO_TEMPLATE = "the model has no chat template: it continues the text instead of answering it"
HELP = (
    "/clear forgets the conversation, /bye or Ctrl-D leaves, Ctrl-C stops an answer, /help says "
    "this."
)


def _speed(metrics: "RequestMetrics") -> str:
    """Return the speed of an answer, in one line."""
    said = "" if metrics.open_ms is None else f"read for {metrics.open_ms / 1000:.1f} s, "
    said += f"{metrics.num_prompt_tokens} tokens in, {metrics.num_output_tokens} out"
    if metrics.ttft_ms is not None:
        said += f", the first after {metrics.ttft_ms:.0f} ms"
    if metrics.tpot_ms:
        said += f", then {1000 / metrics.tpot_ms:.1f} per second"
    return f"[{said}]"
