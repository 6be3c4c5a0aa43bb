"""Several models side by side: `Models`, an engine per model, and the memory that they need.

with Models.from_pretrained("tiny", also=["tiny@2"]) as models:
    print(models.names)
    print(models.submit("def area(", model="tiny@2").result().text)
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from qllm.config import KINDS, EngineConfig, engine_config, named_device, named_dtype
from qllm.cores import free_bytes, memory_bytes
from qllm.errors import ConfigError, InvalidRequestError, shown
from qllm.fleet.models import Named, parse_also, parse_engines, refuse_same_names
from qllm.frontend.handle import Handle
from qllm.llm import QLLMEngine
from qllm.models.stored import stored_bytes
from qllm.types import Prompt

UNKNOWN_SIZE = ("expert_weights", "max_expert_bytes")
"""Settings with which a model takes less memory than its checkpoint. Its size is then not known
before the load."""


def new_group() -> str:
    """Return a name for engines on the same cores (`shared_cores`) that no other group has."""
    return f"also-{os.getpid()}-{os.urandom(4).hex()}"


def refuse_too_large(
    models: Sequence[Named],
    config: EngineConfig,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> None:
    """Refuse models that do not fit together in the memory of this machine, before a load.

    Models on a GPU, and models with a setting of `UNKNOWN_SIZE`, are not counted here. Their
    engines refuse sizes by themselves.

    Args:
        models: All models, each with its depth.
        config: Settings of every engine.
        dtype: Type of loaded weights; None is that of the checkpoints.
        device: Device of all models.
        trust_remote_code: True downloads the checkpoints' code too.

    Raises:
        ConfigError: The models do not fit; the message has the sum.
        ModelError: A model is not there.
    """
    if device != "cpu" or any(getattr(config, x) not in (None, "auto") for x in UNKNOWN_SIZE):
        return
    if config.memory is not None:
        _refuse_budgets(len(models), int(config.memory))
        return
    sizes = [stored_bytes(m.where, m.depth, dtype, trust_remote_code) for m in models]
    free = free_bytes()
    if sum(sizes) > free:
        each = " + ".join(f"{size} ({m.name})" for m, size in zip(models, sizes, strict=True))
        raise ConfigError(
            f"the models do not fit together: their weights are {each} = {sum(sizes)} bytes, and "
            f"{free} bytes are free; leave a model out, or cut one (MODEL@DEPTH)"
        )


def _refuse_budgets(count: int, budget: int) -> None:
    whole = memory_bytes()
    if count * budget > whole:
        raise ConfigError(
            f"the models do not fit together: memory={budget} is for each of {count} engines, "
            f"together {count * budget} bytes, and the machine, or its control group, has {whole}; "
            f"give at most {whole // count}"
        )


class Models:
    """Engines of several models, by name. A request for a model only ever reaches its engine.

    Use it as a context manager, or call `close`, which closes every engine.

    Args:
        engines: Engines by name. A request without a model is for the first one.

    Raises:
        ConfigError: There is no engine.
    """

    def __init__(self, engines: Mapping[str, QLLMEngine]) -> None:
        if not engines:
            raise ConfigError("engines={} has no model; give at least one engine")
        self._engines = dict(engines)

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | os.PathLike[str], also: Sequence[str], **settings: Any
    ) -> Self:
        """Load a model and further ones, each in an engine of its own.

        Args:
            name_or_path: First model, as for `QLLMEngine.from_pretrained`. This is its name.
            also: Further models as `[NAME=]MODEL[@DEPTH]`. The depth is the number of layers to
                load; without one the model is whole.
            **settings: Arguments of `QLLMEngine.from_pretrained`, for every engine. A `depth` is
                that of the first model.

        Raises:
            ConfigError: A setting is wrong, two models have one name, or they do not fit together.
            ModelError: A model cannot be loaded.
        """
        shared = {name: value for name, value in settings.items() if name != "depth"}
        first = Named(os.fspath(name_or_path), os.fspath(name_or_path), settings.get("depth"))
        models = [first, *map(parse_also, also)]
        refuse_same_names(model.name for model in models)
        config = engine_config({x: shared[x] for x in KINDS.keys() & shared.keys()})
        refuse_too_large(
            models,
            config,
            dtype=named_dtype(shared.get("dtype")),
            device=named_device(shared.get("device", "cpu")),
            trust_remote_code=shared.get("trust_remote_code", False),
        )
        if named_device(shared.get("device", "cpu")) == "cpu":
            shared.setdefault("shared_cores", new_group())
        with ExitStack() as opened:
            made = {}
            for name, where, depth in models:
                of_depth: dict[str, Any] = {} if depth is None else {"depth": depth}
                made[name] = QLLMEngine.from_pretrained(where, **shared, **of_depth)
                opened.callback(made[name].close)
            found = cls(made)
            opened.pop_all()
        return found

    @classmethod
    def connect(cls, address: str, also: Sequence[str], **how: Any) -> Self:
        """Connect to engines of several models.

        Args:
            address: Addresses of the first model's engines, as for `QLLMEngine.connect`.
            also: Engines of further models as `[NAME=]ADDRESS`. Addresses with one name are the
                engines of one model. Without a name it is the name of the engine's model.
            **how: Arguments of `QLLMEngine.connect`. Those of a fleet apply to each model that has
                several engines.

        Raises:
            ConfigError: Engines of one model differ, or two models have one name.
            EngineClosedError: No engine of a model answers.
        """
        fleet = {name: how.pop(name) for name in list(how) if name not in OF_CONNECT}
        with ExitStack() as opened:
            made: dict[str, QLLMEngine] = {}
            for name, where, _ in (Named("", address), *parse_engines(also)):
                own = fleet if "," in where else {}
                engine = QLLMEngine.connect(where, **how, **own)
                opened.callback(engine.close)
                refuse_same_names((*made, name or engine.model_name))
                made[name or engine.model_name] = engine
            found = cls(made)
            opened.pop_all()
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all models, the first model first."""
        return tuple(self._engines)

    def __getitem__(self, name: str) -> QLLMEngine:
        """Return the engine of a model.

        Raises:
            InvalidRequestError: No model has the name; the message lists the names.
        """
        if name not in self._engines:
            names = ", ".join(map(repr, self._engines))
            raise InvalidRequestError(f"model {shown(name)} is not served here; use {names}")
        return self._engines[name]

    def submit(self, prompt: Prompt, *args: Any, model: str | None = None, **more: Any) -> Handle:
        """Submit a request to the engine of a model, as `QLLMEngine.submit` does.

        Args:
            prompt: Prompt as for `QLLMEngine.submit`.
            *args: Further arguments of `QLLMEngine.submit`.
            model: Name of the model; None is the first model.
            **more: Further arguments of `QLLMEngine.submit`.

        Raises:
            InvalidRequestError: No model has the name, or an argument is wrong.
        """
        name = self.names[0] if model is None else model
        return self[name].submit(prompt, *args, **more)

    def close(self) -> None:
        """Close every engine. Idempotent."""
        for engine in self._engines.values():
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


OF_CONNECT = ("profile", "secret_file", "tokenizer", "trust_remote_code")
"""Arguments of `QLLMEngine.connect` that do not need several engines."""
