"""Programs: recorded nodes run again, on other numbers, in any process."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mgpu.errors import RecordingError
from lightning_mgpu.partition.batch import batch_dims
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.plan import ModuleStore
from lightning_mgpu.partition.program import Program, compile_nodes
from lightning_mgpu.partition.record import Recorder


class Forward(nn.Module):
    """Runs a function over two layers and a buffer as its forward."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("count", torch.tensor(0.0))
        self.register_buffer("power", torch.ones(3))
        self.shift = torch.tensor([1.0, 2.0, 3.0])
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class Compiled:
    """Records a forward and compiles all of it, or the nodes from ``start`` on, for the whole batch or half of it."""

    def __init__(self, function: Any, *args: Any, start: int = 0, dealt: bool = False) -> None:
        self.module = Forward(function)
        names = Names(self.module)
        self.store = ModuleStore(names)
        recorder = Recorder(names)
        whole = self.graph = recorder.record(self.module, args, {}).graph
        unbatched = None
        if dealt:
            self.graph = recorder.record(self.module, tuple(a[:2] for a in args), {}).graph
            dims = batch_dims(whole, self.graph, 4, 2)
            unbatched = lambda register: dims[register] is None  # noqa: E731
        nodes = range(start, len(self.graph.nodes))
        results = self.graph.output_registers
        self.program = compile_nodes(self.graph, nodes, results, store=self.store, unbatched=unbatched)

    def run(self, *args: Tensor, program: Program | None = None, **options: Any) -> list[Any]:
        environment = dict(zip(self.graph.inputs, args, strict=True))
        made = (program or self.program).run(environment, self.store, **options)
        return [made[r] for r in self.graph.output_registers]


def test_other_numbers_run_through_the_same_calls(seed):
    compiled = Compiled(lambda m, x: F.relu(m.b(torch.tanh(m.a(x)))) + x.T.mean(), torch.randn(4, 3))
    x = torch.randn(4, 3)

    torch.testing.assert_close(compiled.run(x), [compiled.module(x)])


def test_a_program_is_only_values_and_names(seed):
    def forward(m, x, flag):
        h = m.a(x).masked_fill(flag[:, None], 0.5)
        return (h.split(2, dim=1)[0] @ h[:, :2].T, {"shifted": h + m.shift})

    compiled = Compiled(forward, torch.randn(4, 3), torch.tensor([True, False, True, False]))
    program = pickle.loads(pickle.dumps(compiled.program))
    x, flag = torch.randn(4, 3), torch.tensor([False, False, True, True])
    product, shifted = compiled.run(x, flag, program=program)
    expected = compiled.module(x, flag)

    torch.testing.assert_close(product, expected[0])
    torch.testing.assert_close(shifted, expected[1]["shifted"])
    assert program.modules() == ["a"]


def test_values_nobody_reads_any_more_are_dropped():
    compiled = Compiled(lambda m, x: m.b(torch.relu(m.a(x))), torch.randn(4, 3))
    (x,), (y,) = compiled.graph.inputs, compiled.graph.output_registers
    environment = compiled.program.run({x: torch.randn(4, 3)}, compiled.store)

    assert set(environment) == {y}


def test_what_was_received_is_copied_before_it_is_changed():
    def forward(m, x):
        h = m.a(x)
        h.add_(1)
        return m.b(h)

    compiled = Compiled(forward, torch.randn(4, 3), start=1)
    (h,) = compiled.graph.nodes[0].outputs
    received = torch.zeros(4, 3)
    compiled.program.run({h: received}, compiled.store)

    assert compiled.program.clones == {h}
    assert torch.equal(received, torch.zeros(4, 3))


def test_modes_are_those_of_the_recording():
    def forward(m, x):
        with torch.no_grad():
            teacher = m.a(x)
        with torch.autocast("cpu", torch.bfloat16):
            return teacher, m.b(x)

    teacher, student = Compiled(forward, torch.randn(4, 3)).run(torch.randn(4, 3))

    assert not teacher.requires_grad
    assert student.requires_grad
    assert student.dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def _counts_first(m, x):
    m.count += 1
    return m.a(x) * m.count


def _counts_last(m, x):
    y = m.a(x) * m.count
    m.count += 1
    return y


