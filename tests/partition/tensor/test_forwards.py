"""The forwards that recordings are tried on, each over two ranks: never wrong, whatever they do."""

import pytest
import torch

from lightning_mgpu import tree
from tests.partition.forwards import FORWARDS
from tests.partition.forwards.case import weighted_sum
from tests.partition.tensor.lowered import Lowered

REFUSED = ("PackedSequences",)  # cannot be recorded
SINGLE = ("SeveralLosses", "Autocast", "FourierLayers")  # fix dtypes themselves
UNLIKE = ("SparseNeighbours", "OldWeightNorm")  # sparse tensors, and modules that can't be copied


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # torch remarks about its own layers
@pytest.mark.parametrize("case", [f for f in FORWARDS if f.name not in (*REFUSED, *UNLIKE)], ids=lambda f: f.name)
def test_a_forward_in_parts_is_the_forward(case, double):
    if case.name in SINGLE:
        torch.set_default_dtype(torch.float32)
    module, args = case.module(), case.batch(8)
    lowered = Lowered(module, 2, *args, gather_min=200)
    loss = case.loss or weighted_sum
    if not any(node.random for node in lowered.recording.graph.nodes):
        tolerance = 2e-2 if case.name == "Autocast" else 1e-5 if case.name in SINGLE else 1e-9
        lowered.compare(*args, loss=loss, tolerance=tolerance)
        return
    outcomes = lowered.run(*args, loss=loss)
    results = [tree.tensors_in(outcome.result) for outcome in outcomes]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(outcomes[0].state, outcomes[1].state)
