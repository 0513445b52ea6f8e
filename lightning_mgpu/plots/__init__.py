"""Pictures of a pipeline run."""

from lightning_mgpu.plots.gantt import save_gantt

__all__ = ["save_gantt"]
