"""What is installed: a wheel without a compiler, an sdist, the locks, and the name on the index."""

import os
import re
import signal
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.files import ROOT

SITE = Path(sys.prefix) / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false", "PATH": "/nowhere"}
MAX_KERNEL_BYTES = 6 << 20
"""Most bytes of the CPU kernels, five times for as many instruction sets; with symbols 18 MiB."""


def run(command: list[str], **how: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **how)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout + done.stderr)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist and a wheel, from the objects that the build of this checkout has left."""
    folder, work = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("build")
    setup = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(work)]
    to = ["--dist-dir", str(folder)]
    run([*setup, "sdist", *to], cwd=ROOT)
    built = [*setup, "build", "--build-base", str(work), "bdist_wheel", *to]
    run([*built, "--bdist-dir", str(work / "wheel")], cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel alone, beside what is installed here; no compiler."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    run(pip, env={**os.environ, **NO_COMPILER})
    own = next((folder / "lib").glob("python*/site-packages"))
    (own / "beside.pth").write_text(f"{SITE}\n")  # editable installs there are not followed
    return folder


def test_the_wheel_needs_no_compiler_and_serves(clean: Path, tmp_path: Path) -> None:
    env = {**os.environ, **NO_COMPILER, "HOME": str(tmp_path)}
    code = (
        "import json, qllm, qllm.kernels.cpu as cpu; "
        "from qllm.server.config import load_config; from qllm.server.app import create_app; "
        "from starlette.testclient import TestClient\n"
        "assert cpu.MISSING is None, cpu.MISSING\n"
        "if __name__ == '__main__':\n"
        "    with qllm.QLLMEngine.from_pretrained('tiny', threads=1) as engine:\n"
        "        app = create_app(engine, load_config(None, {}, {'model': 'tiny'}))\n"
        "        with TestClient(app) as client:\n"
        "            body = {'prompt': 'a', 'max_tokens': 3, 'ignore_eos': True}\n"
        "            answer = client.post('/v1/completions', json=body).json()\n"
        "    print(qllm.__file__, answer['usage']['completion_tokens'])\n"
    )
    said = run([str(clean / "bin" / "python"), "-c", code], env=env, cwd=tmp_path)
    assert re.search(rf"{re.escape(str(clean))}.*qllm/__init__.py 3$", said, re.MULTILINE), said
    script = str(clean / "bin" / "qllm")
    prompt = ["run", "tiny", "What does json.dumps do?", "--max-tokens", "4", "--threads", "1"]
    assert "4 out" in run([script, *prompt], env=env, cwd=tmp_path)
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert run([script, "docs", "architecture"], env=env, cwd=tmp_path) == page
    assert '"panels"' in run([script, "docs", "grafana.json"], env=env, cwd=tmp_path)


def test_the_wheel_is_of_the_limited_api_and_small(wheel: Path) -> None:
    assert re.fullmatch(r"qllm_runtime-[\d.]+-cp311-abi3-linux_\w+\.whl", wheel.name)
    sizes = {info.filename: info.file_size for info in zipfile.ZipFile(wheel).infolist()}
    assert sizes["qllm/kernels/cpu/_native.abi3.so"] < MAX_KERNEL_BYTES
    for name in ("qllm/kernels/cpu/_native.abi3.so", "qllm/device/_scheduler.abi3.so",
                 "qllm/server/page/static/ui.html", "qllm/models/tiny/config.json",
                 "qllm_policies/qllm2.py"):  # fmt: skip
        assert name in sizes, name
    pages = [p for p in (ROOT / "docs").rglob("*") if p.suffix in (".md", ".json", ".yaml")]
    assert {f"qllm/{page.relative_to(ROOT)}" for page in pages} - sizes.keys() == set()


def test_the_extensions_are_stripped() -> None:
    for path in ROOT.glob("qllm/*/**/*.abi3.so"):
        text = path.read_bytes()
        assert b".debug_info" not in text, path
        assert b".symtab" not in text, path


def test_the_sdist_has_all_that_a_build_needs(dist: Path) -> None:
    (found,) = dist.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("qllm", "policies", "docs"):
        paths = [path for path in (ROOT / folder).rglob("*.*") if "__pycache__" not in path.parts]
        needed = {str(p.relative_to(ROOT)) for p in paths if p.is_file() and p.suffix != ".so"}
        assert needed - names == set()
    assert {"setup.py", "pyproject.toml", "constraints.txt", "LICENSE", "locks/run.txt"} <= names
    assert not any(name.endswith(".so") for name in names)


@pytest.mark.parametrize("name", ["run", "dev"])
def test_a_lock_is_what_is_installed(name: str) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import lock
    finally:
        sys.path.pop(0)
    assert (ROOT / "locks" / f"{name}.txt").read_text() == lock.lock(name)


def test_locks_are_of_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    known = {re.sub(r"[-_.]+", "-", name).lower(): pin for name, pin in pins.items()}
    for file in (ROOT / "locks").glob("*.txt"):
        for line in file.read_text().splitlines()[1:]:
            name, pin = line.split("==")
            assert known[name] == pin, line


# -- the name


def test_no_text_tells_to_install_a_name_that_does_not_exist() -> None:
    """The distribution is on no index, and `qllm` there is another project."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "qllm").rglob("*.py")]
    wrong = re.compile(r"pip install [^`\n]*\bqllm\b|install qllm-runtime|install '?qllm-runtime")
    found = [(page.name, line) for page in pages for line in page.read_text().splitlines()
             if wrong.search(line)]  # fmt: skip
    assert found == []


