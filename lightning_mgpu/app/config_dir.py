"""Where the configuration files lie: at the top of a checkout, or inside the installed package."""

from pathlib import Path

import lightning_mgpu


def find_config_dir() -> Path:
    """Finds the folder that holds ``train.yaml`` and the config groups.

    Returns:
        ``lightning_mgpu/conf`` where the package was installed from a wheel, else ``conf`` beside the package, as in a
        checkout.

    Raises:
        FileNotFoundError: If neither holds ``train.yaml``.
    """
    package_dir = Path(lightning_mgpu.__path__[0]).resolve()
    candidates = (package_dir / "conf", package_dir.parent / "conf")
    for candidate in candidates:
        if (candidate / "train.yaml").is_file():
            return candidate
    message = f"found no train.yaml in {candidates[0]} nor in {candidates[1]}; reinstall lightning_mgpu"
    raise FileNotFoundError(message)
