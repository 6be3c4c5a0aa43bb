"""The application: one engine, its routes, and what stands in front of them."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import qllm
from qllm.llm import QLLMEngine

from . import batches, chat, completions, errors, probes, requests, tools, ui
from .config import ServerConfig, read_api_keys
from .front import Front
from .guard import Guard, Keys, Limits
from .metrics import Metrics
from .store import Store
from .supervisor import Supervisor
from .worker import Worker


def create_app(
    engine: QLLMEngine, config: ServerConfig, make: Callable[[], QLLMEngine] | None = None
) -> FastAPI:
    """Make the ASGI application. There is no /docs page: it would load scripts from elsewhere.

    Args:
        engine: The first one. It is not closed with the app, nor is the last
            (`app.state.front.engine`).
        config: Settings.
        make: Makes a further engine when one has ended by itself; None leaves it ended.
    """
    metrics = Metrics(config.model_name)
    front = Front(engine, config, metrics)

    store = None if config.state_dir is None else Store(config.state_dir)
    worker = None if store is None else Worker(front, store)
    supervisor = None if make is None else Supervisor(front, make)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if worker is not None:
            await worker.start()
        if supervisor is not None:
            supervisor.start()
        try:
            yield
        finally:
            if supervisor is not None:
                await supervisor.close()
            if worker is not None:
                await worker.close()
            await front.close()
            if store is not None:
                store.close()

    app = FastAPI(
        title="qllm", version=qllm.__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.front = front
    errors.install(app)
    for part in (chat, completions, requests, tools, probes, ui):
        app.include_router(part.routes(front))
    if store is not None and worker is not None:
        app.include_router(batches.file_routes(store))
        app.include_router(batches.batch_routes(store, worker))
    limits = Limits(config.rate_per_minute, config.max_concurrent)
    keys = Keys(read_api_keys(config))
    app.add_middleware(Guard, config=config, keys=keys, limits=limits, refuse=metrics.refuse)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST", "PATCH", "DELETE"],
            allow_headers=["*"],
        )
    return app
