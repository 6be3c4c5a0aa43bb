"""The packages: `qllm` and what lies in it, and the folder `policies/` as `qllm_policies`."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["qllm", "qllm.*"]), "qllm_policies"])
