"""Compares the cut stages with the module's own forward, while the lead still has all of it.

What the recorder can't see, and a forward that looks across the batch, then shows as an error that names the first call that
differs, never as training that is wrong in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_mgpu import tree
from lightning_mgpu.errors import SelfCheckError
from lightning_mgpu.partition.ambient import Ambient
from lightning_mgpu.partition.changes import preserved_rng
from lightning_mgpu.partition.closeness import close
from lightning_mgpu.partition.gather import deal_inputs, finish, gather
from lightning_mgpu.partition.mixing import evaluating, find_mixing
from lightning_mgpu.partition.plan import CallPlan, Planner, counted_buffers
from lightning_mgpu.partition.program import Step
from lightning_mgpu.partition.recording import Recording
from lightning_mgpu.partition.stage import StageRun

__all__ = ["check_plan"]


def check_plan(
    planner: Planner, plan: CallPlan, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]
) -> None:
    """Checks one plan on the call it was made from, in the modes the module is in.

    The cut stages over all microbatches, gathered and through the tail, are compared with the module's own forward on the
    whole batch. Where dropout, other random numbers or batch statistics stand against that, this is done in evaluation mode,
    and rows of other microbatches are changed to see that it makes no difference. In any case the first microbatch of each
    size is compared under the same random state: values, gradients by name, and changed buffers.

    Args:
        planner: the planner that made the plan.
        plan: the plan.
        args: positional arguments of the call.
        kwargs: keyword arguments.
        tensors: the tensors among them.

    Raises:
        SelfCheckError: where something differs, with the first call that does.
    """
    ambient = Ambient.current().without_inference()
    module = planner.names.module_at[plan.path]
    calm = None if _repeats(plan) else _evaluation_plan(planner, plan, args, kwargs)
    with (
        torch.inference_mode(False),
        ambient.applied(),
        preserved_rng(),
        planner.names.scratch_buffers(),
        _kept_attributes(planner),
    ):
        tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        leaves, spec = tree.flatten((args, kwargs))
        unique = iter(tensors)
        seen: dict[int, Tensor] = {}
        own = [_own(leaf, unique, seen) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree.unflatten(own, spec)
        if _repeats(plan):
            _check_whole(planner, plan, args, kwargs, tensors)
        elif plan.num_microbatches > 1:
            mixing = find_mixing(planner, plan, args, kwargs, tensors)
            if mixing is not None:
                raise SelfCheckError(_text(plan, *mixing))
        if calm is not None:
            with evaluating(module.modules()):
                _check_whole(planner, calm, args, kwargs, tensors)
        for rows in plan.stages:
            _check_microbatch(planner, plan, args, kwargs, tensors, rows)


def _own(leaf: Tensor, unique: Any, seen: dict[int, Tensor]) -> Tensor:
    if id(leaf) not in seen:
        seen[id(leaf)] = next(unique)
    return seen[id(leaf)]


def _repeats(plan: CallPlan) -> bool:
    """Says whether a call computes on microbatches what it computes on the whole batch, and does so again."""
    steps = [s for stages in plan.stages.values() for stage in stages for s in stage.program.steps]
    random = any(plan.graph.nodes[i].random for i in (*plan.batching.body, *plan.batching.tail))
    counted = any(s.batch_norm for s in steps) or any(counted_buffers(stages) for stages in plan.stages.values())
    return not random and (not counted or plan.num_microbatches == 1)


def _evaluation_plan(planner: Planner, plan: CallPlan, args: Any, kwargs: Any) -> CallPlan | None:
    """Makes the plan of the same call in evaluation mode, if that is another call and one that repeats.

    What can't be planned is left for the first evaluation to report.
    """
    modules = list(planner.names.module_at[plan.path].modules())
    if plan.num_microbatches == 1 or not any(module.training for module in modules):
        return None
    with torch.inference_mode(False), torch.no_grad(), evaluating(modules):
        try:
            calm, _, _ = planner.find(plan.path, args, kwargs)
        except Exception:
            return None
        return calm if _repeats(calm) else None


def _check_whole(planner: Planner, plan: CallPlan, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> None:
    with torch.no_grad(), planner.names.scratch_buffers():
        truth = planner.recorder.record(planner.names.module_at[plan.path], args, kwargs, answers=plan.graph.guards, real=True)
    with torch.no_grad(), planner.names.scratch_buffers():
        made = _run_stages(planner, plan, tensors, grad=False)
        result = finish(plan, tensors, gather(plan, made), planner.store)
    with torch.no_grad(), planner.names.scratch_buffers(), _kept_attributes(planner):
        expected = planner.names.module_at[plan.path].forward(*args, **kwargs)
    got = tree.tensors_in(result[0])
    for a, b in zip(got, tree.tensors_in(expected), strict=True):
        if not close(a, b):
            raise SelfCheckError(_text(plan, _first_difference(planner, plan, truth.tensors, tensors), a, b))


def _run_stages(planner: Planner, plan: CallPlan, tensors: Sequence[Tensor], *, grad: bool) -> list[list[Tensor]]:
    every = range(plan.num_microbatches)
    runs = [StageRun(planner.store, every, grad=grad, inference=False, seed=0) for _ in plan.layout.stages]
    made = []
    for i, inputs in enumerate(deal_inputs(plan, tensors)):
        flowing: list[Tensor] = []
        for stage, run in zip(plan.stages[plan.sizes[i]], runs, strict=True):
            flowing = run.forward(stage, i, flowing, [inputs[c.register] for c in stage.inputs])
        made.append(flowing)
    return made


def _first_difference(planner: Planner, plan: CallPlan, truth: Sequence[Tensor], tensors: Sequence[Tensor]) -> str:
    """Finds the first body call whose result differs from the one on the whole batch."""
    parts: dict[int, list[Tensor]] = {}
    labels: dict[int, str] = {}

    def observe(step: Step, result: Any) -> None:
        for register, leaf in zip(step.outputs, tree.flatten(result)[0], strict=False):
            if register is not None and isinstance(leaf, Tensor):
                parts.setdefault(register, []).append(leaf.detach().clone())
                labels.setdefault(register, step.label)

    with torch.no_grad(), planner.names.scratch_buffers():
        for i, inputs in enumerate(deal_inputs(plan, tensors)):
            flowing: dict[int, Any] = {}
            for stage in plan.stages[plan.sizes[i]]:
                environment = {c.register: flowing[c.register] for c in stage.receives}
                environment |= {c.register: inputs[c.register].detach() for c in stage.inputs}
                flowing = stage.program.run(environment, planner.store, observe=observe)
    for register in sorted(parts):
        dim = plan.batching.dims[register]
        joined = torch.cat(parts[register], dim=dim) if isinstance(dim, int) else parts[register][0]
        if joined.shape != truth[register].shape or not close(joined, truth[register]):
            return labels[register]
    return "its result"


def _check_microbatch(planner: Planner, plan: CallPlan, args: Any, kwargs: Any, tensors: Sequence[Tensor], rows: int) -> None:
    """Compares one microbatch with the module's own forward on it: values, gradients and buffers."""
    index = plan.sizes.index(rows)
    inputs = {r: t.detach().clone().requires_grad_(t.requires_grad) for r, t in deal_inputs(plan, tensors)[index].items()}
    by_id = dict(zip((id(t) for t in tensors), inputs.values(), strict=True))
    args, kwargs = tree.map_tensors(lambda t: by_id[id(t)], (args, kwargs))
    grad = torch.is_grad_enabled()
    module = planner.names.module_at[plan.path]
    state = torch.get_rng_state()
    truth = planner.recorder.record(module, args, kwargs, answers=plan.graph.guards, real=True)
    torch.set_rng_state(state)
    with planner.names.scratch_buffers():
        flowing: dict[int, Any] = {}
        for stage in plan.stages[rows]:
            environment = {c.register: flowing[c.register] for c in stage.receives}
            environment |= {c.register: inputs[c.register] for c in stage.inputs}
            flowing = stage.program.run(environment, planner.store)
        got = [flowing[r] for r in plan.batching.wanted]
        expected = [truth.tensors[r] for r in plan.batching.wanted]
        for register, a, b in zip(plan.batching.wanted, got, expected, strict=True):
            if not close(a, b):
                raise SelfCheckError(_text(plan, _made_by(plan, register), a, b))
        if grad and not planner.names.changing:
            _compare_gradients(planner, plan, got, expected)
        _compare_buffers(planner, plan, truth)


