"""Placement: the Trainer's pool and the Generator's pool as Ray placement groups of their own."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

import ray
from ray._private.state import available_resources_per_node
from verl.plugin.platform import get_platform
from verl.single_controller.ray.base import RayResourcePool, ResourcePoolManager

TRAINER_POOL = "trainer_pool"
ROLLOUT_POOL = "rollout_pool"
REWARD_POOL = "reward_pool"


class PlacementError(ValueError):
    """The cluster cannot hold the pools; the message lists what it has."""


@dataclass
class DigenResourcePoolManager(ResourcePoolManager):
    """veRL's manager, with an accelerator type per pool and a check that names what the cluster has.

    Attributes:
        accelerator_types: pool name -> Ray resource name, or None.
        reward_devices: devices of each reward worker; their placement group is made with them, but must fit beside.
    """

    accelerator_types: dict[str, str | None] = field(default_factory=dict)
    reward_devices: list[float] = field(default_factory=list)

    def create_resource_pool(self) -> None:
        """Check the cluster, then describe one placement group per node of each pool.

        Raises:
            PlacementError: a pool does not fit.
        """
        check_placement(
            self.resource_pool_spec | ({REWARD_POOL: self.reward_devices} if self.reward_devices else {}),
            self.accelerator_types,
            list(available_resources_per_node().values()),
            device=get_platform().ray_resource_name(),
            cpus_per_bundle=self.max_colocate_count,
        )
        for name, process_on_nodes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes=process_on_nodes,
                use_gpu=True,
                max_colocate_count=self.max_colocate_count,
                name_prefix=f"{name}_{uuid.uuid4().hex[:8]}_",  # two runs may share a cluster
                accelerator_type=self.accelerator_types.get(name),
            )


def check_placement(
    pools: dict[str, list[float]],
    accelerator_types: dict[str, str | None],
    nodes: list[dict[str, float]],
    *,
    device: str,
    cpus_per_bundle: int = 1,
) -> None:
    """Refuse pools that the free resources of the nodes cannot hold (first fit, largest part first).

    Args:
        pools: pool -> devices wanted in each of its parts; a part is on one node.
        accelerator_types: pool -> Ray resource that its nodes must have.
        nodes: free resources of each node.
        device: Ray's name of the device resource (``GPU``, ``NPU``).

    Raises:
        PlacementError: with what is wanted and what there is.
    """
    free = [dict(node) for node in nodes]
    parts = sorted(
        ((size, name) for name, sizes in pools.items() for size in sizes), key=lambda part: part[0], reverse=True
    )
    for size, name in parts:
        wanted_type, cpus = accelerator_types.get(name), max(1, size) * cpus_per_bundle
        for node in free:
            fits = node.get(device, 0) >= size and node.get("CPU", 0) >= cpus
            if fits and (wanted_type is None or node.get(wanted_type, 0) > 0):
                node[device] -= size
                node["CPU"] -= cpus
                break
        else:
            wanted = "; ".join(
                f"{pool}: {sizes} {device} per node"
                + (f" with {accelerator_types[pool]}" if accelerator_types.get(pool) else "")
                for pool, sizes in pools.items()
            )
            has = "; ".join(
                ", ".join(
                    f"{k}={v:g}"
                    for k, v in sorted(node.items())
                    if not k.startswith(("node:", "object_store", "memory"))
                )
                for node in nodes
            )
            raise PlacementError(
                f"{name} needs {size} {device} and {cpus} CPU on one node"
                + (f" with resource {wanted_type}" if wanted_type else "")
                + f", which no node has left. Wanted in all: {wanted}. Free on the nodes: {has or 'no nodes'}. Change "
                "trainer.{nnodes,n_gpus_per_node}, actor_rollout_ref.rollout.{nnodes,n_gpus_per_node} or "
                "trainer.v1.digen.{reward_workers.num_gpus,accelerator_type} (on a CPU machine: "
                "ray_kwargs.ray_init.{num_gpus,num_cpus})"
            )


def cluster_summary() -> str:
    """Resources of the whole cluster in one line."""
    return ", ".join(f"{k}={v:g}" for k, v in sorted(ray.cluster_resources().items()) if not k.startswith("node:"))
