"""Methods that are easily taken for attributes: `if result.skipped:`, without the call, raises and is not true."""

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:

    def to_be_called(method: F) -> F:
        """Returns `method`, of which a type checker knows that its bare name is always true."""
        return method

else:

    class to_be_called:  # a decorator
        """A method as before, but its bare name has no truth value and equals no flag or text."""

        def __init__(self, method: Callable[..., Any]) -> None:
            update_wrapper(self, method)

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            # Of the class, the plain function: documentation, signatures and pickles find what they know.
            return self.__wrapped__ if instance is None else Uncalled(self.__wrapped__, instance)


class Uncalled(partial[Any]):
    """A method of an object, not called yet."""

    def __bool__(self) -> NoReturn:
        self._refuse("has no truth value")

    def __eq__(self, other: object) -> bool:
        # Only with what such methods return: code that compares functions works as with others.
        if isinstance(other, bool | str | list):
            self._refuse(f"is never equal to {other!r}")
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def _refuse(self, why: str) -> NoReturn:
        name = self.func.__name__
        raise TypeError(f"`{name}` is a method, which {why}. Call it: `result.{name}()`.")
