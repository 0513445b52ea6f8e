"""Fixtures that the tests of callbacks share."""

from tests.strategies.warm_workers import warm_workers

__all__ = ["warm_workers"]
