"""What is chosen while a plan is made: every layer is split that can be, until a call sends it back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from fractions import Fraction

from lightning_mgpu.errors import PartitionError
from lightning_mgpu.partition.tensor.call import Weight
from lightning_mgpu.partition.tensor.layout import Layout
from lightning_mgpu.partition.tensor.sharded import NeedsCutsError, Sharded
from lightning_mgpu.partition.tensor.steering import Steering

__all__ = ["Choosing"]


class Choosing:
    """Holds the choices of the attempts so far; each attempt leaves fewer.

    Attributes:
        num_ranks: number of ranks.
        steering: what the user asked for.
        weights: the weights that calls asked about.
        refused: weights that stay whole, with the reason.
        gathered: weights of column layers whose results are put together, with the reason.
        refused_inputs: inputs that can't be split, with the reason.
    """

    def __init__(self, num_ranks: int, steering: Steering, gather_min: int) -> None:
        self.num_ranks = num_ranks
        self.steering = steering
        self.gather_min = gather_min
        self.weights: dict[str, Weight] = {}
        self.refused: dict[str, str] = {}
        self.gathered: dict[str, str] = {}
        self.refused_inputs: dict[int, str] = {}
        self._cuts: dict[str, set[int]] = {}
        self._notes: dict[str, str] = {}

    def size(self) -> int:
        """Counts what was decided, which grows with every decision."""
        cuts = sum(map(len, self._cuts.values()))
        return 2 * len(self.refused) + len(self.gathered) + len(self.refused_inputs) + cuts

    # -- what rules ask --------------------------------------------------------------------------------------------

    def split(self, weight: Weight, given: Sharded | None) -> Layout | None:
        """Says how the weight of a contraction is split: as its input is, or else by its outputs where they divide."""
        self.weights.setdefault(weight.name, weight)
        try:
            return self._contracted(weight, given)
        except _WholeError as error:
            self._notes[weight.name] = str(error)
            return None

    def split_vocabulary(self, weight: Weight) -> Layout | None:
        """Says how the weight of an embedding is split: by its rows, where it is large or a head shares it."""
        self.weights.setdefault(weight.name, weight)
        try:
            return self._looked_up(weight)
        except _WholeError as error:
            self._notes[weight.name] = str(error)
            return None

    def gathers(self, name: str) -> bool:
        return name in self.gathered

    def follows(self, name: str, layout: Layout) -> bool:  # noqa: ARG002 - the plan asks for the layout, too
        return name not in self.refused

    # -- how a weight is split -------------------------------------------------------------------------------------

    def _contracted(self, weight: Weight, given: Sharded | None) -> Layout:
        role = self.steering.role(weight.name)
        if weight.name in self.refused or role == "whole":
            raise _WholeError("asked to be whole" if role == "whole" else self.refused[weight.name])
        if weight.refusal:
            raise self._refusal(weight, role)
        if given is not None:
            return Layout(weight.out_dim, self._segments(weight)) if role == "column" else Layout(weight.in_dim, given.segments)
        if role == "row":
            width = weight.shape[weight.in_dim]
            if width % self.num_ranks:
                raise self._indivisible(weight, role, f"{width} inputs", width)
            return Layout(weight.in_dim, (width,))
        return self._column(weight, role)

    def _looked_up(self, weight: Weight) -> Layout:
        role, rows = self.steering.role(weight.name), weight.shape[0]
        if weight.name in self.refused or role == "whole":
            raise _WholeError("asked to be whole" if role == "whole" else self.refused[weight.name])
        if weight.refusal:
            raise self._refusal(weight, role)
        if role == "row" and self.steering.names.is_shared(weight.name):
            return Layout(1, (weight.shape[1],))
        if role in ("column", "row") and not self.steering.names.is_shared(weight.name):
            raise PartitionError(f'{self._asked(weight, role)}, but it is an embedding; ask for "vocabulary" or "whole"')
        if role is None and weight.shape[0] * weight.shape[1] < self.gather_min:
            raise _WholeError(f"fewer than {self.gather_min:,} elements")
        if rows % self.num_ranks:
            if role is not None:
                raise self._indivisible(weight, role, f"{rows} rows", rows)
            raise _WholeError(f"its {rows} rows do not divide by {self.num_ranks}")
        return Layout(0, (rows,))

    def _column(self, weight: Weight, role: str | None) -> Layout:
        segments, width = self._segments(weight), weight.shape[weight.out_dim]
        if all(size % self.num_ranks == 0 for size in segments):
            return Layout(weight.out_dim, segments)
        odd = next(size for size in segments if size % self.num_ranks)
        what = f"{width} outputs" if len(segments) == 1 else f"segments of {odd} outputs"
        if role is not None:
            raise self._indivisible(weight, role, what, odd)
        raise _WholeError(f"its {what} do not divide by {self.num_ranks}")

    def _segments(self, weight: Weight) -> tuple[int, ...]:
        width, cuts = weight.shape[weight.out_dim], self._cuts.get(weight.name, set())
        if weight.num_parts > 1 and not {i * width // weight.num_parts for i in range(weight.num_parts)} <= cuts:
            raise NeedsCutsError({weight.name}, (Fraction(i, weight.num_parts) for i in range(weight.num_parts)))
        bounds = sorted({0, width} | cuts)
        return tuple(b - a for a, b in itertools.pairwise(bounds))

    # -- what attempts say -----------------------------------------------------------------------------------------

    def cut(self, needs: NeedsCutsError) -> str:
        """Cuts weights into segments.

        Args:
            needs: asks for it.

        Returns:
            Why it can't be done; an empty string where weights have more segments now.
        """
        reason = "takes apart values that are split otherwise"
        fresh = False
        for name in needs.sources & self.weights.keys():
            weight = self.weights[name]
            width = weight.shape[weight.out_dim]
            known = self._cuts.get(name, set())
            wanted = known | {int(place * width) for place in needs.places}
            bounds = sorted(wanted | {0, width})
            odd = next((b - a for a, b in itertools.pairwise(bounds) if (b - a) % self.num_ranks), None)
            if odd is not None or any((place * width).denominator != 1 for place in needs.places):
                reason = f"takes apart {width} features into segments of {odd}, which do not divide by {self.num_ranks}"
            elif wanted != known:
                self._cuts[name], fresh = wanted, True
        return "" if fresh else reason

    def blame(self, name: str, reason: str) -> None:
        """Takes back that a layer is split, or puts its result together at once where it is large or was asked for."""
        weight = self.weights.get(name)
        large = weight is not None and math.prod(weight.shape) >= self.gather_min
        if name not in self.gathered and (large or self.steering.role(name) in ("column", "vocabulary")):
            self.gathered[name] = reason
        else:
            self.refuse(name, reason)

    def refuse(self, name: str, reason: str) -> None:
        """Takes back that a layer, or an input, is split."""
        if name.startswith("input "):
            self.refused_inputs[int(name.removeprefix("input "))] = reason
            return
        role = self.steering.role(name)
        if name in self.weights and role not in (None, "whole"):
            raise PartitionError(f"{self._asked(self.weights[name], role)}, but {reason}; ask for 'whole'")
        self.refused[name] = reason

    def end(self, unpaired: Iterable[str]) -> bool:
        """Takes back that layers are split whose parts only the result needs, unless they are large or were asked for."""
        kept = True
        for name in unpaired:
            weight = self.weights.get(name)
            large = weight is not None and math.prod(weight.shape) >= self.gather_min
            if not large and self.steering.role(name) is None:
                self.refuse(name, f"its result is the forward's, and it has fewer than {self.gather_min:,} elements")
                kept = False
        return kept

    def reason(self, name: str) -> str:
        """Returns why a weight stays whole; an empty string where nothing was said."""
        return self.refused.get(name) or self._notes.get(name, "")

    # -- errors ----------------------------------------------------------------------------------------------------

    def _asked(self, weight: Weight, role: str | None) -> str:
        return f"{self.steering.pattern(weight.name)!r} asks for {role!r} of {weight.name!r}"

    def _refusal(self, weight: Weight, role: str | None) -> Exception:
        if role is None:
            return _WholeError(weight.refusal)
        return PartitionError(f"{self._asked(weight, role)}, but {weight.refusal}; ask for 'whole'")

    def _indivisible(self, weight: Weight, role: str, what: str, size: int) -> PartitionError:
        fitting = [k for k in range(2, min(size, 64) + 1) if size % k == 0]
        instead = f"or tensor_parallel_size {' or '.join(map(str, fitting[:4]))}" if fitting else ""
        return PartitionError(
            f"{self._asked(weight, role)}, but its {what} do not divide by {self.num_ranks}; "
            f"use a multiple of {self.num_ranks}, {instead or 'another tensor_parallel_size'}, or ask for 'whole'"
        )


class _WholeError(Exception):
    """Says why a weight is left whole."""
