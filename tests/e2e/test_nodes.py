"""Three nodes with unlike accelerators: pools find theirs; a node that is lost and comes back changes nothing."""

from __future__ import annotations

import threading
import time

import pytest
import ray

from tests.e2e.harness import FLOAT64, relative_difference

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STREAMING = [
    *FLOAT64,
    "trainer.v1.digen.preset=digen",
    "trainer.v1.digen.gap.fragment_size=1",
    "trainer.v1.digen.placement=disaggregated",
    "trainer.v1.digen.accelerator_type.trainer=CARD_A",
    "trainer.v1.digen.accelerator_type.rollout=CARD_B",
    "actor_rollout_ref.rollout.nnodes=2",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
]


def node_of(worker) -> str:
    return ray.get(worker.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id()))


def test_a_node_with_two_replicas_is_lost_in_a_streaming_step_and_used_again_when_it_is_back(cluster, launch):
    trainer_node = cluster.add_node(num_cpus=2, num_gpus=1, resources={"CARD_A": 1})
    rollout_nodes = [cluster.add_node(num_cpus=3, num_gpus=2, resources={"CARD_B": 1}) for _ in range(2)]
    try:
        run = launch(*STREAMING, steps=2)
        fleet = run.trainer.fleet
        assert node_of(run.trainer.ranks.workers[0]) == trainer_node.node_id
        places = {replica.name: node_of(replica.workers[0]) for replica in fleet.replicas}
        assert sorted(places.values()) == sorted([node.node_id for node in rollout_nodes] * 2)
        undisturbed = run.fit().weights()

        lost = rollout_nodes.pop()
        names = {name for name, node in places.items() if node == lost.node_id}
        run.again()

        def take_away() -> None:
            while run.manager.in_flight < 4:
                time.sleep(0.001)
            cluster.remove_node(lost, allow_graceful=False)

        thread = threading.Thread(target=take_away)
        thread.start()
        run.fit()
        thread.join()
        assert len(run.steps()) == 2
        assert relative_difference(undisturbed, run.weights()) <= 1e-9
        assert {replica.name for replica in fleet.replicas if fleet.version_of(replica) == 2} == set(places) - names

        rollout_nodes.append(cluster.add_node(num_cpus=3, num_gpus=2, resources={"CARD_B": 1}))
        deadline = time.monotonic() + 240
        while any(fleet.version_of(replica) != 2 for replica in fleet.replicas) and time.monotonic() < deadline:
            time.sleep(0.1)
        run.again().fit()
        assert relative_difference(undisturbed, run.weights()) <= 1e-9
        used = {sample.replica for group in run.trainer.outcome.groups for sample in group.samples}
        assert used & names
    finally:
        for node in [trainer_node, *rollout_nodes]:
            cluster.remove_node(node)
