"""Fixtures that the tests of the runtime share."""

from tests.runtime.spare_workers import spare_workers
from tests.strategies.warm_workers import warm_workers

__all__ = ["spare_workers", "warm_workers"]
