"""The strategy of ``strategy=single``."""

from collections.abc import Sequence


def single_device(devices: int | str | Sequence[int]) -> str:
    """Chooses Lightning's strategy for one device.

    Args:
        devices: The devices as the Trainer takes them: a count, or the indices as a list or separated by commas.

    Returns:
        The strategy's name, for which Lightning takes a single device of the Trainer's kind.

    Raises:
        ValueError: If ``devices`` are several, for which Lightning would take up data parallelism.
    """
    if isinstance(devices, str) and "," in devices:
        devices = [int(index) for index in devices.split(",") if index.strip()]
    one = len(devices) == 1 if isinstance(devices, Sequence) and not isinstance(devices, str) else devices in (1, "1")
    if not one:
        message = (
            f"strategy=single trains on one device, but trainer.devices is {devices!r}; choose strategy=pipeline to "
            "cut the model over them, strategy=ddp to copy it to each, or trainer.devices=1"
        )
        raise ValueError(message)
    return "auto"
