"""The application: which path is answered by whom, and what becomes of errors."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from deepspeed_ext.server.answers import Events
from deepspeed_ext.server.body import object_of
from deepspeed_ext.server.chat import chat
from deepspeed_ext.server.completions import complete
from deepspeed_ext.server.embeddings import embed
from deepspeed_ext.server.errors import ApiError
from deepspeed_ext.server.service import Left, Service

_logger = logging.getLogger("deepspeed_ext")
_Handler = Callable[[Service, dict[str, Any], Request], Awaitable[JSONResponse | Events]]


def app_of(service: Service, allow_origins: Sequence[str] = ()) -> Starlette:
    """Return the application of a service.

    Args:
        service: that answers.
        allow_origins: pages of which origins a browser may let ask.
    """

    async def health(request: Request) -> Response:
        service.check_ready()
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        running, waiting = service.load
        text = service.metrics.text(running, waiting)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def models(request: Request) -> Response:
        service.check_key(request)
        return JSONResponse({"object": "list", "data": [service.card]})

    async def model(request: Request) -> Response:
        service.check_key(request)
        service.check_model(request.path_params["name"])
        return JSONResponse(service.card)

    middleware = []
    if allow_origins:
        allowed: Any = dict(allow_origins=list(allow_origins), allow_methods=["*"])
        middleware = [Middleware(CORSMiddleware, allow_headers=["*"], **allowed)]
    return Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/completions", _answering(service, complete), methods=["POST"]),
            Route("/v1/chat/completions", _answering(service, chat), methods=["POST"]),
            Route("/v1/embeddings", _answering(service, embed), methods=["POST"]),
        ],
        middleware=middleware,
        exception_handlers={ApiError: _refused, HTTPException: _unknown, Exception: _failed},
    )


def _answering(service: Service, handler: _Handler) -> Callable[[Request], Awaitable[Any]]:
    async def answer(request: Request) -> Any:
        try:
            service.check_key(request)
            service.check_ready()  # before the body is read
            given = await object_of(request, service.limits)
            service.check_model(given.get("model"))
            return await handler(service, given, request)
        except Left:
            return Response(status_code=499)  # for nobody
        except ApiError as error:
            if error.status < 500:
                service.metrics.ends["refused"] += 1
            raise

    return answer


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path!r:.100} is not served here"
    status = 404 if error.status_code == 405 else error.status_code
    told = ApiError(status, what, code="unknown_url", headers=dict(error.headers or {}))
    return JSONResponse(told.body, told.status, told.headers)


async def _failed(request: Request, error: Exception) -> Response:
    _logger.error("server: a request failed", exc_info=error)
    return JSONResponse(ApiError(500, "the server has failed").body, 500)
