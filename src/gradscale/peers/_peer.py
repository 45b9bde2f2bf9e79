"""One other system: its rules, and how it reads and writes its state."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gradscale.peers._saved import Imported
from gradscale.policies.contract import Policy, ScaleState


@dataclass(frozen=True, slots=True)
class Peer:
    """Another system's loss scalers.

    Attributes:
        name: what users call it.
        variants: its rules, by the name of the class or function that holds each; the first is the default. Every one
            is a function of that class's own keyword arguments.
        read: turns its saved mapping into a policy and a state; None where it saves no mapping.
        write: turns a policy and a state into its saved mapping; None where it saves no mapping.
    """

    name: str
    variants: Mapping[str, Callable[..., Policy]]
    read: Callable[[Mapping[str, Any]], Imported] | None = None
    write: Callable[[Policy, ScaleState], dict[str, Any]] | None = None

    def build(self, variant: str | None, config: Mapping[str, Any]) -> Policy:
        """Returns the policy that `variant` of this system follows with `config`."""
        builder = next(iter(self.variants.values())) if variant is None else self._variant(variant)
        # Bound first: a TypeError from inside the builder must not be reported as a wrong keyword.
        try:
            inspect.signature(builder).bind(**config)
        except TypeError as error:
            accepted = ", ".join(inspect.signature(builder).parameters)
            raise TypeError(
                f"`preset({self.name!r})` takes that system's own keywords: {accepted or 'none'}. "
                f"Received: {', '.join(config) or 'none'} ({error})."
            ) from None
        return builder(**config)

    def _variant(self, wanted: str) -> Callable[..., Policy]:
        """Returns the rule called `wanted`: its whole name, or the last part of it, whatever the case.

        `wanted` may have more or fewer parts before the last, but none that only another rule has. Of two rules that
        differ only in a note in parentheses, the one with the same note is returned.
        """
        wanted = str(wanted)
        path, last, note = _parts(wanted)
        names = {_parts(name): rule for name, rule in self.variants.items()}
        path &= set().union(*(known for known, _, _ in names))
        alike = {name: rule for name, rule in names.items() if name[1] == last and path <= name[0]}
        same_note = {name: rule for name, rule in alike.items() if name[2] == note}
        same_path = {name: rule for name, rule in same_note.items() if name[0] == path}
        for found in (set(rules.values()) for rules in (same_path, same_note, alike)):
            if len(found) == 1:
                return found.pop()
        raise ValueError(
            f"`variant` must name a rule of {self.name}. Received: {wanted!r}. Known: {', '.join(self.variants)}."
        )


def _parts(name: str) -> tuple[frozenset[str], str, str]:
    """Returns the parts of a name before its last, its last, and the note that follows in parentheses."""
    words, _, note = name.strip().lower().partition(" (")
    *path, last = re.split(r"[.\s]", words)
    return frozenset(path), last, note
