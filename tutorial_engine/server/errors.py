"""Errors as clients see them: a status, and a JSON body in OpenAI's shape.

    VLLMValidationError("top_p must be ...", parameter="top_p")
      -> 400 {"error": {"message": "top_p must be ...", "type": "BadRequestError", "param": "top_p", "code": 400}}

A client's mistake is explained to the client. A failure of the server is explained in the log, and the client learns
no more than that it happened: messages of exceptions hold paths, addresses, and what other people have asked.

Owns: which error is which status. Does not own: when they are raised.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from tutorial_engine.exceptions import EngineDeadError, EnginePausedError, VLLMClientError, VLLMValidationError

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
MAX_LISTED = 10  # errors of one body
MAX_MESSAGE = 1000  # characters
_PATH = re.compile(r"(?<![\w/:.<])(?:[A-Za-z]:\\|~?/)(?:[\w.+@-]+[/\\])+[\w.+@-]*")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 422: "UnprocessableEntityError", 500: "InternalServerError",
          501: "NotImplementedError", 503: "ServiceUnavailable"}


class QueueFullError(Exception):
    """So many requests are waiting that another one is better sent somewhere else, or later."""


class ModelNotFoundError(Exception):
    """The request names a model that is not served here."""


def dump(content: Any) -> bytes:
    """Compact JSON. Half a surrogate pair, which UTF-8 cannot express, becomes a question mark."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dump(content), status, headers, media_type="application/json")


def error_body(message: str, status: int, param: str | None = None, kind: str | None = None) -> dict[str, Any]:
    """The JSON of an error; paths and addresses are cut out of the message, which is kept short."""
    message = _ADDRESS.sub("<address>", _PATH.sub("<path>", message))
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + " ..."
    kind = kind or _TYPES.get(status) or HTTPStatus(status).phrase
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """(status, body) for anything that generating may raise."""
    if isinstance(error, ModelNotFoundError):
        return 404, error_body(str(error), 404, "model")
    if isinstance(error, VLLMClientError):
        param = error.parameter if isinstance(error, VLLMValidationError) else None
        return 400, error_body(str(error), 400, param)
    if isinstance(error, NotImplementedError):
        return 501, error_body(str(error), 501)
    if isinstance(error, (EnginePausedError, QueueFullError)):
        return 503, error_body(str(error), 503)
    if isinstance(error, EngineDeadError):
        return 503, error_body("The engine has stopped; this server must be started anew.", 503)
    logger.error("A request failed.", exc_info=error)
    return 500, error_body("The server failed while it worked on this request; its log says why.", 500)


def error_response(error: Exception) -> Response:
    status, body = describe(error)
    return json_response(body, status, {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None)


def _validation_response(error: RequestValidationError, content_type: str) -> Response:
    """A body of the wrong shape. Which field, and what is wrong with it; never what it holds."""
    errors = error.errors()
    for entry in errors:
        if isinstance(own := entry.get("ctx", {}).get("error"), VLLMValidationError):
            return error_response(own)
    first, param = errors[0], None
    if first["type"] == "json_invalid":
        message = f"The body is not JSON: {first['ctx']['error']}, at character {first['loc'][-1]}."
    elif first["loc"] == ("body",) and "json" not in content_type:
        message = "Unsupported media type: send JSON, with the header Content-Type: application/json."
    else:
        paths = [".".join(str(part) for part in entry["loc"] if part != "body") for entry in errors]
        listed = [f"{path or 'body'}: {entry['msg']}" for path, entry in zip(paths, errors)][:MAX_LISTED]
        message, param = "; ".join(listed) + (" ..." if len(errors) > MAX_LISTED else ""), paths[0] or None
    return json_response(error_body(message, 400, param, "Bad Request"), 400)


def add_handlers(app: FastAPI) -> None:
    """Have every error answered in the shape above."""
    async def invalid(request: Request, error: Any) -> Response:
        return _validation_response(error, request.headers.get("content-type", ""))

    async def http(request: Request, error: Any) -> Response:
        return json_response(error_body(str(error.detail), error.status_code), error.status_code, error.headers)

    async def other(request: Request, error: Exception) -> Response:
        return error_response(error)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    for kind in (VLLMClientError, ModelNotFoundError, QueueFullError, EnginePausedError, EngineDeadError,
                 NotImplementedError, Exception):
        app.add_exception_handler(kind, other)
