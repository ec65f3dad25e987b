"""veRL on its CPU platform, whatever the machine has; set before anything imports veRL."""

import os

os.environ.setdefault("VERL_PLATFORM", "cpu")

import pytest


@pytest.fixture(params=["gloo", "like nccl"])
def transport(request, monkeypatch) -> str:
    """The channel over real sockets, and over a transport that notices nothing and ends only by abort."""
    import ray

    from tests.sync.doubles import open_stuck_group
    from verl_digen.sync import groups

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    if request.param != "gloo":
        monkeypatch.setattr(groups, "open_group", open_stuck_group)
    return request.param
