"""Fixtures that the tests of parity share."""

from tests.parity.layouts import layouts, layouts_of_any_kind
from tests.strategies.warm_workers import warm_workers

__all__ = ["layouts", "layouts_of_any_kind", "warm_workers"]