def _counts_between(m, x):
    y = m.a(x) * m.count
    m.count += 1
    return y + m.count


def _iterates(m, x):
    with torch.no_grad():
        for _ in range(2):
            m.power.copy_(F.normalize(m.a.weight @ m.power, dim=0))
    return m.a(x) / (m.power @ m.a.weight @ m.power)


@pytest.mark.parametrize(
    ("forward", "num_counts", "results"),
    [
        (_counts_first, 1, lambda y, i: y),
        (_counts_last, 1, lambda y, i: 0 * y),
        (_counts_between, 3, lambda y, i: i * y + i + 1),
    ],
)
def test_updates_of_buffers_from_no_row_are_made_once_where_they_can_be(forward, num_counts, results, seed):
    x = torch.randn(2, 3)
    compiled = Compiled(forward, torch.randn(4, 3), dealt=True)
    made = [compiled.run(x, microbatch=i, num_microbatches=3)[0] for i in range(3)]
    y = compiled.module.a(x)

    assert float(compiled.module.count) == num_counts
    torch.testing.assert_close(made, [results(y, i) for i in range(3)])


def test_what_serves_an_update_alone_is_no_read_of_it(seed):
    x = torch.randn(2, 3)
    compiled = Compiled(_iterates, torch.randn(4, 3), dealt=True)
    made = [compiled.run(x, microbatch=i, num_microbatches=3)[0] for i in range(3)]
    iterated = compiled.module.power.clone()
    compiled.module.power.fill_(1.0)

    torch.testing.assert_close(made, [compiled.module(x)] * 3)
    assert torch.equal(compiled.module.power, iterated)


def test_rebound_buffers_are_rebound_after_the_last_microbatch():
    def forward(m, x):
        m.count = m.count + 1
        return m.a(x) * m.count

    module = Compiled(forward, torch.randn(4, 3)).module
    names = Names(module)
    graph = Recorder(names).record(module, (torch.randn(4, 3),), {}).graph
    store = ModuleStore(names)
    nodes = range(len(graph.nodes))
    program = compile_nodes(graph, nodes, graph.output_registers, store=store, buffer_writes=graph.buffer_writes)
    for i in range(2):
        program.run({graph.inputs[0]: torch.randn(4, 3)}, store, microbatch=i, num_microbatches=2)
        assert float(module.count) == i


def test_a_buffer_can_be_handed_in():
    compiled = Compiled(lambda m, x: m.a(x) * m.count, torch.randn(4, 3))
    (count,) = (r for r, source in compiled.graph.sources.items() if source.name == "count")
    graph, nodes, x = compiled.graph, range(len(compiled.graph.nodes)), torch.randn(4, 3)
    program = compile_nodes(graph, nodes, graph.output_registers, store=compiled.store, given=[count])
    made = program.run({graph.inputs[0]: x, count: torch.tensor(5.0)}, compiled.store)

    torch.testing.assert_close(made[graph.output_registers[0]], 5 * compiled.module.a(x))


def test_attributes_of_layers_are_those_of_the_recording():
    module = nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(0.5), nn.Linear(3, 3))
    names = Names(module)
    recording = Recorder(names).record(module, (torch.randn(4, 3),), {})
    program = compile_nodes(
        recording.graph, range(3), recording.graph.output_registers,
        simple_values=lambda path: recording.attributes.simple_values(names.module_at[path]),
    )  # fmt: skip
    module[1].negative_slope = 0.1
    program.prepare(ModuleStore(names))

    assert module[1].negative_slope == 0.5


def test_an_error_names_the_line_of_the_call():
    compiled = Compiled(lambda m, x: m.b(m.a(x).view(4, 3)), torch.randn(4, 3))

    with pytest.raises(RuntimeError, match=r"shape '\[4, 3\]' is invalid") as error:
        compiled.run(torch.randn(2, 3))

    assert [note.startswith(f"raised by view ({__file__}:") for note in error.value.__notes__] == [True]


def test_another_number_of_results_than_recorded_is_an_error():
    compiled = Compiled(lambda m, x: m.a(x).unbind(0), torch.randn(4, 3))

    with pytest.raises(RecordingError, match=r"unbind \(.*\) #1 returned 2 values where the recording saw 4"):
        compiled.run(torch.randn(2, 3))
