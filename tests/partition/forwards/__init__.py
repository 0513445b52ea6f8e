"""Forwards as users write them, by theme; each must give over stages what the module gives by itself."""

from tests.partition.forwards import (
    attention,
    control,
    crossing,
    indexing,
    kept,
    layers,
    losses,
    modes,
    normalised,
    randomness,
    recurrent,
    results,
    weights,
)
from tests.partition.forwards.case import FORWARDS, Forward

__all__ = [
    "FORWARDS",
    "Forward",
    "attention",
    "control",
    "crossing",
    "indexing",
    "kept",
    "layers",
    "losses",
    "modes",
    "normalised",
    "randomness",
    "recurrent",
    "results",
    "weights",
]
