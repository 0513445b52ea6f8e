"""Forwards of every kind over stages in this process, against the module itself: results, gradients by name, buffers."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mgpu import tree
from lightning_mgpu.errors import MgpuError
from lightning_mgpu.partition import stage
from tests.partition.forwards import FORWARDS, Forward
from tests.partition.forwards.case import weighted_sum
from tests.partition.in_process import InProcess

pytestmark = pytest.mark.filterwarnings("ignore:.* has batch norms")

LR = 0.05


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Computes in one thread, since these tensors are small and other tests run meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# What torch remarks about its own layers, with or without stages.
REMARKS = (
    "The PyTorch API of nested tensors is in prototype stage",
    "enable_nested_tensor is True, but self.use_nested_tensor is False",
    r"`torch.nn.utils.weight_norm` is deprecated",
    "None of the inputs have requires_grad=True",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)


@contextlib.contextmanager
def unseeded() -> Iterator[None]:
    """Lets stages draw from the generator as the module by itself would, rather than from one of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "_seeded", lambda *_: contextlib.nullcontext())
        yield


def copied(batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments and keyword arguments, copied."""
    args = tree.map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), batch)
    return (args[:-1], args[-1]) if isinstance(args[-1], dict) else (args, {})


def by_microbatch(module: nn.Module, batch: tuple[Any, ...], sizes: tuple[int, ...]) -> Any:
    """Calls the module on each microbatch, and joins what it returns."""
    results = []
    for i, rows in enumerate(sizes):
        start = sum(sizes[:i])
        part = tree.map_tensors(lambda t, a=start, b=start + rows: t[a:b], batch)
        args, kwargs = copied(part)
        results.append(tree.flatten(module(*args, **kwargs)))
    columns = zip(*(leaves for leaves, _ in results), strict=True)
    return tree.unflatten([torch.cat(column) for column in columns], results[0][1])


def assert_equal(ours: Any, theirs: Any, what: str, tolerance: float) -> None:
    """Compares two values, tensors relative to the largest number of theirs."""
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
        assert type(ours) is type(theirs), f"{what}: {ours} is not {theirs}"
        assert ours == theirs, f"{what}: {ours} is not {theirs}"
        return
    ours, theirs = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (ours, theirs))
    finite = theirs.is_floating_point() or theirs.is_complex()
    largest = float(theirs.abs().max()) if finite and theirs.numel() else 0.0
    atol = tolerance * largest + 1e-6 if finite else 0.0
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=atol, msg=lambda text: f"{what}: {text}")


def compare(case: Forward, num_stages: int, num_microbatches: int) -> InProcess:
    """Trains a module over stages and by itself for some steps, evaluates both, and compares all that can be observed.

    Returns:
        The stages, with all that they planned.
    """
    torch.manual_seed(0)
    plain = case.module()
    torch.manual_seed(0)
    pipeline = InProcess(case.module(), num_stages, num_microbatches)
    torch.manual_seed(1)
    for number, rows in enumerate(case.rows):
        batch = case.batch(rows)
        step(case, plain, pipeline, batch, f"step {number}")
        if number == 1:
            args, kwargs = copied(batch)
            assert pipeline.planner.find("", args, kwargs)[2] is False, "a call like the last one is planned again"
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                for copy in [parameter, *pipeline.copies(name)] if parameter.grad is not None else []:
                    copy.sub_(parameter.grad, alpha=LR)
            for name, buffer in plain.named_buffers() if not case.buffers else ():
                buffer.copy_(pipeline.copies(name)[-1])
    plain.eval()
    pipeline.module.eval()
    with torch.no_grad():
        step(case, plain, pipeline, case.batch(case.rows[0]), "evaluation")
    return pipeline


def step(case: Forward, plain: nn.Module, pipeline: InProcess, batch: tuple[Any, ...], what: str) -> None:
    """Runs both on one batch, backward too where there is a gradient, and compares."""
    for tensor in [copy for name in pipeline.planner.names.tensors for copy in pipeline.copies(name)]:
        tensor.grad = None
    plain.zero_grad()
    args, kwargs = copied(batch)
    with unseeded() if case.by_microbatch else contextlib.nullcontext():
        torch.manual_seed(2)
        ours = pipeline(*args, **kwargs)
    torch.manual_seed(2)
    own_args, own_kwargs = copied(batch)
    sizes = pipeline.last_plan.sizes
    theirs = by_microbatch(plain, batch, sizes) if case.by_microbatch else plain(*own_args, **own_kwargs)
    our_leaves, our_spec = tree.flatten(ours)
    their_leaves, their_spec = tree.flatten(theirs)
    assert our_spec == their_spec
    for index, (a, b) in enumerate(zip(our_leaves, their_leaves, strict=True)):
        assert_equal(a, b, f"{what}, result {index}", case.tolerance)
    loss = case.loss or weighted_sum
    own_loss = loss(theirs)
    if own_loss.requires_grad:
        loss(ours).backward()
        own_loss.backward()
        gradients = pipeline.gradients()
        for name, parameter in plain.named_parameters():
            assert_equal(gradients[name], parameter.grad, f"{what}, gradient of {name}", case.tolerance)
        given = zip(tree.tensors_in((args, kwargs)), tree.tensors_in((own_args, own_kwargs)), strict=True)
        for index, (a, b) in enumerate(given if not case.by_microbatch else ()):
            assert_equal(a.grad, b.grad, f"{what}, gradient of argument {index}", case.tolerance)
    for name, buffer in plain.named_buffers() if case.buffers else ():
        assert_equal(pipeline.copies(name)[-1], buffer, f"{what}, buffer {name}", case.tolerance)


RUNS = [pytest.param(case, 3, 4, id=case.name) for case in FORWARDS]
RUNS += [pytest.param(case, 2, 1, id=f"{case.name}-whole") for case in FORWARDS if case.refused]


@pytest.mark.parametrize(("case", "num_stages", "num_microbatches"), RUNS)
def test_stages_compute_what_the_module_computes(case: Forward, num_stages: int, num_microbatches: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if num_microbatches in case.refused:
            with pytest.raises(MgpuError, match=case.refused[num_microbatches]):
                compare(case, num_stages, num_microbatches)
            return
        pipeline = compare(case, num_stages, num_microbatches)
    warned = [str(w.message) for w in caught if not re.match("|".join(REMARKS), str(w.message))]
    expected = case.warns if num_microbatches > 1 else ""
    assert [text for text in warned if not expected or not re.search(expected, text)] == []
    assert bool(warned) == bool(expected)
    assert set(pipeline.planner.recorder.promoted) == set(case.promoted)
    assert pipeline.first_plan.num_microbatches == min(case.microbatches, num_microbatches)
