"""The rollout replica ``diffusers``: a Ray server that denoises fragments with a diffusers model.

One process per replica: the worker that receives weights is the server that generates. Calls are handled in the order
they arrive, one at a time, so weights change only between fragments and a trajectory is never cut by a publish (I4).
Three calls have threads of their own: a ping, the end of a transfer, and giving the weights to another replica.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import closing
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from ray.util.placement_group import PlacementGroup
from tensordict import TensorDict
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.single_controller.ray.base import RayResourcePool
from verl.utils.device import get_device_id, get_device_name
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from verl_digen.config.deadlines import Deadlines
from verl_digen.config.digen import DigenConfig
from verl_digen.config.model import DiffusionModelConfig
from verl_digen.platform.memory import peak_memory_bytes, reset_peak_memory
from verl_digen.rollout.requests import Fragment, FragmentReport, row_key
from verl_digen.rollout.sampler import DenoisedFragment, Sampler
from verl_digen.sync.ends import Place, WeightEnd

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


def _device() -> torch.device:
    name = get_device_name()
    return torch.device(name) if name == "cpu" else torch.device(name, get_device_id())


class RolloutRole:
    """What a Ray actor needs to be a replica; mixed into the rollout worker and into the colocated training worker."""

    sampler: Sampler | None = None

    def init_sampler(self, model: DiffusionModelConfig, digen: DigenConfig, seed: int, name: str) -> None:
        if digen.threads.rollout is not None:
            torch.set_num_threads(digen.threads.rollout)
        self._replica_name = name
        self._rollout_threads = torch.get_num_threads()
        self.sampler = Sampler(model, digen, seed=seed, device=_device())
        self.sampler.load()
        tq.init()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def prompt_tensors(self, prompt: str, negative_prompt: str) -> tuple[dict, dict | None]:
        """Tensors of a prompt and, with guidance, of its negative prompt, on the host."""
        sampler = self.sampler
        prompts = [prompt, *([negative_prompt] if sampler.guidance(False).uses_cfg else [])]
        tensors = [{n: t.cpu() for n, t in sampler.embeddings(p).items()} for p in prompts]
        return tensors[0], tensors[1] if len(tensors) > 1 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def effective_parameters(self) -> dict[str, Any]:
        """Sampling parameters really used, for training and for validation."""
        return {"train": self.sampler.effective(False), "validation": self.sampler.effective(True)}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generate(self, fragment: Fragment) -> tuple[FragmentReport, DataProto]:
        """Denoise a fragment, put its rows into the TransferQueue, hand its pixels to the caller.

        Call it with ``num_returns=2``: the report is for the driver, the pixels go on to a reward worker.

        Raises:
            ValueError: the replica does not hold the version that the fragment asks for.
        """
        started = time.time()
        version = self.sampler.version
        if version != fragment.version:
            raise ValueError(
                f"replica {self._replica_name} holds version {version}, fragment {fragment.fragment_id} needs "
                f"{fragment.version}"
            )
        reset_peak_memory()
        torch.set_num_threads(self._rollout_threads)
        self.sampler.to(self.sampler.device)
        done = self.sampler.run(fragment)
        mark = time.perf_counter()
        if not fragment.validate:
            _put_rows(fragment, done, version, self._replica_name, self.sampler.seed)
        done.phases["store"] = time.perf_counter() - mark
        report = FragmentReport(
            fragment_id=fragment.fragment_id,
            replica=self._replica_name,
            version=version,
            samples=fragment.samples,
            noise_hashes=tuple(done.noise_hashes),
            transitions=tuple(len(s) for s in done.result.starts) or (0,) * len(fragment.samples),
            effective=self.sampler.effective(fragment.validate),
            started=started,
            ended=time.time(),
            phases=done.phases,
            peak_memory_bytes=peak_memory_bytes(),
        )
        return report, _reward_input(fragment, done.pixels)


class DiffusionRolloutWorker(RolloutRole, WeightEnd, Worker):
    """A replica with devices of its own."""

    def __init__(self, model: DiffusionModelConfig, digen: DigenConfig, seed: int, bucket_bytes: int):
        Worker.__init__(self)
        self._model, self._digen, self._seed = model, digen, seed
        self.init_end(bucket_bytes, Deadlines.of(digen.failure))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self, name: str) -> dict[str, Any]:
        """Load the model from disk."""
        self.use_device()
        self.init_sampler(self._model, self._digen, self._seed, name)
        return {
            "lora": self.sampler.lora_bound,
            "attention_backend": self.sampler.family.attention_backend,
            "computed": [self.sampler.computed()],
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def update_weights(self, global_steps: int, place: Place) -> dict[str, Any]:
        """Take version ``global_steps`` from a channel, bucket by bucket, and acknowledge it with a checksum."""
        with closing(self.receive(global_steps, place)) as tensors:
            checksum, count = self.sampler.load_weights(tensors, global_steps)
        return {"replica": self._replica_name, "version": global_steps, "checksum": checksum, "tensors": count}

    @ray.method(concurrency_group="send")
    def send_weights(self, version: int, place: Place) -> dict[str, Any]:
        """Give the version that is held here to other replicas; generation goes on meanwhile.

        Raises:
            ValueError: another version is held.
        """
        self.use_device()
        if self.sampler.version != version:
            raise ValueError(f"{self._replica_name} holds version {self.sampler.version}, asked for {version}")
        with torch.no_grad():
            return self.send(self.sampler.published(), version, place)


def _put_rows(fragment: Fragment, done: DenoisedFragment, version: int, replica: str, seed: int) -> None:
    """Sample rows under ``{uid}_{j}_0``; prompt tensors once per group under ``{uid}``, with the group's sample 0."""
    result = done.result
    fields = {
        "latents": _field([r.cpu() for r in result.latents]),
        "sigmas": _field([s.cpu() for s in result.sigmas]),
        "rollout_log_probs": _field([lp.cpu() for lp in result.log_probs]),
        "starts": _field([torch.tensor(s) for s in result.starts]),
    }
    tags = [
        {
            "uid": uid,
            "j": j,
            "version": version,
            "status": "generated",
            "fragment": fragment.fragment_id,
            "replica": replica,
            "seed": seed,
            "attempt": fragment.attempt,
            "denoise_s": done.phases["denoise"],
        }
        for uid, j in fragment.samples
    ]
    keys = [row_key(uid, j) for uid, j in fragment.samples]
    tq.kv_batch_put(
        keys=keys, partition_id=fragment.partition, fields=TensorDict(fields, batch_size=len(keys)), tags=tags
    )
    owners = [uid for uid, j in fragment.samples if j == 0]
    if not owners:
        return
    group_fields = {}
    for prefix, which in (("cond", 0), ("negative", 1)):
        if done.embeddings[owners[0]][which] is None:
            continue
        for name in done.embeddings[owners[0]][which]:
            group_fields[f"{prefix}.{name}"] = _field([done.embeddings[uid][which][name].cpu() for uid in owners])
    tq.kv_batch_put(
        keys=owners,
        partition_id=fragment.partition,
        fields=TensorDict(group_fields, batch_size=len(owners)),
        tags=[{"uid": uid, "is_prompt": True, "status": "running", "version": version} for uid in owners],
    )


