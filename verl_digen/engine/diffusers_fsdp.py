"""The training engine: a diffusers transformer, whole on one rank or sharded by FSDP2, on veRL's engine registry.

veRL's :class:`FSDPEngine` gives the device mesh, the LR schedule, the train and eval contexts and the offload hooks;
this class replaces what is specific to language models. The unit of work is a tile (:mod:`verl_digen.engine.tiles`),
not a micro-batch of tokens.

Dtypes: master weights, optimizer state and losses are in the arithmetic dtype (float32, or float64 in equivalence
tests); forward and backward run in ``model.dtype`` through FSDP2's mixed precision. One rank with equal dtypes is not
wrapped at all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_name
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.base import BaseEngineCtx
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from verl_digen.config.digen import DigenConfig
from verl_digen.engine.collectives import Collectives
from verl_digen.engine.ema import ParameterEMA
from verl_digen.models.adapter import load_adapter
from verl_digen.models.family import family_for
from verl_digen.models.lora import REFERENCE, add_lora, add_reference_adapter, reference_adapter
from verl_digen.models.precision import computed_in, fp32_modules, settle
from verl_digen.platform.memory import release_cached

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


class NonFiniteGradientError(FloatingPointError):
    """The gradient norm of a transaction is not finite; nothing was stepped."""


class ZeroGradientError(FloatingPointError):
    """The gradient of a transaction is exactly 0 although it should not be; nothing was stepped."""


class _ModeCtx(BaseEngineCtx):
    """Loads offloaded parts before the work and offloads them after it; keeps gradients of an open transaction."""

    def __enter__(self):
        super().__enter__()
        self.engine.module.train(self.mode == "train")


class DiffusersFSDPEngine(FSDPEngine):
    """Engine of model type ``diffusion_model``, backend ``fsdp2``, for cuda, npu and cpu."""

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        if engine_config.ulysses_sequence_parallel_size != 1:
            raise ValueError(
                "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size="
                f"{engine_config.ulysses_sequence_parallel_size}: diffusion models train without sequence parallelism; "
                "set it to 1"
            )
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self.reference = None
        self.ema = None
        self.collectives: Collectives | None = None
        self._whole = False

    def configure(self, digen: DigenConfig, *, with_reference: bool, seed: int) -> None:
        """Options that veRL's worker config has no place for; call before :meth:`initialize`.

        Args:
            with_reference: a KL to the initial policy is in the loss (LoRA: the adapter switched off, or a frozen
                second one where the run starts from an adapter; full: a frozen second module).
            seed: draws the LoRA initialisation, the same on every rank and replica.
        """
        self.digen = digen
        self.with_reference = with_reference
        self.seed = seed
        self.master_dtype = getattr(torch, digen.arithmetic)
        self.compute_dtype = getattr(torch, self.model_config.dtype)

    @property
    def device(self) -> torch.device:
        name = get_device_name()
        return torch.device(name if name == "cpu" else f"{name}:{self._device_index()}")

    @staticmethod
    def _device_index() -> int:
        from verl.utils.device import get_device_id

        return get_device_id()

    # ---- building ------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Load, adapt, shard; build optimizer, LR schedule, reference and EMA; offload what the config says."""
        base_dtype = self.compute_dtype if self._is_lora else self.master_dtype
        family_cls = family_for(self.model_config.path, self.model_config.family)
        self.family = family_cls(self.model_config.path, dtype=base_dtype, device=self.device)
        self.family.compute_dtype = self.compute_dtype
        self.module = self._wrap(self._build_module())
        if self.with_reference and not self._is_lora:
            self.reference = self._wrap(self._load_transformer()).requires_grad_(False)
        if self._world() > 1:
            self.collectives = Collectives.of(list(self._fsdp_modules()))
        if not self.engine_config.forward_only:
            self.optimizer = build_optimizer(self.trainable_parameters(), self.optimizer_config)
            self.lr_scheduler = self._build_lr_scheduler(self.optimizer)
        self.computed = self._computed()
        if self.digen.ema.enable:
            self.ema = ParameterEMA(self.named_trainable(), decay=self.digen.ema.decay, every=self.digen.ema.every)
        self.to("cpu", model=self._is_offload_param, optimizer=self._is_offload_optimizer, grad=self._is_offload_param)

    def _load_transformer(self) -> torch.nn.Module:
        transformer = self.family.load_transformer(attention_backend=self.model_config.attention_backend)
        settle(transformer, self.compute_dtype, parameters=self._is_lora)
        return transformer

    def _build_module(self) -> torch.nn.Module:
        module = self._load_transformer()
        self.lora_bound = 0
        if self._is_lora:
            self.lora_bound = add_lora(
                module,
                rank=self.model_config.lora_rank,
                alpha=self.model_config.lora_alpha,
                target_modules=self.model_config.target_modules or self.family.lora_target_modules,
                dtype=self.master_dtype,
                seed=self.seed,
            )
            if self.model_config.lora_adapter_path:
                load_adapter(
                    module,
                    self.model_config.lora_adapter_path,
                    rank=self.model_config.lora_rank,
                    alpha=self.model_config.lora_alpha,
                )
                if self.with_reference:
                    add_reference_adapter(module)
        else:
            module.requires_grad_(True)
        if self.model_config.enable_gradient_checkpointing:
            module.enable_gradient_checkpointing()
        return module

    def _wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        parameters_dtype = {p.dtype for p in module.parameters() if p.is_floating_point()}
        if self._world() == 1 and parameters_dtype == {self.compute_dtype} and not self.engine_config.offload_policy:
            return module
        blocks = set(getattr(module, "_no_split_modules", None) or ())
        dtypes = computed_in(module, self.compute_dtype)

        def shard(part: torch.nn.Module, computed: torch.dtype) -> torch.nn.Module:
            policy = MixedPrecisionPolicy(
                param_dtype=computed, reduce_dtype=self.master_dtype, cast_forward_inputs=False
            )
            offload = {"offload_policy": CPUOffloadPolicy()} if self.engine_config.offload_policy else {}
            return fully_shard(
                part,
                mesh=self.device_mesh,
                reshard_after_forward=self.engine_config.reshard_after_forward,
                mp_policy=policy,
                **offload,
            )

        for name, child in fp32_modules(module).items():  # before what contains them: FSDP2 goes from inside out
            shard(child, next(dtypes[f"{name}.{own}"] for own, _ in child.named_parameters()))
        for child in module.modules():
            if type(child).__name__ in blocks:
                shard(child, self.compute_dtype)
        return shard(module, self.compute_dtype)

    def _computed(self) -> dict[str, torch.dtype]:
        """Dtype in which each parameter really is computed, by name; all ranks together."""
        found = {}
        for prefix, module in self.module.named_modules():
            sharded = isinstance(module, FSDPModule)
            if sharded:
                module.unshard()
            for name, parameter in module.named_parameters(prefix=prefix):
                if not isinstance(parameter, DTensor) and f".{REFERENCE}." not in name:
                    found[name] = parameter.dtype
            if sharded:
                module.reshard()
        return found

    # ---- parameters ----------------------------------------------------------------------------------------

    def named_trainable(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Trained parameters with their names in the unsharded transformer."""
        return ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        return [p for _, p in self.named_trainable()]

    def get_per_tensor_param(self, **_) -> tuple[Iterator[tuple[str, torch.Tensor]], dict | None]:
        """What a publish sends: LoRA tensors only for LoRA, else every parameter; whole tensors in the dtype that each
        is computed in.

        All ranks must iterate together (each tensor is gathered).
        """

        def tensors():
            for name, parameter in self.named_trainable():
                # the shard is cast, and then gathered: half the bytes, and no whole copy in the master dtype
                value = parameter.detach().to(self.computed[name])
                yield name, value.full_tensor() if isinstance(value, DTensor) else value

        return tensors(), {"tensors": self.lora_bound} if self._is_lora else None

    @contextmanager
    def reference_policy(self):
        """The module to call for the reference prediction inside the context."""
        if self._is_lora:
            with reference_adapter(self.module):
                yield self.module
        else:
            yield self.reference

    @contextmanager
    def tile(self, reduce: bool):
        """One forward and backward; its gradients are reduced over the ranks, or kept unsharded until a later tile."""
        if not isinstance(self.module, FSDPModule):
            yield
            return
        self.module.set_requires_gradient_sync(reduce)
        self.module.set_reshard_after_backward(reduce or not self._whole)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)
            self.module.set_reshard_after_backward(True)
        if not self._whole:  # a root without a backward stays whole; every tile has to begin alike
            for module in self._fsdp_modules():
                module.reshard()

    def begin_tile(self) -> None:
        """A tile is run for the first time."""
        if self.collectives is not None:
            self.collectives.begin_tile()

    def recover(self, reduce: bool) -> None:
        """After an out-of-memory error inside a tile: the same tile can be run again without cells.

        Args:
            reduce: the tile reduces gradients.

        Raises:
            RuntimeError: with this torch, or with replicas of shards, the rank cannot go on.
        """
        if isinstance(self.module, FSDPModule) and self._world() > 1:
            if self.collectives is None:
                raise RuntimeError(f"torch {torch.__version__} has no FSDPModule.reset_iter_state")
            if reduce and self.device_mesh.ndim > 1:
                raise RuntimeError("fsdp_size is less than the number of ranks, and gradients were being reduced")
            self.collectives.begin_again()
            self.collectives.gather_alone(self._whole)
        self.reset()
        release_cached()

    def reset(self) -> None:
        """After an exception inside a tile: the modules are ready for another one, as far as this torch can do that."""
        for root in (self.module, self.reference):
            if not isinstance(root, FSDPModule) or not hasattr(root, "reset_iter_state"):
                continue
            try:
                root.reset_iter_state()
            except AttributeError:  # FSDP2 makes this state in the first forward: nothing to reset before it
                logger.debug("%s has not been run yet", type(root).__name__)

    # ---- parameters that stay whole between tiles ----------------------------------------------------------

    @property
    def may_stay_whole(self) -> bool:
        """Whether the parameters can be gathered once for many tiles: there is room for them in every forward and
        backward anyway, and nothing moves them to the host meanwhile."""
        config = self.engine_config
        moved = config.offload_policy or self._is_offload_param
        return self._world() > 1 and not config.reshard_after_forward and not moved

    @property
    def whole(self) -> bool:
        """Whether the parameters are gathered: tiles have no collectives then."""
        return self._whole

    def gather(self) -> None:
        """Gather all parameters until :meth:`shard`; all ranks together."""
        for module in self._fsdp_modules():
            module.unshard()
        self._whole = True

    def shard(self) -> None:
        """Free the gathered parameters; no collective."""
        self._whole = False
        if self.collectives is not None:
            self.collectives.gather_alone(False)
        for module in self._fsdp_modules():
            module.reshard()

    @contextmanager
    def sharded(self):
        """The parameters as the optimizer knows them; gathered again afterwards if they were before."""
        whole = self._whole
        if whole:
            self.shard()
        yield
        if whole:
            self.gather()

    def _fsdp_modules(self) -> Iterator[FSDPModule]:
        for root in (self.module, self.reference):
            if root is not None:
                yield from (module for module in root.modules() if isinstance(module, FSDPModule))

    @staticmethod
    def _world() -> int:
        return torch.distributed.get_world_size()

    def averaged_weights(self):
        """Context in which the module holds the EMA weights."""
        return self.ema.swapped_in() if self.ema is not None else nullcontext()

    # ---- stepping ------------------------------------------------------------------------------------------

    def optimizer_step(self, live_cells: int = 0) -> float:
        """Clip (not with ``optim.clip_grad`` 0 or null), step, and return the gradient norm before clipping.

        Raises:
            NonFiniteGradientError: the norm is not finite; weights and optimizer state are untouched.
            ZeroGradientError: the norm is 0 with ``live_cells`` > 0; likewise.
        """
        parameters = [p for p in self.trainable_parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        value = float(norm)
        if not torch.isfinite(norm):
            raise NonFiniteGradientError(f"gradient norm is {value}; nothing was stepped")
        if value == 0 and live_cells:
            raise ZeroGradientError(
                f"the gradient is exactly 0, but {live_cells} cells have an advantage and are not clipped; nothing was "
                f"stepped. The prediction does not depend on the trained weights, or actor_rollout_ref.model.dtype="
                f"{self.model_config.dtype} loses the gradient"
            )
        if self.optimizer_config.clip_grad:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.optimizer_config.clip_grad, norm.to(self.device))
        self.optimizer.step()
        return value

    def train_mode(self, **kwargs):
        return _ModeCtx(self, "train", **kwargs)

    def eval_mode(self, **kwargs):
        return _ModeCtx(self, "eval", **kwargs)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parameters (with their gradients) and optimizer state to ``cpu`` or the training device."""
        target = torch.device("cpu") if device == "cpu" else self.device
        if target == torch.device("cpu") and self.device == target:
            return
        if model:
            self.module.to(target, non_blocking=True)
            if self.reference is not None:
                self.reference.to(target, non_blocking=True)
        if optimizer and getattr(self, "optimizer", None) is not None:
            for state in self.optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim() > 0:
                        state[key] = value.to(target, non_blocking=True)

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None, **_) -> None:
        """Write model, optimizer, LR schedule and EMA below ``local_path`` (safetensors and JSON)."""
        from verl_digen.engine.checkpoint import save_engine

        if hdfs_path is not None:
            raise ValueError("trainer.default_hdfs_dir: checkpoints are written to local or mounted paths only")
        save_engine(self, local_path)

    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False, **_) -> None:
        """Read what :meth:`save_checkpoint` wrote, on any number of ranks."""
        from verl_digen.engine.checkpoint import load_engine

        load_engine(self, local_path)
