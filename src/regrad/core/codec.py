"""Values to JSON and back, by pydantic's TypeAdapter, which is loaded on first use."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from regrad.core.errors import InvalidPlan

T = TypeVar("T")


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def dump(value: object) -> str:
    """``value``, a dataclass of ``core``, as indented JSON."""
    kind: Any = type(value)
    text: bytes = _adapter(kind).dump_json(value, indent=2)
    return text.decode()


def plain(value: object) -> Any:
    """``value`` as dicts, lists, strings and numbers that ``json.dumps`` takes."""
    kind: Any = type(value)
    return _adapter(kind).dump_python(value, mode="json")


def load(kind: type[T], text: str | bytes) -> T:
    """Read what :func:`dump` wrote. Raises :class:`InvalidPlan` with the first thing that is wrong."""
    from pydantic import ValidationError

    untyped: Any = kind  # a type checker does not take type[T] for hashable
    adapter = _adapter(untyped)
    try:
        value: T = adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole text"
        raise InvalidPlan(f"this is not a {kind.__name__} in JSON: {first['msg']} at {where}") from None
    return value
