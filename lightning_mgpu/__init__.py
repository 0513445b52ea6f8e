"""Pipeline parallelism for unmodified LightningModules: ``Trainer(strategy="mgpu_pipeline", devices=4)``.

Importing the package registers its strategies with Lightning. A worker process imports it too, but holds stages only, so it
leaves Lightning alone.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

__all__ = ["PipelineStrategy", "Timeline", "Workers", "__version__"]

__version__ = "0.1.0"

if TYPE_CHECKING or os.environ.get("LIGHTNING_MGPU_ROLE") != "worker":
    from lightning_mgpu.runtime.workers import Workers
    from lightning_mgpu.strategies.pipeline import PipelineStrategy
    from lightning_mgpu.timeline import Timeline
