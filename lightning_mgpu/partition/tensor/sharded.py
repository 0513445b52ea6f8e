"""The state of a value in a tensor-parallel forward: whole on every rank (``None``), or dealt out along a dimension."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from lightning_mgpu.partition.tensor.layout import Layout

__all__ = ["NeedsCutsError", "NoRuleError", "Sharded"]


@dataclass(frozen=True, slots=True)
class Sharded:
    """Says how a value is dealt out, and why.

    Attributes:
        dim: the dimension it is cut along.
        segments: sizes of the parts along it that are dealt out one by one.
        sources: names of the weights (or inputs) that it is dealt out because of.
        spans: whether the dimension is the whole width of the sources, so that a place in it is a place in them.
    """

    dim: int
    segments: tuple[int, ...]
    sources: frozenset[str]
    spans: bool = True

    @property
    def layout(self) -> Layout:
        return Layout(self.dim, self.segments)

    @property
    def width(self) -> int:
        return sum(self.segments)

    def at(self, dim: int) -> Sharded:
        """Returns the same state along another dimension."""
        return replace(self, dim=dim)

    def bounds(self) -> list[int]:
        """Lists where its segments begin and end."""
        found = [0]
        for size in self.segments:
            found.append(found[-1] + size)
        return found

    def part(self, start: int, stop: int) -> Sharded:
        """Returns the state of a part along the dimension.

        Raises:
            NeedsCutsError: where the part does not begin and end with segments.
            NoRuleError: where it can't be made to, either.
        """
        bounds = self.bounds()
        if start in bounds and stop in bounds:
            segments = self.segments[bounds.index(start) : bounds.index(stop)]
            return replace(self, segments=segments, spans=self.spans and sum(segments) == self.width)
        raise self.needs(start, stop)

    def needs(self, *places: int) -> Exception:
        """Returns the error that asks for segments which begin at some places."""
        if not self.spans:
            return NoRuleError(f"takes apart {self.width} elements that are split over the ranks")
        return NeedsCutsError(self.sources, (Fraction(place, self.width) for place in places))


class NoRuleError(Exception):
    """Says why a call can't be carried out on parts of its operands.

    Attributes:
        sources: the weights to blame, where not those of all operands.
    """

    def __init__(self, reason: str, sources: frozenset[str] = frozenset()) -> None:
        super().__init__(reason)
        self.sources = sources


class NeedsCutsError(Exception):
    """Says that the sources of a value have to be cut at some places for a call to work on parts.

    Attributes:
        sources: the weights.
        places: the places, as fractions of the width.
    """

    def __init__(self, sources: Iterable[str], places: Iterable[Fraction]) -> None:
        super().__init__("needs segments")
        self.sources = frozenset(sources)
        self.places = tuple(places)
