"""Replicas of a pipeline share each batch, and train to the numbers of one device."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mgpu import PipelineStrategy
from lightning_mgpu.errors import PartitionError, PlacementError
from lightning_mgpu.examples import CNN, DigitsDataModule, Linear, RandomLinearDataModule, TwoLayerLinear
from tests.harness import assert_same, run_fit, run_on_one_device
from tests.strategies.test_schedules import CASES, numbers, reference
from tests.strategies.warm_workers import WarmWorkers, run_on_stages
from tests.zoo import data
from tests.zoo.buffers import CallCounter
from tests.zoo.case import Case
from tests.zoo.cases import GENERAL
from tests.zoo.steps import DropoutMlp
from tests.zoo.vision import BatchNormFirst

pytestmark = pytest.mark.filterwarnings("ignore:.* has batch norms")

DOCUMENTS = [
    Case(CNN, DigitsDataModule, validate=True, predict=True),
    Case(TwoLayerLinear, partial(RandomLinearDataModule, num_targets=1), validate=True, predict=True),
]


@pytest.mark.parametrize("case", [*DOCUMENTS, Case(Linear, RandomLinearDataModule, predict=True)], ids=lambda c: c.name)
@pytest.mark.parametrize("num_devices", [2, 3])
def test_whole_models_side_by_side_equal_one_device(case: Case, num_devices: int, warm_workers: WarmWorkers) -> None:
    found = run_on_stages(case, num_devices, warm_workers, pipeline_parallel_size=1, data_parallel_size=num_devices)
    assert_same(run_on_one_device(case), found)


@pytest.mark.parametrize("case", GENERAL, ids=lambda c: c.name)
def test_two_replicas_equal_one_device(case: Case, warm_workers: WarmWorkers) -> None:
    """Or one pipeline of as many microbatches, where the numbers of one device need a batch that is not split."""
    num_devices = 2 * len(case.strategy.get("cuts", ())) + 2
    found = run_on_stages(case, num_devices, warm_workers, data_parallel_size=2)
    split = {"num_microbatches": 2}
    truth = run_on_stages(case, 2, warm_workers, **split) if case.num_microbatches == 1 else run_on_one_device(case)
    assert_same(truth, found)


@pytest.mark.parametrize("case", DOCUMENTS, ids=lambda c: c.name)
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_two_pipelines_equal_one_pipeline_of_the_same_microbatches(
    case: Case, num_microbatches: int, warm_workers: WarmWorkers
) -> None:
    one = run_on_stages(case, 2, warm_workers, num_microbatches=2 * num_microbatches)
    two = run_on_stages(case, 4, warm_workers, data_parallel_size=2, num_microbatches=num_microbatches)
    assert_same(one, two)


@pytest.mark.parametrize("name", ["ResidualNet", "UNet", "Gpt2", "TiedHead", "T5", "TwoChildren", "Gan", "Siamese"])
def test_pipelines_side_by_side_equal_one_device(name: str, warm_workers: WarmWorkers) -> None:
    case = CASES[name]
    assert_same(run_on_one_device(case), run_on_stages(case, 4, warm_workers, data_parallel_size=2, num_microbatches=2))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
@pytest.mark.parametrize("name", ["AdamWCNN", "ResidualNet", "Llama", "Gpt2"])
def test_schedules_by_microbatch_are_accumulation(name: str, schedule: str, warm_workers: WarmWorkers) -> None:
    case = CASES[name]
    found = numbers(run_on_stages(case, 4, warm_workers, data_parallel_size=2, num_microbatches=2, schedule=schedule))
    assert_same(numbers(reference(case)), found)


@pytest.mark.parametrize("name", ["CNN", "WeightPenalty", "LayersAroundModel", "Mlp-accumulated-and-clipped"])
def test_whole_models_by_microbatch_are_accumulation(name: str, warm_workers: WarmWorkers) -> None:
    case = CASES[name]
    found = numbers(run_on_stages(case, 2, warm_workers, data_parallel_size=2, num_microbatches=2, schedule="1f1b"))
    assert_same(numbers(reference(case)), found)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5])
def test_a_replica_may_get_no_microbatch(num_rows: int, warm_workers: WarmWorkers) -> None:
    """The last batch of an epoch may have fewer rows than there are replicas."""
    case = Case(partial(Clamped, "in place"), partial(rows, 8 + num_rows))
    assert_same(run_on_one_device(case), run_on_stages(case, 3, warm_workers, data_parallel_size=3))


@pytest.mark.parametrize("sizes", [{"data_parallel_size": 2}, {"data_parallel_size": 4}])
def test_batch_norm_keeps_the_statistics_of_the_whole_batch(sizes: dict[str, int], warm_workers: WarmWorkers) -> None:
    case = Case(BatchNormFirst, data.small_images)
    whole, ours = run_on_one_device(case), run_on_stages(case, 4, warm_workers, num_microbatches=1, **sizes)
    for name, buffer in whole.buffers.items():
        torch.testing.assert_close(ours.buffers[name], buffer, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]


def test_replicas_draw_dropout_of_their_own_and_repeat_it(warm_workers: WarmWorkers) -> None:
    case = Case(DropoutMlp, data.vectors)
    first, second = (run_on_stages(case, 2, warm_workers, data_parallel_size=2) for _ in range(2))
    assert_same(first, second, exact=True)
    pipelined = run_on_stages(case, 2, warm_workers, num_microbatches=2 * case.num_microbatches)
    assert first.steps[0]["loss"] != pipelined.steps[0]["loss"]  # other stages, other masks


def rows(num_rows: int = 16) -> data.Loader:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(torch.randn(num_rows, 8, generator=generator), batch_size=8)


class Masks(nn.Module):
    """Returns what dropout leaves of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.ones_like(self.weight(x)))  # type: ignore[no-any-return]


