"""veRL on its CPU platform, whatever the machine has; set before anything imports veRL."""

import os

os.environ.setdefault("VERL_PLATFORM", "cpu")

import pytest  # noqa: E402
import torch.distributed as dist  # noqa: E402


@pytest.fixture(scope="package", autouse=True)
def one_rank():
    """A gloo group of this process alone, without ports and without environment variables."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