def _field(rows: list[torch.Tensor]) -> torch.Tensor:
    """One tensor of all rows, jagged where their first dimension differs."""
    if len({row.shape for row in rows}) == 1:
        return torch.stack(rows)
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _reward_input(fragment: Fragment, pixels: np.ndarray) -> DataProto:
    groups = [fragment.groups[uid] for uid, _ in fragment.samples]

    def column(values) -> np.ndarray:
        out = np.empty(len(groups), dtype=object)
        out[:] = list(values)
        return out

    return DataProto(
        batch=TensorDict({"pixels": torch.from_numpy(pixels)}, batch_size=len(groups)),
        non_tensor_batch={
            "prompt": column(g.prompt for g in groups),
            "ground_truth": column(g.ground_truth for g in groups),
            "data_source": column(g.data_source for g in groups),
            "extra_info": column(dict(g.extra_info) for g in groups),
            "uid": column(uid for uid, _ in fragment.samples),
            "sample": np.array([j for _, j in fragment.samples]),
        },
    )


class DiffusersReplica(RolloutReplica):
    """veRL's handle of one replica; its worker is its server."""

    async def launch_servers(self) -> None:
        self.servers = list(self.workers)
        self._server_handle = self.servers[0]
        self._server_address = f"ray-actor:{self._server_handle._actor_id.hex()}"

    @property
    def name(self) -> str:
        return f"replica{self.replica_rank}"

    async def init_from_group(self, worker_group: RayWorkerGroup, resource_pool: RayResourcePool) -> None:
        """Use the worker of this rank in a group of rollout workers that were started together."""
        self.rollout_mode = RolloutMode.STANDALONE
        self.resource_pool = resource_pool
        self.bundle_indices = [self.replica_rank]
        self.workers = [worker_group.workers[self.replica_rank]]
        await self.launch_servers()

    @property
    def _place(self) -> tuple[PlacementGroup, int]:
        """Placement group and bundle of this replica."""
        per_group = self.resource_pool.store[0]
        return self.resource_pool.pgs[self.replica_rank // per_group], self.replica_rank % per_group

    @property
    def placed(self) -> bool:
        """Whether the place of this replica is on a node that is there."""
        return ray.util.placement_group_table(self._place[0])["state"] == "CREATED"

    def respawn(self, worker_class: RayClassWithInitArgs, device_name: str) -> None:
        """End the old process and start one in the same place; returns at once. It holds no weights yet.

        veRL's worker group would wait, without a deadline, for a node that may be gone.
        """
        ray.kill(self.workers[0])
        pool, (group, bundle) = self.resource_pool, self._place
        alone = {"WORLD_SIZE": "1", "RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1"}  # a replica forms no process group
        unused = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WG_PREFIX": pool.name_prefix, "WG_BACKEND": "ray"}
        name = f"{pool.name_prefix}_again_{self.replica_rank}_{time.time_ns()}"
        worker_class.update_options({"runtime_env": {"env_vars": alone | unused}, "name": name})
        worker = worker_class(
            placement_group=group,
            placement_group_bundle_idx=bundle,
            use_gpu=pool.use_gpu,
            num_gpus=1 / pool.max_colocate_count,
            device_name=device_name,
        )
        self.workers = [worker]
        asyncio.run(self.launch_servers())