class Dropped(pl.LightningModule):
    """Keeps the masks of one step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Masks()
        self.masks: Tensor | None = None

    def training_step(self, batch: Tensor) -> None:
        self.masks = self.model(batch).detach().clone()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: pl.LightningModule, warm_workers: WarmWorkers, num_devices: int = 2, **options: Any) -> None:
    with warm_workers.lend(num_devices) as workers:
        strategy = PipelineStrategy(workers=workers, **({"data_parallel_size": 2} | options))
        trainer = pl.Trainer(
            strategy=strategy, accelerator="cpu", devices=num_devices, max_steps=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, rows())


def test_no_two_replicas_draw_the_same_masks(warm_workers: WarmWorkers) -> None:
    module = Dropped()
    fit(module, warm_workers, num_microbatches=1)
    assert module.masks is not None
    assert not torch.equal(module.masks[:4], module.masks[4:])


class Clamped(pl.LightningModule):
    """Clamps its weights after each step, as a Wasserstein critic does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        self.how = how

    def training_step(self, batch: Tensor) -> Tensor:
        return self.model(batch).square().mean()  # type: ignore[no-any-return]

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            if self.how == "data":
                parameter.data.clamp_(-0.05, 0.05)
            elif self.how == "assigned":
                parameter.data = parameter.detach().clamp(-0.05, 0.05)
            else:
                with torch.no_grad():
                    parameter.clamp_(-0.05, 0.05)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("how", ["data", "assigned", "in place"])
def test_what_the_user_changes_on_the_lead_reaches_all_replicas(how: str, warm_workers: WarmWorkers) -> None:
    case = Case(partial(Clamped, how), partial(rows, 24))
    assert_same(run_on_one_device(case), run_on_stages(case, 2, warm_workers, data_parallel_size=2))


def test_parameters_are_plain_again_afterwards(warm_workers: WarmWorkers) -> None:
    module = Clamped("data")
    fit(module, warm_workers)
    assert {type(p) for p in module.parameters()} == {nn.Parameter}


def test_a_buffer_that_every_microbatch_changes_is_refused(warm_workers: WarmWorkers) -> None:
    case = Case(CallCounter, data.vectors)
    with pytest.raises(PartitionError, match=r"changes the buffers num_calls .* so its 2 replicas would not agree"):
        run_on_stages(case, 2, warm_workers, data_parallel_size=2, schedule="1f1b")


class SparseEmbedding(pl.LightningModule):
    """Has an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Flatten(), nn.Linear(32, 8), nn.Linear(8, 1))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.model((batch > 0).long()).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_sparse_gradients_are_refused(warm_workers: WarmWorkers) -> None:
    with pytest.raises(PlacementError, match=r"model\.0 \(Embedding\) makes sparse gradients, and several processes"):
        fit(SparseEmbedding(), warm_workers)


def test_sparse_gradients_stay_sparse_in_one_pipeline(warm_workers: WarmWorkers) -> None:
    torch.manual_seed(1)
    whole, cut = SparseEmbedding(), SparseEmbedding()
    cut.load_state_dict(whole.state_dict())
    fit(cut, warm_workers, data_parallel_size=1)
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(whole, rows())
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(cut.state_dict()[name], value)


def test_sizes_that_do_not_multiply_are_refused_before_processes_start() -> None:
    strategy = PipelineStrategy(pipeline_parallel_size=2, data_parallel_size=3)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=4, max_epochs=1, logger=False)
    wanted = "pipeline_parallel_size=2 and data_parallel_size=3 do not multiply to 4 devices; sizes that do (pipeline x data):"
    with pytest.raises(PartitionError, match=re.escape(wanted + " 1 x 4, 2 x 2, 4 x 1")):
        trainer.fit(CNN(), DigitsDataModule())


@pytest.mark.parametrize(("name", "sizes"), [("mgpu_hybrid", (2, 2)), ("mgpu_data_parallel", (1, 4))])
def test_a_name_chooses_the_sizes(name: str, sizes: tuple[int, int]) -> None:
    trainer = pl.Trainer(strategy=name, accelerator="cpu", devices=4, logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, PipelineStrategy)
    assert (trainer.strategy.mesh.pipeline, trainer.strategy.mesh.data) == sizes


def test_the_timeline_shows_every_replica(warm_workers: WarmWorkers) -> None:
    with warm_workers.lend(4) as workers:
        strategy = PipelineStrategy(workers=workers, data_parallel_size=2, num_microbatches=2, timeline=True)
        run_fit(CNN, DigitsDataModule, strategy=strategy, devices=4)
    step = strategy.timeline.last_step()
    assert (step.num_replicas, step.num_processes, step.num_stages, step.num_microbatches) == (2, 2, 2, 4)
    done = {(e.replica, e.stage, e.kind, e.microbatch) for e in step.events}
    assert done == {(i // 2, j, kind, i) for i in range(4) for j in range(2) for kind in ("forward", "backward")}
    assert 0 <= step.bubble_share() < 1
