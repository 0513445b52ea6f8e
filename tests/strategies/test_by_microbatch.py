"""A training step by microbatches, as the user sees it: dealt batches, joined outputs, logged values, refusals and failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

from lightning_mgpu import PipelineStrategy
from lightning_mgpu.errors import PartitionError, PlacementError, StageError
from lightning_mgpu.strategies.by_microbatch import LoggedValues, deal_batch, join_outputs
from tests.harness import assert_same, run_fit
from tests.runtime import faults
from tests.strategies.test_schedules import run
from tests.strategies.warm_workers import WarmWorkers
from tests.zoo.case import Case
from tests.zoo.cases import GENERAL


class Pair(NamedTuple):
    """Is a batch with names."""

    x: Tensor
    weight: float


def test_deals_a_batch() -> None:
    batch = {"x": torch.arange(10), "names": [str(i) for i in range(10)], "mask": torch.ones(3, 3), "scale": 2, "pair": (1, 2)}
    parts, sizes = deal_batch(batch, lambda _: 4)
    assert sizes == (3, 3, 2, 2)
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert [part["names"] for part in parts] == [["0", "1", "2"], ["3", "4", "5"], ["6", "7"], ["8", "9"]]
    assert all(part["mask"] is batch["mask"] and part["scale"] == 2 and part["pair"] == (1, 2) for part in parts)
    pairs, _ = deal_batch(Pair(torch.arange(4), 0.5), lambda _: 2)
    assert isinstance(pairs[1], Pair)
    assert pairs[1].x.tolist() == [2, 3]
    with pytest.raises(PartitionError, match=r"the batch holds no tensor with rows, .* use schedule=\"gpipe\""):
        deal_batch(["a", "b"], lambda _: 2)


def test_joins_outputs() -> None:
    loss = torch.tensor(1.0)
    assert join_outputs([None, None], (2, 1), None) is None
    assert join_outputs([torch.tensor(3.0)] * 2, (2, 1), loss) is loss
    outputs = [
        {"loss": None, "acc": torch.tensor(0.5), "rows": torch.zeros(2, 3), "tag": "a", "odd": torch.zeros(7)},
        {"loss": None, "acc": torch.tensor(2.0), "rows": torch.ones(1, 3), "tag": "a", "odd": torch.zeros(5)},
    ]
    joined = join_outputs(outputs, (2, 1), loss)
    assert joined["loss"] is loss
    assert joined["acc"].item() == 1.0
    assert joined["rows"].shape == (3, 3)
    assert joined["tag"] == "a"
    assert [len(t) for t in joined["odd"]] == [7, 5]


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [("mean", 5 / 3), (torch.mean, 5 / 3), ("sum", 4.0), (torch.sum, 4.0), ("min", 1.0), ("max", 3.0), (torch.prod, 3.0)],
)
def test_combines_logged_values(reduce_fx: Any, expected: float) -> None:
    found: dict[str, Any] = {}
    logged = LoggedValues((2, 1))
    for i, value in enumerate((1.0, 3.0)):
        with logged.of(i):
            assert logged.take("a", torch.tensor(value), {"reduce_fx": reduce_fx})
            assert logged.take("many", {"b": value}, {"batch_size": 5 - i})
    assert not logged.take("outside", 1.0, {})
    logged.log(lambda name, value, **kwargs: found.update({name: (value, kwargs)}))
    assert found["a"][0].item() == pytest.approx(expected)
    assert found["many"][0]["b"].item() == pytest.approx((5 + 4 * 3) / 9)
    assert found["many"][1] == {"batch_size": 9}


class Net(LightningModule):
    """Is a small regression that a test changes where it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))
        self.error = MeanSquaredError()
        self.lead_scale = nn.Parameter(torch.ones(()))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        result: Tensor = (self.lead_scale * self.model(x).squeeze(-1) - y).square().mean()
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("rows", float(len(batch[0])), reduce_fx="sum")
        self.log_dict({"largest": batch[1].max()}, reduce_fx="max")
        self.error.update(batch[1], torch.zeros_like(batch[1]))
        self.log("error", self.error, on_step=False, on_epoch=True)
        return {"loss": loss, "rows": batch[1]}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def val_dataloader(self) -> Any:
        return loader(10)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def loader(num_rows: int = 22, batch_size: int = 8) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(5)
    rows = [(torch.randn(6, generator=draw), torch.randn((), generator=draw)) for _ in range(num_rows)]
    return DataLoader(rows, batch_size=batch_size)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
