"""Errors as OpenAI's clients expect them: a status code, and one JSON object that says what was wrong and where."""

from __future__ import annotations

import json
import re
from typing import Any

from breakgraph.errors import BreakgraphError, ConfigError

__all__ = ["ApiError", "api_error", "field_error", "shown"]

_LONGEST = 2000
_SHOWN = 120
_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    503: "server_overloaded",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request that gets no answer, and why.

    Args:
        message: What, why, and what to do.
        status: HTTP status code.
        param: The field that is to blame.
        code: OpenAI's or our name of the kind of error.

    Attributes:
        message: As given.
        status: As given.
        param: As given.
        code: As given.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message if len(message) <= _LONGEST else f"{message[:_LONGEST]} ..."
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object: ``{"error": {"message", "type", "param", "code"}}``."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def field_error(param: str, *, got: object, expected: str, why: str) -> ApiError:
    """An error about one field.

    Args:
        param: Its name, with its place: ``messages[0].content``.
        got: What it was.
        expected: What it may be.
        why: Why nothing else will do.
    """
    return ApiError(f"{param} is {shown(got)}; expected {expected}. {why}".rstrip(), param=param, code="invalid_value")


def shown(value: object) -> str:
    """A value as JSON spells it, cut to what a line has room for.

    Args:
        value: From a body.
    """
    if value is None or isinstance(value, (bool, str)):
        return f"{json.dumps(value[:_SHOWN] if isinstance(value, str) else value, ensure_ascii=False):.{_SHOWN}}"
    return f"{value!r:.{_SHOWN}}"


def api_error(error: BaseException) -> ApiError:
    """What a client is told of any error.

    A `ConfigError` is the client's to mend: 400, with the field where it is about one. Anything else is the server's: 500, with
    its type and text, since whoever runs this server wrote the model, and a text that says nothing helps nobody.

    Args:
        error: What was raised.
    """
    if isinstance(error, ApiError):
        return error
    text = " ".join(str(error).split("\n"))
    if isinstance(error, ConfigError):
        found = re.match(r"SamplingParams\.(\w+)", error.what)
        param = None if found is None else found[1]
        if found is not None:
            text = text.replace(found[0], found[1])
        return ApiError(text, param=param, code="invalid_value")
    kind = "" if isinstance(error, BreakgraphError) else f"{type(error).__name__}: "
    return ApiError(f"The answer could not be computed: {kind}{text}", status=500, code="server_error")
