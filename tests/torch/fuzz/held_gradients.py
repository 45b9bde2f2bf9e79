"""What `.grad` holds in the reference, and what is known of it: which gradients are stale, shared or undefined."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from tests.torch.fuzz.gradient import Gradient
from tests.torch.fuzz.outcome import Undefined


class HeldGradients(Mapping[str, Gradient]):
    """The gradients by the names of their parameters, unscaled. A parameter without a gradient is not in it.

    Attributes:
        stale: parameters whose gradients are from before the last step and were not cleared since.
        touched: parameters whose gradients have got something since they were cleared.
        defined: parameters whose `.grad` has a defined value: scaled inside a window, unscaled after an applied step.
        taken_for_new: parameters whose stale gradients were written to, which counts as clearing them.
    """

    def __init__(self) -> None:
        self._held: dict[str, Gradient] = {}
        self._shared: set[str] = set()
        self.stale: set[str] = set()
        self.touched: set[str] = set()
        self.defined: set[str] = set()
        self.taken_for_new: set[str] = set()
        self._added_to: set[str] = set()
        self._written: set[str] = set()

    def __getitem__(self, name: str) -> Gradient:
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def begin_pass(self) -> None:
        """Notes that a backward pass begins: what was written to since the last one is no longer known to be stale."""
        self._take_for_new(self._written)
        self._written = set()

    def write(self, name: str) -> None:
        """Notes an edit. It clears a stale gradient, unless a backward pass was added to that: then only zeros do."""
        gradient = self[name]
        cleared = not bool((gradient.values != 0).any())
        for each in self.names_of([gradient]):
            self._written.add(each)
            if cleared or each not in self._added_to:
                self._take_for_new({each})

    def _take_for_new(self, names: set[str]) -> None:
        self.taken_for_new |= self.stale & names
        self.stale -= names

    def accumulate(self, sums: Mapping[str, Gradient]) -> None:
        """Takes the sums that a backward pass makes."""
        if self._shared & sums.keys():
            raise Undefined("A backward pass adds to a tensor that is `.grad` of two parameters.")
        self._held |= sums
        self.touched |= sums.keys()
        self.defined |= sums.keys() - self.stale - self.taken_for_new
        self._added_to |= sums.keys() & self.stale

    def each_once(self, names: Sequence[str]) -> dict[str, Gradient]:
        """Returns the gradients of parameters, each under the first name: two parameters may have one."""
        first = {id(self[name]): name for name in reversed(names) if name in self}
        return {name: self[name] for name in names if name in first.values()}

    def names_of(self, gradients: Iterable[Gradient]) -> set[str]:
        """Returns all parameters that hold one of the gradients."""
        wanted = set(map(id, gradients))
        return {name for name, gradient in self.items() if id(gradient) in wanted}

    def share(self, source: str, target: str) -> None:
        """Makes the gradient of one parameter that of another, too."""
        if source in self.stale:
            raise Undefined("A stale gradient becomes that of another parameter.")
        if source in self:
            self._held[target] = self[source]
            self.defined.discard(target)
            self.touched.add(target)
            self._shared |= {source, target}

    def clear(self, name: str, *, set_to_none: bool) -> None:
        """Clears a gradient, as `zero_grad` does."""
        self.defined.add(name)
        for names in (self.stale, self.touched, self.taken_for_new, self._added_to, self._written):
            names.discard(name)
        gradient = self._held.pop(name, None)
        if set_to_none:
            self._shared.discard(name)
        elif gradient is not None:
            rows = None if gradient.rows is None else set()
            self._held[name] = Gradient(torch.zeros_like(gradient.values), rows)

    def close(self, divided: Iterable[str]) -> None:
        """Notes the end of a step: all that is held is stale now, and `divided` is unscaled."""
        self.stale = set(self)
        self.defined = set(divided)
        self._forget_writes()

    def discard(self) -> None:
        """Notes that what was not cleared must not be stepped any more. Zeros have no scale."""
        self.stale = {name for name, gradient in self.items() if bool((gradient.values != 0).any())}
        self.defined -= self.touched
        self._forget_writes()

    def _forget_writes(self) -> None:
        self.taken_for_new, self._added_to, self._written = set(), set(), set()
