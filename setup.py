"""The packages: `qllm` and what lies in it, and the folder `policies/` as `qllm_policies`.

The CPU kernels and the native scheduler are extensions of the limited API. Where no compiler is
there, the install goes on without them: torch computes then, and the start-up log and
`qllm doctor` say so; a loop on the device is refused.
"""

from pathlib import Path

from setuptools import Extension, find_packages, setup

FOLDER = Path("qllm/kernels/cpu")
SCHEDULER = Path("qllm/device/csrc")
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fvisibility=hidden", "-pthread"]
FLAGS += [
    "-ffp-contract=off"
]  # one rounding per operation, as in Python; fma where the source says

setup(
    packages=[*find_packages(include=["qllm", "qllm.*"]), "qllm_policies"],
    ext_modules=[
        Extension(
            "qllm.kernels.cpu._native",
            sources=sorted(str(file) for file in FOLDER.glob("*.cpp")),
            depends=sorted(str(file) for file in FOLDER.glob("*.[hi]*")),
            extra_compile_args=[*FLAGS, "-Wno-uninitialized", "-Wno-maybe-uninitialized"],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "qllm.device._scheduler",
            sources=[str(SCHEDULER / "module.cpp")],
            depends=sorted(str(file) for file in SCHEDULER.glob("*.h")),
            extra_compile_args=FLAGS,
            py_limited_api=True,
            optional=True,
        ),
    ],
)
