"""The application: one engine, its routes, and what stands in front of them."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import qllm
from qllm.llm import QLLMEngine

from . import batches, chat, completions, docs, errors, probes, tools, ui
from .config import ServerConfig, read_api_keys
from .front import Front
from .guard import Guard, Keys, Limits
from .metrics import Metrics
from .store import Store
from .supervisor import Supervisor
from .worker import Worker


def create_app(
    engine: QLLMEngine,
    config: ServerConfig,
    make: Callable[[], QLLMEngine] | None = None,
    load_s: float = 1.0,
) -> FastAPI:
    """Make the ASGI application.

    Args:
        engine: The first one. It is not closed with the app, nor is the last
            (`app.state.front.engine`).
        config: Settings.
        make: Makes a further engine when one has ended by itself; None leaves it ended.
        load_s: How long the first one took to load.
    """
    metrics = Metrics(config.model_name, is_local=config.engine_address is None)
    front = Front(engine, config, metrics)

    store = None if config.state_dir is None else Store(config.state_dir)
    worker = None if store is None else Worker(front, store)
    supervisor = None if make is None else Supervisor(front, make, load_s)

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
    for part in (chat, completions, tools, probes, ui):
        app.include_router(part.routes(front))
    app.include_router(docs.routes())
    if store is not None and worker is not None:
        app.include_router(batches.file_routes(store))
        app.include_router(batches.batch_routes(store, worker))
    limits = Limits(config.rate_per_minute, config.max_concurrent)
    keys = Keys(read_api_keys(config))
    app.add_middleware(Guard, config=config, keys=keys, limits=limits, metrics=metrics)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    return app
