"""Checks of what a caller passes: one rule a field, one wording for every message. Chapter 11.

On the ground floor: config.py and pooler/params.py use it.
"""

import math
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from numbers import Integral, Real
from typing import Annotated, Any

# Type hints that carry the rule of `check_value` for the field.
Natural, Positive = Annotated[int, 0], Annotated[int, 1]
Number = Annotated[float, -math.inf]
TOO_LARGE = 2**128  # for a float32
TokenIds = Annotated[tuple[int, ...], list | tuple]  # given as either, kept as a tuple


def check_value(name: str, value: Any, rule: Any) -> None:
    """Raises ValueError unless `value` is of `rule`: a type, choices, a range, a least number.

    A least int takes integers only; a bool is not a number.
    """
    if isinstance(rule, tuple):
        fits, wanted = value in rule, f"one of {', '.join(map(repr, rule))}"
        wanted = "left out" if rule in ((), (None,)) else wanted
    elif isinstance(rule, range):
        fits = isinstance(value, Integral) and not isinstance(value, bool) and value in rule
        wanted = f"an integer from {rule.start} to {rule.stop - 1}"
    elif isinstance(rule, int | float):
        kinds = Integral if isinstance(rule, int) else Real
        fits = (
            isinstance(value, kinds) and not isinstance(value, bool) and rule <= value < TOO_LARGE
        )
        wanted = f"{'an integer' if kinds is Integral else 'a number'} of at least {rule}"
    else:
        fits, wanted = isinstance(value, rule), f"of type {getattr(rule, '__name__', rule)}"
    if not fits:
        raise ValueError(f"{name}={value!r} is not valid: it must be {wanted}")


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Around what reads files or templates: another form than expected is a ValueError of `what`.

    Errors that say it better themselves pass: plain ValueErrors, missing files, the ranks' own.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, FileNotFoundError | RuntimeError) or type(error) is ValueError:
            raise
        raise ValueError(f"{what} is not of the expected form: {error!r}; mend it") from error


def check_fraction(name: str, value: float) -> None:
    """Raises ValueError unless 0 < `value` <= 1."""
    if not 0 < value <= 1:
        raise ValueError(f"{name}={value!r} is not valid: it must be above 0 and at most 1")


def rule_of(hint: Any) -> Any:
    """The rule in a type hint: choices, what Annotated carries, or the type; `| None` left out."""
    match typing.get_origin(hint), typing.get_args(hint):
        case _, (inner, types.NoneType):
            return rule_of(inner)
        case typing.Literal, choices:
            return choices
        case typing.Annotated, (_, rule):
            return rule
    return hint


def check_fields(params: Any) -> None:
    """`check_value` for each field of a dataclass; None passes where it is the default.

    Lists of token ids become tuples, so that the object can be a key.
    """
    for field in fields(params):
        value = getattr(params, field.name)
        if value is None and field.default is None:
            continue
        check_value(field.name, value, rule_of(field.type))
        if isinstance(value, list | tuple):
            for token in value:
                check_value(field.name, token, 0)
            object.__setattr__(params, field.name, tuple(value))


def spread(name: str, value: Any, kind: type, n: int) -> list:
    """One params object for all n prompts, or a list with one each; None: the defaults."""
    values = value if isinstance(value, list | tuple) else [value] * n
    for item in values:
        check_value(name, item, kind | None)
    if len(values) != n:
        raise ValueError(
            f"{name}: {len(values)} given for {n} prompts: give one object for all or a list of {n}"
        )
    return [item or kind() for item in values]