def _compare_buffers(planner: Planner, plan: CallPlan, truth: Recording) -> None:
    names = {name for stages in plan.stages.values() for stage in stages for name in stage.names}
    tail = {s.name for s in plan.tail.sources.values()} | set(plan.tail.buffer_writes)
    for name in names - tail:
        if planner.names.kinds[name] == "buffer" and not close(planner.store.tensor(name), truth.buffers[name]):
            raise SelfCheckError(_text(plan, f"buffer {name!r}", planner.store.tensor(name), truth.buffers[name]))


def _compare_gradients(planner: Planner, plan: CallPlan, got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    kinds, tensors = planner.names.kinds, planner.names.tensors
    trained = {n: t for n, t in tensors.items() if kinds[n] == "parameter" and t.requires_grad}
    pairs = [(a, b) for a, b in zip(got, expected, strict=True) if b.requires_grad]
    if not pairs or not trained:
        return
    seeds = [torch.randn_like(b) for _, b in pairs]
    ours = _dense(torch.autograd.grad([a for a, _ in pairs], list(trained.values()), seeds, allow_unused=True))
    theirs = _dense(torch.autograd.grad([b for _, b in pairs], list(trained.values()), seeds, allow_unused=True))
    largest = max((float(t.abs().max()) for t in tree.tensors_in(theirs) if t.numel()), default=0.0)
    for name, a, b in zip(trained, ours, theirs, strict=True):
        if not _close_or_missing(a, b, largest * 1e-3):
            raise SelfCheckError(_text(plan, f"the gradient of {name!r}", a, b))


def _dense(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Fills sparse gradients up, as those of an embedding may be."""
    return [g if g is None or g.layout == torch.strided else g.to_dense() for g in gradients]


def _made_by(plan: CallPlan, register: int) -> str:
    return next((str(n) for n in plan.graph.nodes if register in n.outputs), "its result")


@contextmanager
def _kept_attributes(planner: Planner) -> Any:
    before = [(m, dict(m.__dict__)) for m in planner.names.root.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            if module.__dict__.keys() != attributes.keys() or any(module.__dict__[k] is not v for k, v in attributes.items()):
                module.__dict__.clear()
                module.__dict__.update(attributes)


def _close_or_missing(a: Tensor | None, b: Tensor | None, floor: float) -> bool:
    """Says whether two gradients agree, ``None`` agreeing with itself alone."""
    return a is b if a is None or b is None else close(a, b, floor)


def _text(plan: CallPlan, where: str, got: Tensor | None, expected: Tensor | None) -> str:
    def largest() -> str:
        if got is None or expected is None or got.shape != expected.shape:
            return (
                f"shapes {None if got is None else tuple(got.shape)} and {None if expected is None else tuple(expected.shape)}"
            )
        return f"largest difference {float((got.detach().double() - expected.detach().double()).abs().max()):.3g}"

    return (
        f"the stages don't compute what {plan.path or 'the module'} computes: {where} is the first to differ ({largest()}); it "
        f"looks across the rows of the batch, or does something a recording can't see. Use num_microbatches=1 if it looks "
        'across the batch, or pipeline another module with module="..."'
    )
