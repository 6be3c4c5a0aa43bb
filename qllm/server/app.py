"""The application: an engine, its routes, and the layers in front of them."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import qllm
from qllm.errors import ConfigError, naming
from qllm.llm import QLLMEngine
from qllm.models.tokenizer import vocabulary_of
from qllm.server.api import chat, completions, messages, requests, responses
from qllm.server.api import models as tools
from qllm.server.api.background import Background
from qllm.server.api.best_effort import BestEffort
from qllm.server.batch import batches
from qllm.server.batch.worker import Worker
from qllm.server.config import ServerConfig, read_api_keys
from qllm.server.http import access, errors
from qllm.server.http.guard import Guard, Keys, Limits
from qllm.server.http.keys import Rule, read_rules
from qllm.server.metrics import Metrics
from qllm.server.ops import probes
from qllm.server.ops.supervisor import Supervisor
from qllm.server.page import docs, ui
from qllm.server.prompts import ndjson as streamed_body
from qllm.server.prompts import routes as prompt_routes
from qllm.server.prompts.store import StreamingPrompts
from qllm.server.requests.front import Front
from qllm.server.requests.lossy import LossyFronts
from qllm.server.requests.shortcut import Shortcut
from qllm.server.state.response_store import ResponseStore
from qllm.server.state.store import Store
from qllm.server.tools import choose


class Model(NamedTuple):
    """A further model of a server."""

    engine: QLLMEngine
    config: ServerConfig
    """The server's settings, with the names and engine settings of this model."""
    make: Callable[[], QLLMEngine] | None = None
    """As for `create_app`."""
    load_s: float = 1.0
    """Seconds that the engine took to load."""


class _State:
    """The state that outlives the server: batches and responses, with the workers of both."""

    def __init__(self, front: Front, folder: Path) -> None:
        self._front, config = front, front.config
        with naming("state_dir", folder):
            self.store = Store(
                folder, most_bytes=config.max_key_bytes, reserve_bytes=config.state_reserve_bytes
            )
        best_effort = BestEffort(front)
        self._worker = Worker(front, self.store, best_effort)
        kept = ResponseStore(self.store)
        self.responses = responses.State(kept, Background(front, kept, best_effort))

    def routers(self) -> list[APIRouter]:
        return [
            batches.file_routes(self.store),
            batches.batch_routes(self.store, self._worker),
            responses.state_routes(self._front, self.responses),
        ]

    async def start(self) -> None:
        await self._worker.start()
        await self.responses.background.start()

    async def close(self) -> None:
        await self._worker.close()
        await self.responses.background.close()


async def _start(state: _State | None, lossy: LossyFronts | None) -> None:
    if lossy is not None:
        lossy.start()
    if state is not None:
        await state.start()


async def _close(
    supervisors: Sequence[Supervisor],
    state: _State | None,
    lossy: LossyFronts | None,
    front: Front,
) -> None:
    for supervisor in supervisors:
        await supervisor.close()
    if state is not None:
        await state.close()
    if lossy is not None:
        await lossy.close()
    for one in front.all:
        await one.close()
    if state is not None:
        state.store.close()


