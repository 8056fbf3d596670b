"""The application: routes, and the layers that every request passes before it reaches one.

    uvicorn --> CORS --> HttpMetrics --> Auth --> BodyLimit --> route
                         counts          401      413

The layers are plain ASGI, a few lines each: what they wrap may be a stream that lasts for minutes, and must be told at
once when the client leaves.

Owns: the layers, start and end of the server. Does not own: what the routes do.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import tutorial_engine
from tutorial_engine.async_llm import AsyncLLM
from tutorial_engine.exceptions import EngineDeadError
from tutorial_engine.server import admin, chat, completions, dashboard, tokenize
from tutorial_engine.server.errors import add_handlers, error_body, json_response
from tutorial_engine.server.serving import ServerOptions, Serving

MAX_BODY_BYTES = 10 * 2**20  # more than any prompt that fits a context
GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # what needs a key, if there is one; and the levers of `admin.py`
# asked for all the time, by other machines and pages
UNCOUNTED = ("/metrics", "/health", "/load", "/ping", "/version", "/dashboard/state")
_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_LEVERS = {getattr(route, "path", None) for route in admin.dev_router.routes}
LOG_CHECK_S = 1.0  # how often the server looks whether a line of statistics is due


def build_app(llm: AsyncLLM, options: ServerOptions | None = None) -> FastAPI:
    """The server for an engine, which is shut down with it. Give it to uvicorn, from one event loop only.

    Raises:
        VLLMValidationError: an engine without a tokenizer.
    """
    options = options or ServerOptions()
    app = FastAPI(title="tutorial-engine", version=tutorial_engine.__version__, lifespan=_lifespan)
    app.state.serving = Serving(llm, options)
    app.state.dashboard = dashboard.Dashboard(llm, app.state.serving.names[0])
    routers = [completions.router, chat.router, tokenize.router, admin.router, dashboard.router]
    if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
        routers.append(admin.dev_router)
    for router in routers:
        app.include_router(router)
    add_handlers(app)
    # The last one added is the first to be passed.
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    if keys := [key for key in [*options.api_key, os.environ.get("VLLM_API_KEY")] if key]:
        app.add_middleware(Auth, keys=keys)
    app.state.registry = _registry(llm)
    app.add_middleware(HttpMetrics, registry=app.state.registry)
    app.add_middleware(CORSMiddleware, allow_origins=options.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """uvicorn ends this when the last answer is sent, or its time for that is over."""
    llm: AsyncLLM = app.state.serving.llm
    logging_stats = asyncio.create_task(_log_stats(llm))
    try:
        yield
    finally:
        logging_stats.cancel()
        await asyncio.to_thread(llm.shutdown)


async def _log_stats(llm: AsyncLLM) -> None:
    """Steps write a line every 10 seconds; an engine that has just become idle owes one, too."""
    if llm.llm_engine.stat_logger is None:
        return
    with suppress(EngineDeadError):
        while True:
            await asyncio.sleep(LOG_CHECK_S)
            await llm.run_between_steps(llm.llm_engine.stat_logger.log_if_due)


def _registry(llm: AsyncLLM) -> Any:
    """Of the engine's metrics; or an empty one, if it keeps none."""
    from prometheus_client import CollectorRegistry

    stat_logger = llm.llm_engine.stat_logger
    return CollectorRegistry() if stat_logger is None else stat_logger.registry


class BodyLimit:
    """Refuses bodies that are too large, before they fill the memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        length = Headers(scope=scope).get("content-length", "")
        error = f"The body is larger than the {self.max_bytes} bytes that this server takes."
        if length.isdigit() and int(length) > self.max_bytes:
            return await json_response(error_body(error, 413), 413)(scope, receive, send)
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise HTTPException(413, error)
            return message

        await self.app(scope, counted, send)


class Auth:
    """Asks for one of the keys. They are compared by their digests, in a time that tells nothing about them."""

    def __init__(self, app: ASGIApp, keys: list[str]) -> None:
        self.app, self.digests = app, [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and self._is_guarded(scope) and not self._knows(
                Headers(scope=scope).get("authorization", "")):
            return await json_response({"error": "Unauthorized"}, 401)(scope, receive, send)
        await self.app(scope, receive, send)

    @staticmethod
    def _is_guarded(scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return path.startswith(GUARDED) or path in _LEVERS

    def _knows(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        digest = hashlib.sha256(token.strip().encode("utf-8", "replace")).digest()
        known = [hmac.compare_digest(digest, other) for other in self.digests]  # all of them, whichever fits
        return scheme.lower() == "bearer" and any(known)


class HttpMetrics:
    """Counts answers and measures how long they take, by route and status."""

    def __init__(self, app: ASGIApp, registry: Any) -> None:
        from prometheus_client import Counter, Histogram

        self.app = app
        self.requests = Counter("http_requests", "Answers", ["handler", "method", "status"], registry=registry)
        self.seconds = Histogram("http_request_duration_seconds", "From the request to the end of its answer",
                                 ["handler", "method"], buckets=_SECONDS, registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNCOUNTED:
            return await self.app(scope, receive, send)
        began, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            route = scope.get("route")  # names of paths that do not exist would be labels without end
            handler = getattr(route, "path", "none")
            method = scope["method"] if scope["method"] in ("GET", "POST", "OPTIONS", "HEAD") else "other"
            self.requests.labels(handler, method, f"{status // 100}xx").inc()
            self.seconds.labels(handler, method).observe(time.perf_counter() - began)
