"""What the tests of tensor parallelism share."""

import pytest
import torch


@pytest.fixture
def double():
    """Computes in double precision for one test, so that rounding hides no mistake, and draws from a fixed seed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)
