"""The application: one engine, its routes, and what stands in front of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import qllm
from qllm.llm import QLLMEngine

from . import chat, completions, errors, probes, tools
from .config import ServerConfig, read_api_keys
from .front import Front
from .guard import Guard, Keys, Limits
from .metrics import Metrics


def create_app(engine: QLLMEngine, config: ServerConfig) -> FastAPI:
    """Make the ASGI application.

    The engine stays the caller's: it is not closed with the app. There is no /docs page: it would
    load scripts from elsewhere; /openapi.json is there.
    """
    metrics = Metrics(config.model_name)
    front = Front(engine, config, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await front.close()

    app = FastAPI(
        title="qllm", version=qllm.__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.front = front
    errors.install(app)
    for part in (chat, completions, tools, probes):
        app.include_router(part.routes(front))
    limits = Limits(config.rate_per_minute, config.max_concurrent)
    keys = Keys(read_api_keys(config))
    app.add_middleware(Guard, config=config, keys=keys, limits=limits, refuse=metrics.refuse)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    return app
