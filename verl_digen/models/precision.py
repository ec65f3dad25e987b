"""Which dtype every tensor of a transformer is computed in: the same in the Trainer and in every replica (I11).

A replica loads in the run's dtype; a Trainer that trains all weights keeps them in a wider one and casts them for each
forward. What is no parameter (buffers, rotary tables) and modules that diffusers keeps in fp32 whatever the dtype must
not follow either way of loading, or the two sides predict different velocities from equal weights.

The rule, for both: tensors that are no parameters are those of a transformer loaded in the run's dtype; a module that
diffusers keeps in fp32 as a whole is computed in fp32; everything else in the run's dtype. A lone parameter that
diffusers keeps in fp32 inside a module of the run's dtype has that dtype too, because FSDP2 shards it with its module.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def fp32_modules(transformer: nn.Module) -> dict[str, nn.Module]:
    """Modules that the model keeps in fp32, parameters and all, by name; the outermost ones only."""
    kept = set(getattr(transformer, "_keep_in_fp32_modules", None) or ())
    found: dict[str, nn.Module] = {}
    for name, module in transformer.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and kept & set(name.split(".")) and next(module.parameters(), None) is not None:
            found[name] = module
    return found


def computed_in(transformer: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Dtype by parameter name, for a run in ``dtype``; at least fp32 in the modules of :func:`fp32_modules`."""
    wide = torch.promote_types(dtype, torch.float32)
    inside = tuple(f"{name}." for name in fp32_modules(transformer))
    return {
        name: (wide if name.startswith(inside) else dtype) if parameter.is_floating_point() else parameter.dtype
        for name, parameter in transformer.named_parameters()
    }


def constants(transformer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are no parameters: buffers, and tensors held as plain attributes (rotary tables of some models)."""
    yield from transformer.named_buffers()
    for prefix, module in transformer.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{prefix}.{name}" if prefix else name, value


@torch.no_grad()
def settle(transformer: nn.Module, dtype: torch.dtype, *, parameters: bool) -> None:
    """Bring a transformer that was just loaded, in whatever dtype, into the state of the module's rule.

    Args:
        dtype: of the run.
        parameters: cast the parameters as well; not where FSDP2 casts them for each forward.
    """
    if parameters:
        wanted = computed_in(transformer, dtype)
        for name, parameter in transformer.named_parameters():
            parameter.data = parameter.data.to(wanted[name])
    if next(constants(transformer), None) is None:
        return
    stock = dict(constants(_without_weights(transformer, dtype)))
    saved = transformer.state_dict().keys()
    for name, value in list(constants(transformer)):
        # what is in the model's files is cast from them; what the code makes is made as it makes it in this dtype
        new = value.to(stock[name].dtype) if name in saved else stock[name].to(value.device)
        owner, _, attribute = name.rpartition(".")
        setattr(transformer.get_submodule(owner), attribute, new)


def _without_weights(transformer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same model as ``from_pretrained`` builds it in ``dtype``: real constants, parameters without storage."""
    from accelerate import init_empty_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with init_empty_weights(include_buffers=False):
            model = type(transformer).from_config(transformer.config)
    finally:
        torch.set_default_dtype(before)
    kept = set(getattr(transformer, "_keep_in_fp32_modules", None) or ())
    for name, buffer in model.named_buffers():
        if name in model.state_dict() and buffer.is_floating_point():  # from_pretrained casts what the files hold
            owner, _, attribute = name.rpartition(".")
            cast = torch.float32 if kept & set(name.split(".")) else dtype
            setattr(model.get_submodule(owner), attribute, buffer.to(cast))
    return model
