"""Many engines on a Ray cluster, or on a laptop: `serve run qllm.ray:app model=tiny`.

The guide is docs/guides/ray.md.

    client    all engines as one, for the server's own application and for batch jobs
    calls     questions to replicas
    replica   one engine, as Ray Serve sees it
    router    which replica gets a request
    scaling   how many replicas there are
    settings  of the application
    deploy    the application
    data      a Ray dataset answered by engines that would be idle

These functions import Ray when they are called.
"""

import os
from collections.abc import Mapping
from typing import Any

from qllm.errors import ConfigError, pip_install


def _need_ray() -> None:
    try:
        import ray.data
        import ray.serve  # noqa: F401 - both or none
    except ModuleNotFoundError as error:
        raise ConfigError(f"qllm.ray needs {error.name}: {pip_install('ray')}") from error


def app(args: Mapping[str, Any]) -> Any:
    """Return the application for `serve run qllm.ray:app model=tiny ray.max_replicas=4`.

    Args:
        args: Settings of a server by name, table fields as TABLE.NAME. `config` names a TOML file.
            QLLM_ variables of the environment count too.

    Raises:
        ConfigError: A setting is wrong, or Ray is missing.
    """
    _need_ray()
    from qllm.ray.deploy import build
    from qllm.ray.settings import config_of

    return build(config_of(args, os.environ))


def serve(config: Any) -> None:
    """Run the application and wait: `qllm serve --ray`. Returns after SIGTERM or SIGINT, drained.

    Args:
        config: A `ServerConfig`.

    Raises:
        ConfigError: A setting is wrong, or Ray is missing.
    """
    _need_ray()
    from qllm.ray.run import serve as run

    run(config)


def connect(name: str = "qllm") -> Any:
    """Return one `QLLMEngine` for all engines of a running application.

    Args:
        name: Name of the application.

    Raises:
        ConfigError: Ray is missing, or no application has the name.
        EngineClosedError: No engine of the application answers.
    """
    _need_ray()
    from qllm.ray.deploy import connected

    return connected(name)


def map_batches(dataset: Any, **keywords: Any) -> Any:
    """Return a dataset with an answer to each prompt, from engines that also serve.

    See `qllm.ray.data.map_batches` for the arguments.
    """
    _need_ray()
    from qllm.ray.data import map_batches as run

    return run(dataset, **keywords)