def test_logs_and_metrics_are_those_of_one_device(schedule: str, warm_workers: WarmWorkers) -> None:
    """Mean losses of equal rows, sums, maxima and metric objects; the last batch of 6 rows is dealt out in twos and ones."""
    one = run_fit(Net, loader, max_steps=6)
    with warm_workers.lend(2) as workers:
        strategy = PipelineStrategy(schedule=schedule, num_microbatches=4, workers=workers)
        assert_same(one, run_fit(Net, loader, strategy=strategy, devices=2, max_steps=6))


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe_v"])
def test_accumulates_over_batches(schedule: str, warm_workers: WarmWorkers) -> None:
    trainer: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_steps": 4}
    one = run_fit(Net, loader, **trainer)
    with warm_workers.lend(2) as workers:
        strategy = PipelineStrategy(schedule=schedule, num_microbatches=4, workers=workers)
        assert_same(one, run_fit(Net, loader, strategy=strategy, devices=2, **trainer))


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_precision(precision: Any, warm_workers: WarmWorkers) -> None:
    """Autocast is that of the step, in whatever thread it runs; with one microbatch every bit is one device's."""
    one = run_fit(Net, loader, precision=precision)
    with warm_workers.lend(2) as workers:
        strategy = PipelineStrategy(schedule="1f1b", num_microbatches=1, workers=workers)
        assert_same(one, run_fit(Net, loader, strategy=strategy, devices=2, precision=precision), exact=True)


def fit(model: LightningModule, warm_workers: WarmWorkers, schedule: str = "1f1b", **options: Any) -> None:
    with warm_workers.lend(2) as workers:
        strategy = PipelineStrategy(schedule=schedule, workers=workers, **options)
        run_fit(lambda: model, loader, strategy=strategy, devices=2, max_steps=2)


def stepping(step: Callable[[Net, Any], Any]) -> Net:
    """Makes a module with another training step."""

    class Other(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return step(self, batch)

    return Other()


def test_several_calls_are_refused(warm_workers: WarmWorkers) -> None:
    def twice(net: Net, batch: Any) -> Tensor:
        return net.loss(batch) + net.loss(batch)

    with pytest.raises(PartitionError, match=r"schedule='1f1b' allows one call of the pipelined module"):
        fit(stepping(twice), warm_workers)


def test_a_step_without_a_call_is_refused(warm_workers: WarmWorkers) -> None:
    def without(net: Net, batch: Any) -> Tensor:
        return (net.lead_scale * batch[1]).sum()

    with pytest.raises(PartitionError, match=r"schedule='1f1b' needs training_step to call the pipelined module"):
        fit(stepping(without), warm_workers)


def test_manual_optimization_is_refused(warm_workers: WarmWorkers) -> None:
    model = Net()
    model.automatic_optimization = False
    with pytest.raises(PartitionError, match=r"Net runs them itself \(automatic_optimization=False\); use schedule=\"gpipe\""):
        fit(model, warm_workers)


def test_numbers_of_microbatches_are_checked(warm_workers: WarmWorkers) -> None:
    with pytest.raises(PartitionError, match=r"num_microbatches=3 is not possible .* on 2 devices: .* Use 4, 5, 6 or \"auto\""):
        fit(Net(), warm_workers, "dualpipe_v", num_microbatches=3)
    with pytest.raises(PartitionError, match=r"cannot cut 5 layers of Net into 6 stages; use at most 5 stages \(devices=2\)"):
        run_fit(Net, loader, strategy="mgpu_pipeline_zbv", devices=3)


def test_other_stages_can_not_be_asked_in_the_step(warm_workers: WarmWorkers) -> None:
    def reading(net: Net, batch: Any) -> Tensor:
        loss = net.loss(batch)
        with net.trainer.strategy.summon_parameters():  # type: ignore[attr-defined]
            return loss + net.model[0].weight.square().sum()

    with pytest.raises(PlacementError, match=r"training_step can't ask other stages for anything .* under schedule='1f1b'"):
        fit(stepping(reading), warm_workers)


@pytest.mark.parametrize("where", ["before", "after"])
def test_the_step_s_own_error_is_the_user_s(where: str, warm_workers: WarmWorkers) -> None:
    count = 0

    def failing(net: Net, batch: Any) -> Tensor:
        nonlocal count
        count += 1
        if where == "before" and count == 3:
            raise LookupError("the third microbatch")
        loss = net.loss(batch)
        if where == "after" and count == 8 and float(loss.detach()) >= 0:
            raise LookupError("a microbatch")
        return loss

    model = stepping(failing)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(LookupError, match=r"microbatch"):
        fit(model, warm_workers)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if "lead" not in name)
    fit(Net(), warm_workers)  # the process is as good as before