def test_what_an_extra_needs_is_named_as_pip_knows_it() -> None:
    from qllm.errors import pip_install

    text = pip_install("server")
    assert text.startswith("pip install ")
    for name in ("fastapi", "uvicorn", "prometheus-client"):
        assert name in text
    assert "nvidia-cuda-nvrtc==13.0.*" in pip_install("device")
    assert "pyproject.toml" in pip_install("no-such-extra")


@pytest.mark.parametrize("folder", ["beside", "elsewhere"])
def test_another_package_of_this_name_is_noticed(folder: str, tmp_path: Path) -> None:
    """Two packages in one folder overwrite each other's files."""
    home = tmp_path / "site"
    home.mkdir()
    (home / "qllm").symlink_to(ROOT / "qllm")
    other = home if folder == "beside" else tmp_path
    (other / "qllm-0.2.2.dist-info").mkdir()
    (other / "qllm_runtime-0.1.0.dist-info").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", "import qllm; print(qllm.__version__)"],
        env={**os.environ, "PYTHONPATH": str(home)}, cwd=home, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if folder == "elsewhere":
        assert done.returncode == 0, done.stderr
        return
    assert "pip uninstall --yes qllm qllm-runtime" in done.stderr
    assert "qllm-0.2.2" in done.stderr
    assert done.returncode == 1


def test_other_systems_are_told_at_import(tmp_path: Path) -> None:
    code = "import sys; sys.platform = 'darwin'; import qllm"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert "qllm runs on Linux only" in done.stderr
    assert "darwin" in done.stderr
    text = (ROOT / "pyproject.toml").read_text()
    assert "Operating System :: POSIX :: Linux" in tomllib.loads(text)["project"]["classifiers"]


def test_ctrl_c_stops_a_build_in_the_background() -> None:
    """A shell lets its background jobs ignore it; `make demo` compiles in one."""
    code = "import runpy, signal; runpy.run_path('setup.py'); print(signal.getsignal(2))"
    line = f"trap '' INT; exec '{sys.executable}' -c \"{code}\" --version"
    found = subprocess.run(["sh", "-c", line], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == str(int(signal.SIG_DFL))


def test_the_version_is_said_once() -> None:
    import qllm

    assert version("qllm-runtime") == qllm.__version__
