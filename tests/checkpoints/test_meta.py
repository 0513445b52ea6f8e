"""Modules built on the meta device: each stage gets its part of the values, from a checkpoint or the modules themselves."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_mgpu.errors import CheckpointError, PlacementError
from lightning_mgpu.runtime import unmade
from tests.checkpoints.runs import (
    Normalised,
    SaveAt,
    Tied,
    assert_equal_runs,
    built,
    lent,
    make_trainer,
    run,
)
from tests.checkpoints.test_memory import LAYER_BYTES, NUM_LAYERS, WIDTH, Deep
from tests.harness import repeatable
from tests.strategies.warm_workers import WarmWorkers
from tests.zoo.data import rows

pytestmark = pytest.mark.filterwarnings("ignore:the stages of .* are not compared with its own forward")


def on_meta(module: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return module()


class Configured(Tied):
    """Is built by Lightning's hook, but for one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = self.fc1 = self.fc2 = self.fc3 = self.head = None

    @override
    def configure_model(self) -> None:
        if self.head is None:
            with torch.device("meta"):
                plain = Tied()
            for name in ("frozen", "fc1", "fc3", "head"):
                setattr(self, name, getattr(plain, name))
            self.fc2 = nn.Linear(8, 8)


@pytest.mark.parametrize("layout", [1, 2, 3])
@pytest.mark.parametrize("module", [Tied, Normalised])
def test_weights_come_from_a_checkpoint(
    module: type[LightningModule], layout: int, warm_workers: WarmWorkers, tmp_path: Path
) -> None:
    path, strategy = tmp_path / "x.ckpt", {"num_microbatches": 1}
    whole = run(built(module), 2, warm_workers, SaveAt({3: path}), strategy=strategy)
    fresh = on_meta(module)
    identities = {name: id(p) for name, p in fresh.named_parameters(remove_duplicate=False)}
    resumed = run(fresh, layout, warm_workers, ckpt_path=path, weights_only=True, strategy=strategy)
    resumed.metrics = {}
    assert_equal_runs(whole.since(3), resumed, exact=layout == 2)
    assert {name: id(p) for name, p in fresh.named_parameters(remove_duplicate=False)} == identities
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in fresh.parameters())
    again = run(fresh, 2, warm_workers, ckpt_path=path, strategy=strategy)
    again.metrics = {}
    assert_equal_runs(whole.since(3), again, exact=True)


