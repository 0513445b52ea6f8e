"""Recordings: what a forward called, on what it depends, and that nothing else is left of it."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_mgpu.errors import RecordingError
from lightning_mgpu.partition.graph import Ref
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.record import Recorder
from lightning_mgpu.partition.recording import StructureError


class Forward(nn.Module):
    """Runs a function as its forward."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.scale = 2.0
        self.function = function

    def forward(self, *args):
        return self.function(self, *args)


def _record(function, *args, **kwargs):
    model = Forward(function)
    return Recorder(Names(model)).record(model, args, {}, **kwargs)


def _calls(recording):
    return [node.name for node in recording.graph.nodes]


def test_modules_and_functions_become_nodes():
    graph = _record(lambda m, x: F.relu(m.linear(x)) + m.drop(x).mean(), torch.randn(4, 3)).graph

    assert [node.name for node in graph.nodes] == ["linear", "relu", "drop", "mean", "add"]
    linear, relu, *_, add = graph.nodes
    assert [graph.sources[r].kind for r in linear.reads] == ["input"]
    assert relu.reads == linear.outputs
    assert graph.outputs == [Ref(add.outputs[0])]
    assert graph.values[linear.outputs[0]].shape == (4, 3)
    assert graph.values[linear.outputs[0]].private
    assert linear.flops == 2 * 4 * 3 * 3


def test_changes_in_place_are_kept_with_what_they_change():
    def forward(m, x, mask):
        h = m.linear(x)
        h[mask] = 0.0
        h.mul_(2)
        return h

    graph = _record(forward, torch.randn(4, 3), torch.tensor([True, False, True, False])).graph
    linear, assignment, product = graph.nodes

    assert (assignment.name, product.name) == ("__setitem__", "mul_")
    assert assignment.mutates == product.mutates == linear.outputs
    assert graph.live_nodes(graph.output_registers) == [0, 1, 2]


def test_values_of_the_batch_are_guards_and_microbatches_are_answered():
    def forward(m, x, mask):
        if mask.any():
            x = x * 2
        return m.linear(x) / int(mask.sum())

    x, mask = torch.randn(4, 3), torch.tensor([0, 0, 1, 1])
    model = Forward(forward)
    recorder = Recorder(Names(model))
    whole = recorder.record(model, (x, mask), {})
    micro = recorder.record(model, (x[:2], mask[:2]), {}, answers=whole.graph.guards)

    assert [guard.value for guard in whole.graph.guards] == [True, 2]
    assert [guard.value for guard in micro.graph.guards] == [True, 2]  # by itself it would have said False
    assert _calls(micro) == _calls(whole)
    assert whole.graph.guards[0].line.filename == __file__


def test_answers_that_do_not_fit_are_refused():
    def forward(m, x):
        return m.linear(x) * (x.sum().item() if len(x) > 2 else bool(x.any()))

    model, x = Forward(forward), torch.ones(4, 3)
    recorder = Recorder(Names(model))
    guards = recorder.record(model, (x,), {}).graph.guards

    with pytest.raises(StructureError, match=f"the forward asks for other values at {__file__}:"):
        recorder.record(model, (x[:2],), {}, answers=guards)
    with pytest.raises(StructureError, match="asks for other values"):
        recorder.record(model, (x,), {}, answers=[])


def test_attributes_that_were_read_are_guards():
    def forward(m, x):
        return m.linear(x) * m.scale

    model = Forward(forward)
    recording = Recorder(Names(model)).record(model, (torch.randn(4, 3),), {})
    assert recording.attributes.changed() is None
    model.unread = 1
    assert recording.attributes.changed() is None
    model.scale = 3.0
    assert recording.attributes.changed() == "scale"


def test_nodes_know_the_modes_around_them():
    def forward(m, x):
        with torch.no_grad():
            teacher = m.linear(x)
        with torch.autocast("cpu", torch.bfloat16):
            student = m.linear(x)
        return F.mse_loss(student, teacher)

    teacher, student, loss = _record(forward, torch.randn(4, 3)).graph.nodes

    assert [teacher.ambient.grad, student.ambient.grad, loss.ambient.grad] == [False, True, True]
    assert [node.ambient.autocast[0][1] for node in (teacher, student, loss)] == [False, True, False]
    assert student.ambient.autocast[0] == ("cpu", True, torch.bfloat16)


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        h = self.linear(x)
        return h if h.sum() > 0 else -h  # looks at weights


def test_a_module_that_looks_at_its_weights_becomes_one_leaf():
    model = nn.Sequential(nn.Linear(3, 3), Deciding(), nn.ReLU())
    recorder = Recorder(Names(model))
    recording = recorder.record(model, (torch.randn(4, 3),), {})
    line = 1 + next(i for i, text in enumerate(Path(__file__).read_text().splitlines()) if "# looks at weights" in text)

    assert _calls(recording) == ["0", "1", "2"]
    assert recorder.promoted == {
        "1": "takes a Python value (__bool__) from a tensor that depends on weights or on random numbers "
        f"({__file__}:{line} in forward)"
    }


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (lambda m, x: m.linear(x) * m.linear(x).sum().item(), r"takes a Python value \(item\).* at .*no module of yours"),
        (lambda m, x: m.linear(x.mul_(2)), r"changes an argument in place \(mul_ .*x = x.clone\(\)"),
        (lambda m, x: m.linear(x) * random.random(), r"draws from Python's or NumPy's random numbers.*use torch.rand"),
        (lambda m, x: (setattr(m, "scale", 5.0), m.linear(x))[1], r"changes the attribute 'scale', which a replayed"),
    ],
)
def test_what_cannot_be_recorded_is_refused(forward, text):
    with pytest.raises(RecordingError, match=f"(?s){text}"):
        _record(forward, torch.randn(4, 3))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_as_before(raises, real, seed):
    def forward(m, x):
        m.features = h = Doubled.apply(m.drop(m.norm(m.linear(x))))
        if raises:
            m.scale = random.random() + np.random.rand()
            raise ZeroDivisionError
        return h + torch.rand(3)

    model, x = Forward(forward), torch.randn(4, 3)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    identities = {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    attributes, given = dict(vars(model)), x.clone()
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    call, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    recorder = Recorder(Names(model))
    if raises:
        with pytest.raises(ZeroDivisionError):
            recorder.record(model, (x,), {}, real=real)
    else:
        graph = recorder.record(model, (x,), {}, real=real).graph
        assert [node.name for node in graph.nodes] == ["linear", "norm", "drop", "Doubled.apply", "rand", "add"]

    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]} == identities
    assert vars(model).keys() == attributes.keys()
    assert all(vars(model)[name] is value for name, value in attributes.items())
    assert torch.equal(x, given)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert np.array_equal(np.random.get_state()[1], generators[2])
    assert nn.Module.__call__ is call
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert "__getattribute__" not in vars(nn.Module)
