"""Profilers show the lead's process; the numbers stay those of one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler

from tests.parity.layouts import Layouts, MakeTrainer, assert_equal_trees
from tests.parity.measured import Measured, left, loader

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule will be overridden")
WARNING = (
    r"PyTorchProfiler sees only what runs in this process, one of 2, and not by module; PipelineStrategy\(timeline=True\) "
    "shows all stages"
)


def profile(make: MakeTrainer, make_profiler: Callable[[], Profiler | str]) -> tuple[Any, Trainer]:
    """Trains, and evaluates with the same Trainer."""
    module, trainer = Measured(), make(max_epochs=2, profiler=make_profiler())
    trainer.fit(module, loader(), loader(20))
    found = trainer.test(module, loader(20), verbose=False)
    return (found, left(module, trainer)), trainer


def actions(profiler: Any) -> set[str]:
    """Lists what a profiler measured, under the names it has on one device."""
    found = getattr(profiler, "recorded_durations", None) or getattr(profiler, "profiled_actions", {})
    return {name.replace("PipelineStrategy", "SingleDeviceStrategy") for name in found}


@pytest.mark.parametrize(
    "make_profiler", [lambda: "simple", SimpleProfiler, PassThroughProfiler], ids=["name", "simple", "none"]
)
def test_simple_profiler(make_profiler: Any, layouts: Layouts) -> None:
    def observe(make: MakeTrainer) -> Any:
        rest, trainer = profile(make, make_profiler)
        counts = {name: len(each) for name, each in getattr(trainer.profiler, "recorded_durations", {}).items()}
        return rest, {name.replace("PipelineStrategy", "SingleDeviceStrategy"): count for name, count in counts.items()}

    _, counts = layouts.same(observe)
    assert (counts == {}) == (make_profiler is PassThroughProfiler)


def test_advanced_profiler(layouts: Layouts, tmp_path: Path) -> None:
    def observe(make: MakeTrainer) -> Any:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        rest, trainer = profile(make, lambda: AdvancedProfiler(dirpath=folder, filename="profile"))
        return rest, sorted(actions(trainer.profiler)), sorted(path.name for path in folder.iterdir())

    _, _, names = layouts.same(observe)
    assert names == ["fit-profile.txt", "test-profile.txt"]


@pytest.mark.parametrize("options", [{}, {"record_module_names": False, "export_to_chrome": False}])
def test_pytorch_profiler(options: dict[str, Any], layouts: Layouts, tmp_path: Path) -> None:
    def observe(make: MakeTrainer) -> Any:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        rest, trainer = profile(make, lambda: PyTorchProfiler(dirpath=folder, filename="profile", **options))
        profiler: Any = trainer.profiler
        assert profiler._record_module_names == options.get("record_module_names", True)
        texts = [path.read_text() for path in folder.glob("*.txt")]
        return rest, [("optimizer_step" in text, "Self CPU" in text) for text in texts]

    expected = layouts.one_device(observe)
    with pytest.warns(UserWarning, match=WARNING):
        ours = layouts.stages(observe)
    assert_equal_trees(expected, ours)
