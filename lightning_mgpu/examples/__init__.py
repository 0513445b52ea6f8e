"""Small LightningModules and their data, as anybody would write them.

Nothing here knows that it may be cut into stages: the examples import nothing else of this package, and a contract
holds them to it. Each model is a class to read in one go, each data set is real or drawn from a seed, and none is
downloaded unless the caller asks for it.
"""

from lightning_mgpu.examples.cnn import CNN
from lightning_mgpu.examples.digits import DigitsDataModule
from lightning_mgpu.examples.linear import Linear, TwoLayerLinear
from lightning_mgpu.examples.mnist import MNISTDataModule
from lightning_mgpu.examples.random_linear import RandomLinearDataModule

__all__ = [
    "CNN",
    "DigitsDataModule",
    "Linear",
    "MNISTDataModule",
    "RandomLinearDataModule",
    "TwoLayerLinear",
]
