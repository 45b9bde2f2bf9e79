"""Methods put before those of an object's own class: how an integration changes an object that others have built."""

from functools import cache
from typing import Any


def mix_in(methods: type, target: Any) -> None:
    """Gives `target` the methods of the class `methods`, before those of its own class, whose name it keeps.

    It can be copied and pickled if it could be before.

    >>> class Loud:
    ...     def speak(self):
    ...         return super().speak().upper()
    >>> class Dog:
    ...     def speak(self):
    ...         return "woof"
    >>> rex = Dog()
    >>> mix_in(Loud, rex)
    >>> rex.speak(), type(rex).__name__, Dog().speak()
    ('WOOF', 'Dog', 'woof')
    """
    # Not functions set as attributes of the object: these have no `super()`, and a copy of the object would share them.
    target.__class__ = _mixed(methods, type(target))


@cache
def _mixed(methods: type, present: type) -> type:
    """Returns the class with both; always the same one."""

    def reduce(self: Any, protocol: Any) -> Any:
        # By its parts: pickle would look for the class by its name, and find the one of the library.
        return _new, (methods, present), self.__getstate__()

    names = {"__module__": present.__module__, "__qualname__": present.__qualname__, "__doc__": present.__doc__}
    return type(present.__name__, (methods, present), names | {"__reduce_ex__": reduce})


def _new(methods: type, present: type) -> Any:
    return object.__new__(_mixed(methods, present))