def create_app(
    engine: QLLMEngine,
    config: ServerConfig,
    make: Callable[[], QLLMEngine] | None = None,
    load_s: float = 1.0,
    also: Sequence[Model] = (),
) -> FastAPI:
    """Return the ASGI application.

    Args:
        engine: First engine. The app does not close this engine, nor the last one
            (`app.state.front.engine`).
        config: Settings.
        make: Function that makes a new engine after an engine has failed; None allows no new
            engine.
        load_s: Seconds that the first engine took to load.
        also: Further models. A request names its model; without a name it is for the first model.

    Raises:
        ConfigError: A setting is wrong, or two models have one name.
    """
    rules = read_rules(config.keys_file)
    models = [Model(engine, config, make, load_s), *also]
    fronts = _fronts(models, {rule.caller: rule for rule in rules})
    front, metrics = fronts[0], fronts[0].metrics
    lossy = _choices(fronts, models)
    prompts = StreamingPrompts(front)
    log = access.Log() if config.access_log else None

    state = None if config.state_dir is None else _State(front, config.state_dir)
    supervisors = [
        Supervisor(one, model.make, model.load_s)
        for one, model in zip(fronts, models, strict=True)
        if model.make is not None
    ]

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await _start(state, lossy)
        for supervisor in supervisors:
            supervisor.start()
        try:
            yield
        finally:
            prompts.close()
            await _close(supervisors, state, lossy, front)
            if log is not None:
                log.write()

    app = FastAPI(
        title="qllm", version=qllm.__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.front = front
    errors.install(app)
    app.router.routes += streamed_body.routes(front, prompts)
    makes_answers = [part.routes(front, prompts) for part in (chat, completions)]
    makes_answers.append(messages.routes(front))
    makes_answers.append(responses.routes(front, None if state is None else state.responses))
    others = [part.routes(front) for part in (requests, tools, probes, ui)]
    others += [prompt_routes.routes(front, prompts), docs.routes()]
    others += [] if state is None else state.routers()
    for router in (*makes_answers, *others):
        app.include_router(router)
    layers: ASGIApp = Shortcut(app.build_middleware_stack(), front.apart, (*makes_answers, *others))
    layers = _guarded(layers, config, rules, metrics, log)
    if config.cors_origins:
        layers = CORSMiddleware(
            layers,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app.middleware_stack = layers  # FastAPI's own layers are behind the shortcut
    _make_routes(app)
    return app


def _check_auto(fronts: Sequence[Front]) -> None:
    """Refuse `auto` if whole models do not read a prompt as the same tokens.

    Raises:
        ConfigError: No model is whole, or two have other tokenizers or chat templates.
    """
    whole = [front for front in fronts if front.is_whole]
    if not whole:
        raise ConfigError("auto=True chooses among whole models, and all models here are cut")
    first, *others = whole
    for other in others:
        for what, read in (("vocabulary", vocabulary_of), ("chat template", _template_of)):
            if read(first.engine.tokenizer) != read(other.engine.tokenizer):
                raise ConfigError(
                    f"auto=True cannot choose between {first.model_name!r} and "
                    f"{other.model_name!r}: they have another {what}, so a text would be cut into "
                    "other tokens; leave auto out, and name the model in each request"
                )


def _choices(fronts: Sequence[Front], models: Sequence[Model]) -> LossyFronts | None:
    """Check the models of `auto`; make the owner of lossy answers if allowed, and tell each front.

    Raises:
        ConfigError: Models do not go with `auto`. For lossy answers: a model has no profile, none
            is whole, or an engine cannot be made again.
    """
    config = fronts[0].config
    if config.auto:
        _check_auto(fronts)
    if not config.lossy:
        return None
    if any(model.make is None for model in models):
        raise ConfigError(
            "lossy=True needs engines that the server can make again, because an open answer "
            "waits for its candidate's next engine"
        )
    found = LossyFronts(fronts, config)
    for front in fronts:
        front.lossy = found
    return found


def _template_of(tokenizer: Any) -> Any:
    return getattr(tokenizer, "chat_template", None)


def _fronts(models: Sequence[Model], rules: Mapping[str, Rule]) -> list[Front]:
    """Return the fronts of all models, in order. Each has metrics of its own model."""
    fronts: list[Front] = []
    for engine, config, *_ in models:
        choose.check(engine.tokenizer, config.tool_calls)
        first = fronts[0] if fronts else None
        metrics = Metrics(
            config.model_name,
            is_local=config.engine_address is None,
            drafter=engine.config.draft,
            beside=None if first is None else first.metrics,
        )
        fronts.append(Front(engine, config, metrics, rules, first))
    return fronts


def _guarded(
    layers: ASGIApp,
    config: ServerConfig,
    rules: Sequence[Rule],
    metrics: Metrics,
    log: access.Log | None,
) -> Guard:
    """Return the layers behind a guard that has all API keys."""
    for rule in rules:
        metrics.name_key(rule.caller, rule.name)
    own = {rule.caller: rule.max_concurrent for rule in rules if rule.max_concurrent is not None}
    limits = Limits(config.rate_per_minute, config.max_concurrent, most_of=own)
    keys = Keys(read_api_keys(config), config.admin_api_key.get_secret_value().strip(), rules)
    return Guard(layers, config, keys, limits, metrics, log)


def _make_routes(app: FastAPI) -> None:
    """Match a path without a route, so that FastAPI makes the routes of every router now.

    Otherwise FastAPI makes the routes at the first request to a router. Making routes takes up to
    20 ms. A stream must not wait so long.
    """
    scope = {"type": "http", "method": "GET", "path": "", "root_path": "", "headers": []}
    for route in app.router.routes:
        route.matches(scope)
