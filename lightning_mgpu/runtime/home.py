"""Where values are: on the lead, or away with their owners; and how they get from one to the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_mgpu.errors import PlacementError
from lightning_mgpu.partition.names import Names
from lightning_mgpu.partition.plan import CallPlan
from lightning_mgpu.partition.recording import is_leaf_type
from lightning_mgpu.runtime import messages as m
from lightning_mgpu.runtime.copies import Copies
from lightning_mgpu.runtime.modes import Modes, modes_of
from lightning_mgpu.runtime.pack import pack
from lightning_mgpu.runtime.placeholder import hide, is_hidden, restore
from lightning_mgpu.runtime.unmade import is_unmade

if TYPE_CHECKING:
    from lightning_mgpu.runtime.lead import Lead

__all__ = ["Home", "check_dense", "check_gradient_hooks"]


def check_gradient_hooks(names: Names, path: str) -> None:
    """Refuses hooks on the gradients of parameters: they would stay behind when the values go to their stages.

    Args:
        names: names below the root.
        path: path of the module that is pipelined.

    Raises:
        PlacementError: with the name of the parameter and the remedy.
    """
    for name in names.tensor_names(names.module_at[path]):
        tensor = names.tensors[name]
        if is_hidden(tensor):
            continue
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:  # noqa: SLF001 - no public call lists them
            raise PlacementError(
                f"parameter {name!r} has a hook on its gradient, which can't run on another stage, where the gradient comes in "
                "parts, one of each microbatch; change the gradient in on_after_backward, inside "
                "self.trainer.strategy.summon_parameters()"
            )


def check_dense(names: Names, shared: Collection[str]) -> None:
    """Refuses sparse gradients of parameters that several processes hold, since those add them up whole.

    Args:
        names: names below the root.
        shared: the tensors that several processes hold.

    Raises:
        PlacementError: with the name of the module and the remedy.
    """
    for path, module in names.module_at.items():
        if getattr(module, "sparse", False) is True and f"{path}.weight".lstrip(".") in shared:
            raise PlacementError(
                f"{path} ({type(module).__name__}) makes sparse gradients, and several processes hold its weight, which need "
                "them whole; use sparse=False, or data_parallel_size=1 and no other layer with the same weight"
            )


class Home:
    """Knows what each worker has of the module.

    Attributes:
        away: whether values live with their owners now.
        copies: what the lead shares with workers.
        modes: the ``training`` flags each worker knows, by path.
        needs: the ``requires_grad`` flags each worker knows, by name.
    """

    def __init__(self, lead: Lead) -> None:
        self.lead = lead
        self.copies = Copies(lead)
        self.forget()

    def forget(self) -> None:
        """Starts over: workers know nothing, everything is here."""
        workers = self.lead.workers.indices
        self.away = False
        self.copies.release()
        self._hidden_buffers: list[str] = []
        self._sent: dict[int, set[str]] = {j: set() for j in workers}
        self._modules: dict[int, dict[int, str]] = {j: {} for j in workers}
        self.modes: dict[int, dict[str, Modes]] = {j: {} for j in workers}
        self.needs: dict[int, dict[str, bool]] = {j: {} for j in workers}

    def names_at(self, process: int) -> Mapping[int, str]:
        """Returns the name by ``id`` of the tensors a worker has."""
        tensors = self.lead.planner.names.tensors
        return {id(tensors[name]): name for name in self._sent[process]}

    def modules_at(self, process: int) -> Mapping[int, str]:
        """Returns the path by ``id`` of the modules a worker has."""
        return self._modules[process]

    def send_tensors(self) -> bool:
        """Sends owners the tensors they lack, or have an old value of.

        Returns:
            Whether anything was sent.
        """
        lead, names = self.lead, self.lead.planner.names
        fresh = False
        for process in lead.workers.indices:
            owned = lead.planner.placement.held_by(process)
            lacking = [n for n in owned if n not in self._sent[process]]
            if not lacking:
                continue
            fresh = True
            for piece in lead.origins.pieces(lacking):
                self._send_tensors(process, piece)
            self._sent[process].update(lacking)
            self.needs[process].update({n: names.tensors[n].requires_grad for n in lacking})
        if lead.workers.plane is not None:
            lead.workers.plane.flush()
        return fresh

    def _send_tensors(self, process: int, wanted: Sequence[str]) -> None:
        lead, names = self.lead, self.lead.planner.names
        values = {n: self._value(n).detach().requires_grad_(names.tensors[n].requires_grad) for n in wanted}
        primary = lead.planner.placement.primary
        made = [n for n in wanted if not is_unmade(names.tensors[n])]
        mine = [n for n in made if names.kinds[n] == "parameter" and primary(n) == process]
        gradients = {n: names.tensors[n].grad for n in mine if names.tensors[n].grad is not None}
        packed = pack((values, gradients), what="parameters")
        lead.workers.tell(process, m.Load(packed.header(), {n: names.kinds[n] for n in wanted}), packed)
        if len(made) < len(wanted) and lead.workers.plane is not None:
            lead.workers.plane.flush()  # so that what was made for it is not kept

    def _value(self, name: str) -> Tensor:
        tensor = self.lead.planner.names.current(name)
        return self.lead.origins.value(name) if is_unmade(tensor) else tensor

    def send_modules(self, plan: CallPlan) -> None:
        """Sends workers the leaf modules of a plan that they lack."""
        lead, names = self.lead, self.lead.planner.names
        for process in lead.workers.indices:
            known = set(self._modules[process].values())
            here = lead.stages_of(process)
            wanted = {p for every in plan.stages.values() for j in here for p in every[j].program.modules()} - known
            if not wanted:
                continue
            modules = {path: names.module_at[path] for path in sorted(wanted)}
            with lead.patches.lifted():
                packed = pack(modules, names=self.names_at(process), modules=self._modules[process], what="modules")
            lead.workers.tell(process, m.Ship(packed.header()), packed)
            self._modules[process].update({id(module): path for path, module in modules.items()})
            self.modes[process].update({path: modes_of(module) for path, module in modules.items()})
        if lead.workers.plane is not None:
            lead.workers.plane.flush()

    def hide(self) -> None:
        """Puts placeholders in the place of what lives elsewhere."""
        names, placement = self.lead.planner.names, self.lead.planner.placement
        for name in placement.away():
            tensor = names.tensors[name] if names.kinds[name] == "parameter" else names.current(name)
            hide(tensor, name, max(placement.owners[name]))
        self._hidden_buffers = [name for name in placement.away() if names.kinds[name] == "buffer"]
        self.copies.watch()
        self.away = True

    def send_changed(self) -> None:
        """Sends owners the buffers that the user has put in the place of placeholders, and what was changed of copies."""
        names = self.lead.planner.names
        replaced = [name for name in self._hidden_buffers if not is_hidden(names.current(name))]
        if changed := [*replaced, *self.copies.changed()]:
            for sent in self._sent.values():
                sent.difference_update(changed)
            self.send_tensors()
            self.hide()
            self.copies.note()

    def bring_attributes(self) -> None:
        """Brings what torch's own layers have computed elsewhere and keep beside their weights, as a pruned layer does."""
        for process in self.lead.owners:
            modules = self._modules[process]
            found = [(path, self.lead.planner.names.module_at[path]) for path in modules.values()]
            asked = {
                f"{path}.{name}": (module, name)
                for path, module in found
                for name, value in (vars(module).items() if is_leaf_type(module) else ())
                if type(value) is Tensor
            }
            if asked:
                [values] = self.lead.workers.collect([process], "values", [list(asked)])
                for key, (module, name) in asked.items():
                    setattr(module, name, values[key])

    def send_back(self) -> None:
        """Sends owners all values and gradients as they are here now; an owner writes only what differs."""
        for sent in self._sent.values():
            sent.clear()
        self.send_tensors()
        self.copies.note()

    def stay(self) -> None:
        """Makes what was brought home the truth; workers' copies are old from now on."""
        self.away = False
        self.copies.release()
        for sent in self._sent.values():
            sent.clear()

    def bring(self, *, gradients: bool = True) -> None:
        """Brings values and gradients home, for as long as the block that asked for them; `hide` sends them off again.

        Args:
            gradients: whether gradients come too, which doubles the memory that is needed.
        """
        lead, names = self.lead, self.lead.planner.names
        asked: dict[int, list[str]] = {j: [] for j in lead.workers.indices}
        for name in lead.planner.placement.away():
            asked[lead.planner.placement.primary(name)].append(name)
        asked_of = list(asked)
        values = lead.workers.collect(asked_of, "values", list(asked.values()))
        parameters = [[n for n in wanted if names.kinds[n] == "parameter"] for wanted in asked.values()]
        found = lead.workers.collect(asked_of, "gradients", parameters) if gradients else [{} for _ in values]
        for of_owner, grads in zip(values, found, strict=True):
            self.put(of_owner, grads)

    def put(self, values: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]) -> None:
        """Gives hidden tensors their values back."""
        names = self.lead.planner.names
        for name, value in values.items():
            for tensor in (names.current(name), names.tensors[name]):  # two, where the user has put another in its place
                if is_hidden(tensor):
                    restore(tensor, value, gradients.get(name))

    def give_up(self) -> list[str]:
        """Fills what can't be brought home any more with NaN, so that nothing stale is taken for the truth.

        Returns:
            The names of what is lost.
        """
        names = self.lead.planner.names
        lost = [name for name in names.tensors if is_hidden(names.current(name)) and not is_unmade(names.current(name))]
        for name in lost:
            tensor = names.current(name)
            shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
            filler = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
            restore(tensor, torch.full(shape, filler, dtype=dtype, device=device))
        self.forget()
        return lost
