"""What the user's optimizer holds as its ``state`` while that lives with the owners of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, NoReturn

from lightning_mgpu.errors import PlacementError

__all__ = ["AwayState"]


class AwayState(MutableMapping[Any, Any]):
    """Raises one sentence for whatever is asked of it, so that nothing partial is read and no change is lost.

    Args:
        optimizer: class of the optimizer.
    """

    def __init__(self, optimizer: str) -> None:
        self._optimizer = optimizer

    def _refuse(self) -> NoReturn:
        raise PlacementError(
            f"the state of {self._optimizer} lives on the stages of its parameters; read it with optimizer.state_dict(), "
            "change it with optimizer.load_state_dict(...), or begin anew with optimizer.state = collections.defaultdict(dict)"
        )

    def __getitem__(self, key: Any) -> Any:
        self._refuse()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse()

    def __delitem__(self, key: Any) -> None:
        self._refuse()

    def __iter__(self) -> Iterator[Any]:
        self._refuse()

    def __len__(self) -> int:  # noqa: PLE0303 - it never returns
        self._refuse()
