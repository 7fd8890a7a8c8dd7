"""What pools and managers have in common as Python objects: no misspelt attributes, no copies.

It knows nothing of what the objects are.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from torch_vmm.errors import NotCopyableError


def _a(what: str) -> str:
    return f"{'an' if what[0] in 'AEIOU' else 'a'} {what}"


def _refusal(what: str, cure: str) -> NotCopyableError:
    return NotCopyableError(f"{_a(what)} cannot be copied or pickled: {cure}", what=what)


def refuse_copies(cls: type, cure: str) -> None:
    """Makes ``copy`` and ``pickle`` of a class of the extension's say what to do instead."""

    def reduce(self: object) -> NoReturn:
        raise _refusal(cls.__name__, cure)

    cls.__reduce__ = reduce  # type: ignore[assignment]


class Guarded:
    """Base of a class whose objects take no attribute that they do not have, and are never copied.

    A subclass outside the package may add attributes of its own.
    """

    _guarded = False
    _meant: ClassVar[Mapping[str, str]] = {}  # names that do not exist, and which one is meant by each
    _elsewhere: ClassVar[Mapping[str, str]] = {}  # names that another class has, and how that is used
    _instead_of_a_copy = "keep another reference to it"

    def __init_subclass__(cls, *, guarded: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._guarded = guarded

    if not TYPE_CHECKING:  # or no checker would find a misspelt attribute

        def __setattr__(self, name: str, value: object) -> None:
            """Refuses a name that neither the class nor its annotations have."""
            cls = type(self)
            if cls._guarded and not hasattr(cls, name) and name not in _declared(cls):
                public = [each for each in dir(cls) if not each.startswith("_")]
                close = sorted((each for each in public if name in each), key=len) or difflib.get_close_matches(
                    name, public, n=1
                )
                if name in cls._meant:
                    close = [cls._meant[name]]
                hint = f"; did you mean {close[0]!r}?" if close else ""
                if name in cls._elsewhere:
                    hint = f": {cls._elsewhere[name]}"
                raise AttributeError(f"{_a(cls.__name__)} has no attribute {name!r}{hint}", name=name, obj=self)
            # A function may stand in for a method, in a test; that it were to be called by one that takes functions is
            # more likely what was meant.
            if cls._guarded and name in _methods(cls) and (not callable(value) or name.startswith("on_")):
                raise AttributeError(
                    f"{name}() is a method of {cls.__name__}: it is called, not set", name=name, obj=self
                )
            object.__setattr__(self, name, value)

    def __reduce__(self) -> NoReturn:
        raise _refusal(type(self).__name__, self._instead_of_a_copy)


@functools.cache
def _methods(cls: type) -> set[str]:
    """What can be called of a class and its bases, without what begins with an underscore."""
    return {name for name in dir(cls) if not name.startswith("_") and inspect.isroutine(getattr(cls, name))}


@functools.cache  # reading annotations takes 10 us
def _declared(cls: type) -> set[str]:
    """The attributes that a class and its bases name in annotations."""
    return {name for base in cls.__mro__ for name in inspect.get_annotations(base)}
