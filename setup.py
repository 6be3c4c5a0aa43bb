"""The packages: `qllm` and what lies in it, and the folder `policies/` as `qllm_policies`.

The CPU kernels, the native scheduler and the ends of rings are extensions of the limited API: one
wheel serves every Python from 3.11 on. Without a compiler the install goes on: torch computes
then, and the start-up log and `qllm doctor` say so; a loop on the device is refused.
"""

import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

if sys.platform != "linux":
    raise SystemExit(
        f"qllm runs on Linux only (memfd, eventfd, pidfd), and this is {sys.platform}: use a "
        "container, a virtual machine or WSL 2"
    )

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job of a shell, as in `make`
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C stops the compilers too

FOLDER = Path("qllm/kernels/cpu")
SCHEDULER = Path("qllm/device/csrc")
RINGS = sorted(str(file) for file in Path("qllm/ingress/csrc").glob("*.h"))
FLAGS = ["-std=c++17", "-O3", "-g0", "-fno-math-errno", "-fvisibility=hidden", "-pthread"]
FLAGS += [
    "-ffp-contract=off"
]  # one rounding per operation, as in Python; fma where the source says
QUIET = [
    f"-Wno-{name}" for name in ("uninitialized", "maybe-uninitialized", "array-bounds", "psabi")
]
STRIP = "-Wl,-s"
OBJECTS = "build/objects"
"""Kept between builds: an editable install, a wheel and `build_ext` compile a file once."""


class BuildKernels(build_ext):
    """Compiles the files of an extension side by side, and only those that have changed."""

    def finalize_options(self) -> None:
        """Keep the objects, which an editable install would throw away."""
        super().finalize_options()
        self.build_temp = f"{OBJECTS}-{sys.implementation.cache_tag}"

    def build_extension(self, ext: Extension) -> None:
        """Build one extension."""
        compile_all = self.compiler.compile
        self.compiler.compile = self._side_by_side(ext, compile_all)
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_all

    def _side_by_side(self, ext: Extension, compile_all: Callable[..., Any]) -> Callable[..., Any]:
        newest = max(os.stat(path).st_mtime for path in ext.depends)

        def compile_changed(sources: list[str], output_dir: str = "", **how: Any) -> list[str]:
            found = self.compiler.object_filenames(sources, 0, output_dir)
            objects = dict(zip(sources, found, strict=True))
            old = [s for s in sources if not _is_new(objects[s], max(newest, os.stat(s).st_mtime))]
            jobs = max(1, min(len(old), len(os.sched_getaffinity(0))))
            if old:
                sys.stderr.write(f"{ext.name}: compiling {len(old)} files, {jobs} at a time\n")
            with ThreadPoolExecutor(jobs) as pool:
                done = [
                    pool.submit(compile_all, [source], output_dir=output_dir, **how)
                    for source in sorted(old, key=_cost)
                ]
                for future in done:
                    future.result()
            return list(objects.values())

        return compile_changed


def _is_new(path: str, since_s: float) -> bool:
    return os.path.exists(path) and os.stat(path).st_mtime > since_s


def _cost(source: str) -> bool:
    """The vector units' files take longest, so they come first."""
    return not Path(source).name.startswith(("amx", "avx"))


setup(
    packages=[*find_packages(include=["qllm", "qllm.*"]), "qllm.docs", "qllm_policies"],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    ext_modules=[
        Extension(
            "qllm.kernels.cpu._native",
            sources=sorted(str(file) for file in FOLDER.glob("*.cpp")),
            depends=["setup.py", *sorted(str(file) for file in FOLDER.glob("*.[hi]*"))],
            extra_compile_args=[*FLAGS, *QUIET],
            extra_link_args=["-pthread", STRIP],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "qllm.ingress._ends",
            sources=["qllm/ingress/csrc/ends.cpp"],
            depends=["setup.py", *RINGS],
            extra_compile_args=FLAGS,
            extra_link_args=[STRIP],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "qllm.device._scheduler",
            sources=[str(SCHEDULER / "module.cpp")],
            depends=["setup.py", *sorted(str(file) for file in SCHEDULER.glob("*.h")), *RINGS],
            extra_compile_args=FLAGS,
            extra_link_args=[STRIP],
            py_limited_api=True,
            optional=True,
        ),
    ],
)