@pytest.mark.parametrize("name", ["TwoChildren", "Siamese", "Gan"])
def test_the_zoo_s_other_steps_are_refused(name: str, warm_workers: WarmWorkers) -> None:
    case = next(case for case in GENERAL if case.name == name)
    with pytest.raises(PartitionError, match=r"use schedule=\"gpipe\""):
        run(case, "1f1b", 2, warm_workers)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_worker_s_error_names_stage_and_microbatch(where: Any, schedule: str, warm_workers: WarmWorkers) -> None:
    """The first layer is on the worker; the step is in the middle of both phases then."""

    class Deep(faults.FaultyMlp):
        def __init__(self) -> None:
            super().__init__(0, where)
            self.fc4 = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc4(super().forward(x))  # type: ignore[no-any-return]

    phase = {"forward": "forward", "backward": "backward" if schedule == "1f1b" else "(input|weight) backward"}[where]
    place = rf"stage 0 of {2 if schedule == '1f1b' else 4} \(cpu\) failed in microbatch {faults.MARKED_MICROBATCH} \({phase}\)"
    case = Case(Deep, lambda: faults.batches(marked=True), strategy={"self_check": False})
    with pytest.raises(StageError, match=place):
        run(case, schedule, 2, warm_workers, max_steps=4)


def test_timeline_shows_processes_with_their_stages(tmp_path: Path, warm_workers: WarmWorkers) -> None:
    with warm_workers.lend(2) as workers:
        picture = tmp_path / "zbv.png"
        strategy = PipelineStrategy(schedule="zbv", num_microbatches=4, workers=workers, timeline=picture)
        run_fit(Net, loader, strategy=strategy, devices=2, max_steps=2)
    timeline = strategy.timeline
    assert timeline.homes == (1, 0, 0, 1)
    step = timeline.last_step()
    counts = Counter((event.stage, event.kind) for event in step.events)
    assert counts == {(j, kind): 4 for j in range(4) for kind in ("forward", "input_backward", "weight_backward")}
    assert 0 <= step.bubble_share() < 1
    assert picture.stat().st_size > 0


@pytest.mark.parametrize("name", ["mgpu_pipeline_1f1b", "mgpu_pipeline_looped_bfs"])
def test_schedules_are_registered_strategies(name: str) -> None:
    trainer = Trainer(strategy=name, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, PipelineStrategy)
    assert trainer.strategy.schedule.name == name.removeprefix("mgpu_pipeline_")
