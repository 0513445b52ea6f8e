"""Fixtures that the tests of parity share."""

from tests.parity.layouts import layouts
from tests.strategies.warm_workers import warm_workers

__all__ = ["layouts", "warm_workers"]
