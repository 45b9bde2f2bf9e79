"""Methods put before those of an object's own class: how an integration changes an object that others have built."""

from typing import Any


def mix_in(methods: type, target: Any) -> None:
    """Gives `target` the methods of the class `methods`, before those of its own class, whose name it keeps.

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
    present = type(target)
    names = {"__module__": present.__module__, "__qualname__": present.__qualname__, "__doc__": present.__doc__}
    target.__class__ = type(present.__name__, (methods, present), names)
