"""Pipeline parallelism for unmodified LightningModules: ``Trainer(strategy="mgpu_pipeline", devices=4)``.

Importing the package registers its strategies with Lightning. A worker process imports it too, but holds stages only, so it
leaves Lightning alone until a module of the user's asks for more.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["LayerwiseStrategy", "PipelineStrategy", "Timeline", "Workers", "__version__"]

__version__ = "0.1.0"

if TYPE_CHECKING or os.environ.get("LIGHTNING_MGPU_ROLE") != "worker":
    from lightning_mgpu.runtime.workers import Workers
    from lightning_mgpu.strategies.layerwise import LayerwiseStrategy
    from lightning_mgpu.strategies.pipeline import PipelineStrategy
    from lightning_mgpu.timeline import Timeline

if not TYPE_CHECKING:
    _HOMES = {
        "LayerwiseStrategy": "lightning_mgpu.strategies.layerwise",
        "PipelineStrategy": "lightning_mgpu.strategies.pipeline",
        "Timeline": "lightning_mgpu.timeline",
        "Workers": "lightning_mgpu.runtime.workers",
    }

    def __getattr__(name: str) -> Any:
        """Imports a public name where it was left out: in a worker that imports a module of the user's for a class in it."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)
