"""Errors in the form of OpenAI's interface."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}


class RefusedError(Exception):
    """A request that gets an error; status: of HTTP; code: names the error for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


def error_body(status: int, message: str, code: str | None = None) -> dict[str, object]:
    """Returns the body of an error."""
    error_type = TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": error_type, "param": None, "code": code}}


async def on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    body = error_body(error.status, str(error), error.code)
    if request.url.path.startswith("/v1/messages"):  # as in Anthropic's API
        body["type"] = "error"
    return JSONResponse(body, error.status, dict(error.headers or {}))


async def on_http(request: Request, error: Exception) -> Response:
    """Answers requests without a route."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(error_body(error.status_code, message), error.status_code)


async def on_failure(_request: Request, error: Exception) -> Response:
    """Answers where the server itself is at fault."""
    return JSONResponse(error_body(500, f"{type(error).__name__}: {error}"), 500)
