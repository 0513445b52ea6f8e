"""One situation to compare: a module, its data, and how to cut and train it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from tests.zoo.data import Loader


@dataclass(frozen=True, eq=False)
class Case:
    """Names a module of the zoo and what to train it with.

    Attributes:
        module: Builds the module; its class names the case.
        data: Builds the loader or the data module.
        variant: Added to the name where a class serves several cases.
        num_stages: The numbers of stages to cut the module into, one run each.
        num_microbatches: Microbatches per batch.
        exact: Whether every bit must match one device, as it can when there is one microbatch.
        strategy: Further arguments of the pipeline.
        trainer: Builds further arguments of the Trainer, fresh for each run.
        validate: Whether to validate after fitting.
        predict: Whether to predict after fitting.
        untrained: The children that get no gradient: frozen, or used without it.
    """

    module: Callable[[], LightningModule]
    data: Callable[[], Loader | LightningDataModule]
    variant: str = ""
    num_stages: tuple[int, ...] = (2,)
    num_microbatches: int = 4
    exact: bool = False
    strategy: Mapping[str, Any] = field(default_factory=dict)
    trainer: Callable[[], dict[str, Any]] = dict
    validate: bool = False
    predict: bool = False
    untrained: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The class of the module, and the variant if there are several."""
        return "-".join(filter(None, [getattr(self.module, "__name__", ""), self.variant]))
