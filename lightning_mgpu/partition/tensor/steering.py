"""What the user asks for of single layers: roles by patterns of names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from lightning_mgpu.errors import PartitionError
from lightning_mgpu.partition.names import Names

__all__ = ["ROLES", "Steering"]

ROLES = ("column", "row", "vocabulary", "whole")


class Steering:
    """Finds the role that is asked for of a weight.

    A pattern names modules, as ``blocks.*.fc`` or just ``fc``, or single parameters; a shared one goes by any of its names.

    Args:
        roles: role by pattern; of several that match, the last counts.
        names: names below the root.

    Raises:
        PartitionError: for a role that there is not.
    """

    def __init__(self, roles: Mapping[str, str], names: Names) -> None:
        for pattern, role in roles.items():
            if role not in ROLES:
                raise PartitionError(f"{pattern!r} asks for {role!r}; ask for one of {', '.join(map(repr, ROLES))}")
        self.roles = dict(roles)
        self.names = names

    def pattern(self, name: str) -> str | None:
        """Returns the pattern that decides about a weight."""
        found = None
        for pattern in self.roles:
            if any(_matches(alias, pattern) for alias in self.names.aliases.get(name, ())):
                found = pattern
        return found

    def role(self, name: str) -> str | None:
        """Returns what is asked for of a weight, ``None`` where nothing is."""
        pattern = self.pattern(name)
        return None if pattern is None else self.roles[pattern]

    def check_matches(self, weights: Iterable[str]) -> None:
        """Raises where a pattern matches none of the weights that could be split.

        Raises:
            PartitionError: with the nearest names.
        """
        aliases = [alias for name in weights for alias in self.names.aliases[name]]
        layers = list(dict.fromkeys(alias.rpartition(".")[0] or alias for alias in aliases))
        for pattern in self.roles:
            if not any(_matches(alias, pattern) for alias in aliases):
                near = difflib.get_close_matches(pattern, layers, n=3, cutoff=0.3) or layers[:3]
                raise PartitionError(
                    f"{pattern!r} matches no layer of the recorded forward that can be split; the nearest are "
                    f"{', '.join(map(repr, near)) or 'none'}"
                )


def _matches(name: str, pattern: str) -> bool:
    layer = name.rpartition(".")[0]
    return any(fnmatchcase(given, p) for given in (name, layer) if given for p in (pattern, f"*.{pattern}"))