def test_weights_come_from_folders_and_through_hooks_of_the_users_own(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    for sharded in (True, False):
        path = tmp_path / str(sharded)
        whole = run(built(Tied), 2, warm_workers, SaveAt({3: path}), strategy={"save_distributed_checkpoint": sharded})
        for module in (Configured, OldNames):
            resumed = run(on_meta(module), 3, warm_workers, ckpt_path=path)
            resumed.metrics = {}
            expected = whole.since(3)
            if module is OldNames:
                expected.state = {key.replace("fc2", "renamed"): value for key, value in expected.state.items()}
                resumed.state = dict(resumed.state)
            assert_equal_runs(expected, resumed)


class OldNames(Tied):
    """Reads state dicts of its past, in which a layer had another name."""

    def __init__(self) -> None:
        super().__init__()
        self.renamed = self.fc2
        del self.fc2
        self.register_load_state_dict_pre_hook(self.rename)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.frozen(torch.tanh(self.fc1(x))))
        y: Tensor = self.head(torch.tanh(self.fc3(torch.tanh(self.renamed(x)))))
        return y

    @override
    def parameters(self, recurse: bool = True) -> Any:
        """Lists them in the order of the past, which is that of the optimizer's state."""
        named = dict(self.named_parameters())
        order = ["fc1", "frozen", "renamed", "fc3", "head"]
        return iter([named[n] for layer in order for n in (f"{layer}.weight", f"{layer}.bias") if n in named])

    @staticmethod
    def rename(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for key in [key for key in state if key.startswith("fc2.")]:
            state[key.replace("fc2.", "renamed.")] = state.pop(key)


class Attentive(LightningModule):
    """Has the layers whose ways to be reset differ."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.bn = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10)

    @override
    def forward(self, words: Tensor) -> Tensor:
        h = self.embedding(words)
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        h, _ = self.recurrent(h)
        y: Tensor = self.head(self.bn(h.transpose(1, 2)).transpose(1, 2))
        return y

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self(batch[0]).flatten(0, 1), batch[0].flatten())}

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.0)


@pytest.mark.parametrize("layout", [1, 2, 3])
def test_modules_draw_their_values_the_same_under_any_number_of_stages(layout: int, warm_workers: WarmWorkers) -> None:
    found = []
    for stages in (2, layout):
        with repeatable(), lent(warm_workers, stages) as workers:
            before = torch.get_rng_state()
            trainer = make_trainer(stages, workers, strategy={"num_microbatches": 1}, max_steps=1, max_epochs=-1)
            with trainer.init_module(empty_init=True):
                module = Attentive()
            assert all(p.is_meta for p in module.parameters())
            assert torch.equal(torch.get_rng_state(), before)
            trainer.fit(module, rows(torch.arange(1, 25).reshape(4, 6) % 10, batch_size=4))
            found.append({name: value.clone() for name, value in module.state_dict().items()})
    for name, value in found[0].items():
        if "running" in name:
            torch.testing.assert_close(value, found[1][name])
        else:
            assert torch.equal(value, found[1][name]), name
    state = found[0]
    assert state["embedding.weight"].std() == pytest.approx(1, abs=0.3)
    assert not state["embedding.weight"][0].any()
    assert not state["attention.out_proj.bias"].any()
    assert state["attention.in_proj_weight"].std() == pytest.approx((2 / 32) ** 0.5, rel=0.3)
    assert state["recurrent.weight_ih_l0"].abs().max() <= 8**-0.5
    assert torch.equal(state["norm.weight"], torch.ones(8))
    assert state["bn.num_batches_tracked"] == 1
    assert state["head.weight"].abs().max() <= 8**-0.5


# -- what is refused, and what is left behind --------------------------------------------------------------------------


class Scaled(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class HalfReset(Scaled):
    def reset_parameters(self) -> None:
        pass


class ReadsTooEarly(Tied):
    @override
    def on_fit_start(self) -> None:
        nn.init.zeros_(self.head.bias)


NO_RESET = (
    "'scale' was built on the meta device, and Scaled has no reset_parameters to give it a value; add one that sets the "
    "module's own parameters and buffers, load them with ckpt_path=..., or build it elsewhere"
)
NOT_SET = (
    "HalfReset.reset_parameters does not set 'scale', so it has no value: it was built on the meta device; set it there, load "
    "it with ckpt_path=..., or build the module elsewhere"
)
NOT_YET = (
    "parameter 'head.bias' has no value yet, since it was built on the meta device; it gets one when the module that holds it "
    "is called, from a checkpoint (ckpt_path) or the module's reset_parameters"
)


@pytest.mark.parametrize(("module", "says"), [(Scaled, NO_RESET), (HalfReset, NOT_SET), (ReadsTooEarly, NOT_YET)])
def test_values_that_nobody_can_give(module: type[Tied], says: str, warm_workers: WarmWorkers) -> None:
    fresh = on_meta(module)
    with pytest.raises(PlacementError, match=f"^{re.escape(says)}$"):
        run(fresh, 2, warm_workers)
    assert all(type(p) is nn.Parameter for p in fresh.parameters())
    assert all(p.is_meta or torch.isfinite(p).all() for p in fresh.parameters())


def test_a_checkpoint_that_does_not_fit_leaves_it_on_meta(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    run(built(Tied), 2, warm_workers, SaveAt({3: path}))
    fresh = on_meta(Scaled)
    with pytest.raises(CheckpointError, match="1 missing key: 'scale'"):
        run(fresh, 2, warm_workers, ckpt_path=path)
    assert all(type(p) is nn.Parameter and p.is_meta for p in fresh.parameters())


class WithSpare(Tied):
    """Has a layer that no step calls, and one that runs on the lead."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8)
        self.before = nn.Linear(8, 8)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return super().training_step((torch.tanh(self.before(batch[0])), batch[1]), batch_idx)


def test_what_is_never_called_is_saved_and_stays_on_meta(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    path, module = tmp_path / "x.ckpt", on_meta(WithSpare)
    run(module, 2, warm_workers, SaveAt({3: path}), limit_val_batches=0)
    assert {name for name, p in module.named_parameters() if p.is_meta} == {"spare.weight", "spare.bias"}
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert saved["spare.weight"].abs().max() <= 8**-0.5
    assert saved["spare.weight"].any()
    resumed = run(on_meta(WithSpare), 2, warm_workers, ckpt_path=path, limit_val_batches=0)
    assert torch.equal(resumed.state["before.weight"], module.before.weight)


# -- memory ------------------------------------------------------------------------------------------------------------


class Watch(Callback):
    """Measures from the start how much memory this process has of its own at most, files that it maps left out."""

    def __init__(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        self.stopped = threading.Event()
        self.peak_bytes = self.before_bytes = own_memory_bytes()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()

    def look(self) -> None:
        while not self.stopped.is_set():
            self.peak_bytes = max(self.peak_bytes, own_memory_bytes())
            time.sleep(0.0005)

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        """Stops, since the module comes home to the lead in the end."""
        self.stopped.set()
        self.thread.join()

    @property
    def extra_bytes(self) -> int:
        return self.peak_bytes - self.before_bytes


def own_memory_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_lead_never_holds_more_than_its_part(
    warm_workers: WarmWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unmade, "_PIECE_BYTES", LAYER_BYTES)
    own_bytes = 3 * 4 * LAYER_BYTES  # weights, gradients and momentum of four layers
    options = {"num_microbatches": 1, "self_check": False, "cuts": ["layers.4", "layers.8"]}
    path, extra_bytes = tmp_path / "x.ckpt", {}

    def fit(what: str, build: Callable[[], LightningModule], **kwargs: Any) -> None:
        watch = Watch()
        module = build()
        try:
            with repeatable(), warm_workers.lend(3) as workers:
                trainer = make_trainer(3, workers, watch, strategy=options, max_epochs=2, limit_val_batches=0)
                trainer.fit(module, rows(torch.randn(4, WIDTH), batch_size=4), **kwargs)
                extra_bytes[what] = watch.extra_bytes
                if what == "drawn":
                    trainer.save_checkpoint(path)
        finally:
            watch.on_train_batch_end()

    fit("drawn", lambda: on_meta(Deep))
    fit("read", lambda: on_meta(Deep), ckpt_path=path)
    fit("built", Deep, ckpt_path=path)
    slack_bytes = 8 * LAYER_BYTES  # of 12 own and 36 in all
    assert extra_bytes["drawn"] < own_bytes + slack_bytes
    assert extra_bytes["read"] < own_bytes + slack_bytes
    assert extra_bytes["built"] > NUM_LAYERS * 2 * LAYER_BYTES + own_bytes - slack_bytes, "it measures nothing"
