"""Lowering: the recording of a forward for one rank, with parts in the place of what the plan splits.

Calls of torch stay calls of torch, on smaller tensors; between them stand the few calls of `collectives`. A value that is
whole enters calls on parts through one ``Copy``, however many of them read it, so that its gradient is added up once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_mgpu import tree
from lightning_mgpu.errors import PartitionError
from lightning_mgpu.partition.graph import Node, Ref, Value
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.recording import Recording
from lightning_mgpu.partition.tensor.call import Call, Rewrite, Weight
from lightning_mgpu.partition.tensor.check import check_shapes
from lightning_mgpu.partition.tensor.collectives import Copy, Forked, Gather, Reduce, Slice, add_bias
from lightning_mgpu.partition.tensor.layout import Layout, local_shape
from lightning_mgpu.partition.tensor.plan import TensorPlan
from lightning_mgpu.partition.tensor.sharded import NeedsCutsError, NoRuleError, Sharded
from lightning_mgpu.partition.tensor.walk import Walk, WalkedCall

__all__ = ["lower"]


def lower(recording: Recording, names: Names, plan: TensorPlan, rank: int) -> Recording:
    """Rewrites a recording for one rank.

    Any recording of the module may be lowered under the plan, not only the one it was made from: where a call needs a value
    whole that the plan splits, it is put together there.

    Args:
        recording: the recording, on whole inputs, with attention opened (`opened_attention`).
        names: names below the root.
        plan: the plan.
        rank: the rank. Where all layouts are even, every rank's graph is the same.

    Returns:
        The recording of the rank's calls. Registers of the given one keep their numbers; its guards are left out, since they
        are checked on the given one.

    Raises:
        PartitionError: where a call can't be carried out under the plan, or a part has another shape than expected.
    """
    lowering = _Lowering(recording, names, plan, rank)
    lowered = lowering.run()
    check_shapes(lowered, names, plan, rank)
    return lowered


class _Chosen:
    """Answers rules from a plan."""

    def __init__(self, plan: TensorPlan) -> None:
        self.plan = plan
        self.num_ranks = plan.num_ranks

    def split(self, weight: Weight, given: Sharded | None) -> Layout | None:  # noqa: ARG002 - chosen already
        return self.plan.layouts.get(weight.name)

    def split_vocabulary(self, weight: Weight) -> Layout | None:
        return self.plan.layouts.get(weight.name)

    def gathers(self, name: str) -> bool:
        return name in self.plan.gathered

    def follows(self, name: str, layout: Layout) -> bool:
        return self.plan.layouts.get(name) == layout


class _Lowering:
    def __init__(self, recording: Recording, names: Names, plan: TensorPlan, rank: int) -> None:
        graph = recording.graph
        self.recording, self.graph, self.plan, self.rank = recording, graph, plan, rank
        self.values = [replace(value) for value in graph.values]
        self.tensors = list(recording.tensors)
        self.nodes: list[Node] = []
        self.sharded: dict[int, Layout] = {}
        self.where: dict[int, int] = {}  # registers that stand for others since their state has changed
        self.makers: dict[int, Node] = {}
        self.ready: dict[tuple[Any, ...], int] = {}  # copies, slices and gathered values, by what they were made of
        self.walk = Walk(graph, names, _Chosen(plan), self._given(), self._gather)

    def _given(self) -> dict[int, Sharded]:
        given = {}
        for register, source in self.graph.sources.items():
            layout = self.plan.layouts.get(source.name) if source.is_weight else None
            if source.kind == "input":
                layout = self.plan.inputs.get(list(dict.fromkeys(self.graph.inputs)).index(register))
            if layout is not None:
                origin = source.name if source.is_weight else f"input {source.name}"
                given[register] = Sharded(layout.dim, layout.segments, frozenset({origin}), spans=False)
                self._set_layout(register, layout)
        return given

    def _gather(self, call: Call, error: NoRuleError | NeedsCutsError) -> dict[int, Sharded]:
        """Puts the values together that a call can't use in parts: first the results of calls, then weights."""
        split = {r: s for r in call.refs() if (s := call.state(r)) is not None}
        made = {r: s for r, s in split.items() if r not in self.graph.sources}
        chosen = made or split
        if not chosen or any(r in call.node.mutates for r in chosen):
            reason = "needs another segmentation" if isinstance(error, NeedsCutsError) else error
            raise PartitionError(
                f"{call.node} can't be carried out under the tensor-parallel plan of {self.plan.num_ranks} ranks: "
                f"it {reason}; ask for 'whole' of the layers before it"
            )
        return chosen

    # -- the walk --------------------------------------------------------------------------------------------------

    def run(self) -> Recording:
        while self.walk.position < len(self.walk.order):
            walked = self.walk.step()
            if walked.rewrite is None:
                self._keep(walked)
            else:
                self._rewrite(walked, walked.rewrite)
            self._forget_changed(walked.call.node)
        graph = replace(
            self.graph,
            nodes=self.nodes,
            values=self.values,
            outputs=[Ref(self._whole_output(leaf.register)) if isinstance(leaf, Ref) else leaf for leaf in self.graph.outputs],
            buffer_writes={name: self._whole_output(register) for name, register in self.graph.buffer_writes.items()},
            guards=[],
            sharded=frozenset(self.sharded),
        )
        return replace(self.recording, graph=graph, tensors=self.tensors)

    def _keep(self, walked: WalkedCall) -> None:
        """Takes over a call on whole values."""
        call = walked.call
        own = [ref for ref in call.own.values() if ref.register in walked.gathered]
        node = call.node
        if own:
            node = self._as_function(call, node)
        fill = {r: self._made(Gather(None, s.layout), r, node) for r, s in walked.gathered.items()}
        known = {*node.reads, *(r for r in node.outputs if r is not None)}
        if not fill and not known & self.where.keys() and not known & self.sharded.keys():
            self.nodes.append(node)
            return
        outputs = tuple(None if r is None else self._output(r, None) for r in node.outputs)
        self._add(replace(node, args=self._filled(node.args, fill), kwargs=self._filled(node.kwargs, fill), outputs=outputs))

    @staticmethod
    def _as_function(call: Call, node: Node) -> Node:
        if call.function is None:
            raise PartitionError(
                f"{call.node} has weights that the tensor-parallel plan splits, and can't be called with others"
            )
        path = node.target if isinstance(node.target, str) else node.path
        return replace(node, target=call.function, args=call.args, kwargs=call.kwargs, path=path)

    def _rewrite(self, walked: WalkedCall, rewrite: Rewrite) -> None:
        call = walked.call
        node = call.node
        fill = self._operands(walked, rewrite)
        if self._needs_function(call, rewrite, fill):
            node = self._as_function(call, node)
            if rewrite.args is not None:
                target = node.target if rewrite.target is None else rewrite.target
                node = replace(node, target=target, args=rewrite.args, kwargs=rewrite.kwargs)
        if node.random and rewrite.enter and rewrite.forks:
            node = self._as_function(call, node) if node.is_module else node
            assert not isinstance(node.target, str)
            node = replace(node, target=Forked(None, node.target))
        node = replace(node, flops=node.flops / self.plan.num_ranks, num_bytes=node.num_bytes // self.plan.num_ranks)
        args, kwargs = self._filled(node.args, fill), self._filled(node.kwargs, fill)
        if rewrite.reduce or rewrite.gather is not None:
            self._finished(call, rewrite, replace(node, args=args, kwargs=kwargs), fill)
            return
        outputs = [
            None if r is None else self._output(r, state) for r, state in zip(node.outputs, rewrite.outputs, strict=True)
        ]
        self._add(replace(node, args=args, kwargs=kwargs, outputs=tuple(outputs)))

    def _needs_function(self, call: Call, rewrite: Rewrite, fill: dict[int, int]) -> bool:
        """Says whether a layer can't stay the call of a module: it is called otherwise, or with other weights."""
        return rewrite.args is not None or any(
            fill.get(ref.register, ref.register) != ref.register for ref in call.own.values()
        )

    def _operands(self, walked: WalkedCall, rewrite: Rewrite) -> dict[int, int]:
        """Makes what a call uses in the place of each register, and returns it."""
        call, fill = walked.call, {}
        later = None if rewrite.bias is None else rewrite.bias[0]
        for register in call.refs():
            if register in walked.gathered:
                fill[register] = self._made(Gather(None, walked.gathered[register].layout), register, call.node)
            source = self.graph.sources.get(register)
            in_part = source is not None and source.is_weight and source.name in rewrite.layouts
            if register == later or in_part or call.state(register) is not None:
                continue
            if register in rewrite.sliced:
                fill[register] = self._made(Slice(None, rewrite.sliced[register]), register, call.node, of=fill.get(register))
            elif rewrite.enter and call.node.ambient.grad and self.graph.values[register].requires_grad:
                fill[register] = self._made(Copy(), register, call.node, of=fill.get(register))
        return fill

    def _finished(self, call: Call, rewrite: Rewrite, node: Node, fill: dict[int, int]) -> None:
        """Adds up, or puts together, what a call makes: its share is a value of its own."""
        (register,) = node.outputs
        assert register is not None
        value, near = self.values[register], call.node
        if rewrite.gather is not None:
            part = self._new(
                value, local_shape(value.shape, rewrite.gather, self.rank, self.plan.num_ranks), rewrite.gather, register
            )
            self._add(replace(node, outputs=(part,)))
            self._call(Gather(None, rewrite.gather), (Ref(part),), self._output(register, None), near)
            return
        steps: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(Reduce(), ())]
        if rewrite.scale is not None:
            steps.append((torch.mul, (rewrite.scale,)))
        if rewrite.bias is not None:
            bias, dim = rewrite.bias
            steps.append((add_bias, (Ref(fill.get(bias, self._current(bias))), dim)))
        share = self._new(value, value.shape, None, register)
        self.sharded[share] = Layout(0, ())  # of the right shape, but no value by itself
        self._add(replace(node, outputs=(share,)))
        for position, (target, more) in enumerate(steps):
            last = position == len(steps) - 1
            following = self._output(register, None) if last else self._new(value, value.shape, None, register)
            self._call(target, (Ref(share), *more), following, near)
            share = following

    def _whole_output(self, register: int) -> int:
        state = self.walk.states.get(register)
        if state is None:
            return self._current(register)
        return self._made(Gather(None, state.layout), register, self.makers.get(self._current(register), self.nodes[-1]))

    # -- registers -------------------------------------------------------------------------------------------------

    def _current(self, register: int) -> int:
        return self.where.get(register, register)

    def _filled(self, part: Any, fill: dict[int, int]) -> Any:
        leaves, spec = tree.flatten(part)
        filled = [Ref(fill.get(x.register, self._current(x.register))) if isinstance(x, Ref) else x for x in leaves]
        return tree.unflatten(filled, spec)

    def _made(self, target: Copy | Slice | Gather, register: int, near: Node, *, of: int | None = None) -> int:
        """Returns the register of a copy, a slice or a gathered value, made where it is first needed."""
        source = self._current(register) if of is None else of
        key = source, target, near.ambient  # one made without gradient serves no call with gradient
        if key not in self.ready:
            value = self.graph.values[register]
            layout = target.layout if isinstance(target, Slice) else None
            shares = not isinstance(target, Gather)
            made = self._new(
                value, local_shape(value.shape, layout, self.rank, self.plan.num_ranks), layout, register, shares=shares
            )
            self.values[made].requires_grad = value.requires_grad and near.ambient.grad
            self._call(target, (Ref(source),), made, near)
            self.ready[key] = made
        return self.ready[key]

    def _new(self, like: Value, shape: Sequence[int], layout: Layout | None, stands_for: int, *, shares: bool = False) -> int:
        """Adds a register for a value of a shape, in memory of its own unless it shares that of what it stands for."""
        register = len(self.values)
        storage = like.storage if shares else -1 - register
        self.values.append(replace(like, shape=tuple(shape), storage=storage, private=True))
        self.tensors.append(self.recording.tensors[stands_for])
        if layout is not None:
            self.sharded[register] = layout
        return register

    def _output(self, register: int, state: Sharded | None) -> int:
        """Returns the register for a result, another one where an operand's number would stand for two values."""
        known, layout = self.sharded.get(register), None if state is None else state.layout
        if register in self.where or (known is not None and known != layout):
            made = self._new(self.graph.values[register], self._shape(register, layout), layout, register)
            self.where[register] = made
            return made
        if layout is not None:
            self._set_layout(register, layout)
        return register

    def _set_layout(self, register: int, layout: Layout) -> None:
        self.sharded[register] = layout
        self.values[register].shape = self._shape(register, layout)

    def _shape(self, register: int, layout: Layout | None) -> tuple[int, ...]:
        return local_shape(self.graph.values[register].shape, layout, self.rank, self.plan.num_ranks)

    # -- nodes -----------------------------------------------------------------------------------------------------

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], output: int, near: Node) -> None:
        """Adds a call of our own, as if made at another one's place."""
        path = near.target if isinstance(near.target, str) else near.path
        self._add(
            Node(target, args, {}, (output,), (), (), near.ambient, path, near.line, num_bytes=self.values[output].num_bytes)
        )

    def _add(self, node: Node) -> None:
        leaves = tree.flatten((node.args, node.kwargs))[0]
        node.reads = tuple(leaf.register for leaf in leaves if isinstance(leaf, Ref))
        node.mutates = tuple(self._current(r) for r in node.mutates)
        self.nodes.append(node)
        self.makers.update((r, node) for r in node.outputs if r is not None)

    def _forget_changed(self, node: Node) -> None:
        """Lets go of copies of memory that a call has changed."""
        if not node.mutates and not node.changes:
            return
        changed = self.graph.storage_of(node.mutates)
        changed |= {self.graph.values[r].storage for r, s in self.graph.sources.items() if s.name in node.changes}
        self.ready = {k: r for k, r in self.ready.items() if self._storage_behind(k[0]) not in changed}

    def _storage_behind(self, register: int) -> int:
        stands_for = {made: original for original, made in self.where.items()}
        register = stands_for.get(register, register)
        return self.graph.values[register].storage if register < len(self.graph.values) else self.values[register].storage
