"""Tensor subclasses that say how FSDP2 is to gather them: `fsdp_pre_all_gather`, `fsdp_post_all_gather`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

__all__ = ["WIDTH", "Opened", "Rounded", "Short", "products_alive"]

WIDTH = 16
_MULTIPLY = ("mm", "addmm")
_KEPT = (
    "detach",
    "alias",
    "t",
    "view",
    "as_strided",
    "slice",
    "split",
    "clone",
    "new_zeros",
    "copy_",
    "_to_copy",
    "empty_like",
)
_made: list[StorageWeakRef] = []  # the memory of products


def products_alive() -> int:
    """Products whose memory is there, of those that were made since this was asked."""
    alive = sum(not each.expired() for each in _made)
    _made.clear()
    return alive


class Rounded(Tensor):
    """Values of 32 bits that multiply as bfloat16, and travel so."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Rounded:
        tensor: Rounded = Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device
        )
        tensor.values = values
        return tensor

    def __init__(self, values: Tensor) -> None:
        pass

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], _context: None, _size: object, _stride: object) -> Rounded:
        return cls(inner["values"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name = func.overloadpacket.__name__
        plain = tree_map_only(
            cls, lambda t: t.values.bfloat16().to(t.dtype) if name in _MULTIPLY else t.values, (args, kwargs or {})
        )
        out = func(*plain[0], **plain[1])
        return tree_map_only(Tensor, cls, out) if name in _KEPT else out

    def fsdp_pre_all_gather(
        self, mesh: Any, size: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: MixedPrecisionPolicy
    ) -> Any:
        assert mesh.size() == dist.get_world_size()
        assert size == (WIDTH, WIDTH)
        assert stride == (WIDTH, 1)
        assert isinstance(module, nn.Linear)
        return (self.values.bfloat16(),), policy.param_dtype

    def fsdp_post_all_gather(self, whole: tuple[Tensor, ...], told: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        assert dtype == (told or torch.float32)
        if out is not None:
            return out.values.copy_(whole[0])
        values = whole[0].to(dtype)
        _made.append(StorageWeakRef(values.untyped_storage()))
        return type(self)(values), (values,)


class Opened(Rounded):
    """Its product is plain, on what was sent; the older signature."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self.values.bfloat16(),), None

    def fsdp_post_all_gather(self, whole: tuple[Tensor, ...], told: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        opened = whole[0].to(dtype)
        _made.append(StorageWeakRef(opened.untyped_storage()))
        return opened, ()


class Short(Opened):
    """Its product lacks a row."""

    def fsdp_post_all_gather(self, whole: tuple[Tensor, ...], told: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        return whole[0][1:], ()
