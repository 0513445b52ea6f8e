"""Several steps of training in parts: weights, optimizer states and replicated parameters stay those of one device."""

import copy

import torch
from torch.nn import functional as F

from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.program import compile_nodes
from lightning_mgpu.partition.tensor.collectives import joined
from lightning_mgpu.partition.tensor.layout import unshard
from lightning_mgpu.partition.tensor.local import LocalStore, local_tensors
from tests.partition.tensor.lowered import Lowered, copied
from tests.partition.tensor.models import TiedGpt
from tests.partition.tensor.ranks import Ranks

NUM_STEPS = 20


def test_twenty_steps_are_those_of_one_device(double):
    batches = [torch.randint(24, (4, 9)) for _ in range(NUM_STEPS)]
    module = TiedGpt()
    lowered = Lowered(module, 2, batches[0][:, :-1], gather_min=256)
    graph = lowered.lowered(batches[0][:, :-1])[0].graph
    program = compile_nodes(graph, range(len(graph.nodes)), graph.output_registers)

    def train(parameters, forward):
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
        losses = []
        for batch in batches:
            loss = F.cross_entropy(forward(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, optimizer.state

    def on_rank(group):
        store, own = (
            LocalStore(lowered.names, local_tensors(lowered.names, lowered.plan, group.rank)),
            joined(copied(program), group),
        )
        parameters = [t for name, t in store.tensors.items() if lowered.names.kinds[name] == "parameter"]
        (result,) = graph.output_registers
        return *train(parameters, lambda x: own.run({graph.inputs[0]: x}, store)[result]), store

    whole = copy.deepcopy(module)
    expected, states = train(whole.parameters(), whole)
    ranks = Ranks(2).run(on_rank)

    for losses, _, _ in ranks:
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    for name, tensor in Names(whole).tensors.items():
        parts, layout = [store.tensor(name) for _, _, store in ranks], lowered.plan.layouts.get(name)
        assert layout is not None or torch.equal(parts[0], parts[1]), f"{name} differs between the ranks"
        torch.testing.assert_close(unshard([p.detach() for p in parts], layout), tensor.detach(), rtol=1e-7, atol=1e-9)
        if isinstance(tensor, torch.nn.Parameter):
            moments = unshard([state[part]["exp_avg"] for (_, state, _), part in zip(ranks, parts, strict=True)], layout)
            torch.testing.assert_close(moments, states[tensor]["exp_avg"], rtol=1e-7, atol=1e-9)
