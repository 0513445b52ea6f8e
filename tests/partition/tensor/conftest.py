"""What the tests of tensor parallelism share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Computes in one thread, since these tensors are small and other tests run meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def double():
    """Computes in double precision for one test, so that rounding hides no mistake, and draws from a fixed seed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)
