"""A pretended accelerator: torch's device `pretended`, whose tensors are held in host memory and computed by the CPU's kernels.

What a GPU refuses it refuses: operands on two devices, `numpy()`. What a host waits for it counts: every number that comes to the
host, every operation whose result has a shape that only the device knows, every copy to the device that blocks. The kernels are the CPU's, so that a run on it must
equal one on the CPU but for rounding. It says nothing about streams, memory, or kernels and libraries of a GPU alone.

`install()` is for a process of its own, before any backward pass: torch then has this accelerator to its end.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as tree

NAME = "pretended"
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive"}
"""Operations after which a host knows something that only the device knew."""
_MOVES = {"_to_copy", "copy_", "_copy_from"}
_TAKES_HOST_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_"}
_HALVES = ("linear", "matmul", "mm", "bmm", "addmm", "scaled_dot_product_attention")
"""Operations that autocast does in its lower precision on a GPU: those of them that models here use."""


@dataclass
class Traffic:
    """What crossed between host and device: counts by operation, and by the line of workbench that asked."""

    waits: Counter[str] = field(default_factory=Counter)
    """What the host waits for, `operation at file:line`: reads of the device, and copies to it that block."""
    casts: int = 0
    """Operands that autocast brought to its precision."""

    @property
    def number(self) -> int:
        """How often the host waits."""
        return sum(self.waits.values())


_open: list[Traffic] = []
_lock = threading.Lock()


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Context manager: counts what crosses inside, in all threads."""
    found = Traffic()
    _open.append(found)
    try:
        yield found
    finally:
        _open.remove(found)


def _waited(operation: str) -> None:
    frame: Any = sys._getframe(1)
    while frame is not None and "/workbench/" not in frame.f_code.co_filename:
        frame = frame.f_back
    place = "torch" if frame is None else f"{frame.f_code.co_filename.rsplit('/', 1)[1]}:{frame.f_lineno}"
    with _lock:
        for one in _open:
            one.waits[f"{operation} at {place}"] += 1


class Away(torch.Tensor):
    """A tensor on the pretended device; `raw` has its numbers."""

    raw: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> Any:
        shape: dict[str, Any] = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        made: Any = torch.Tensor._make_wrapper_subclass(cls, raw.shape, **shape, device=torch.device(NAME, 0))
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operation, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied: Any = self.detach().clone()
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        return memo[id(self)]

    def __repr__(self, **_: Any) -> str:
        return f"Away({self.raw!r})"

    def tolist(self) -> Any:
        _waited("tolist")
        return self.raw.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(
            f"can't convert {NAME} device type tensor to numpy. Use Tensor.cpu() to copy it to host memory."
        )

    __array__ = numpy

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()


def _run(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation by the CPU's kernel, if a GPU would do it."""
    name = operation._schema.name.removeprefix("aten::")
    leaves = [one for one in tree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    _check(name, operation, args, leaves)
    raw_args, raw_kwargs = tree.tree_map(lambda one: one.raw if isinstance(one, Away) else one, (args, kwargs))
    target = raw_kwargs.get("device")
    if target is not None:
        raw_kwargs["device"] = "cpu" if torch.device(target).type == NAME else target
    raw_kwargs.pop("pin_memory", None)
    _count(name, args, target)
    found = operation(*raw_args, **raw_kwargs)
    to_host = target is not None and torch.device(target).type == "cpu"
    if name == "_local_scalar_dense" or to_host:
        return tree.tree_map(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, found)
    mine = {id(one.raw if isinstance(one, Away) else one): one for one in leaves}
    wrap: Callable[[Any], Any] = lambda one: mine.get(id(one)) if id(one) in mine else Away(one)  # noqa: E731
    return tree.tree_map(lambda one: wrap(one) if isinstance(one, torch.Tensor) else one, found)


def _check(name: str, operation: Any, args: Any, leaves: list[torch.Tensor]) -> None:
    """Refuses operands on two devices, but for numbers of the host as tensors without dimensions, and its indices."""
    if name in _MOVES:
        return
    indices = tree.tree_leaves(args[1]) if name in _TAKES_HOST_INDICES else []
    wrong = [
        one for one in leaves if one.device.type != NAME and one.dim() and not any(one is each for each in indices)
    ]
    wrong += [one for one in leaves if one.device.type != NAME and not one.dim() and _written(operation, args, one)]
    if wrong:
        found = f"{NAME}:0 and {wrong[0].device}"
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} in {operation}")


def _written(operation: Any, args: Any, one: torch.Tensor) -> bool:
    into = [given for given, told in zip(args, operation._schema.arguments, strict=False) if told.is_write]
    return any(one is each for each in tree.tree_leaves(into))


def _count(name: str, args: Any, target: Any) -> None:
    if name in _WAITS or (name == "repeat_interleave" and len(args) == 1):
        _waited(name)
    elif name == "copy_":
        _crossed(args[1], args[0].device, *args[2:])
    elif target is not None and name == "_to_copy":
        _crossed(args[0], torch.device(target))
    elif name in _TAKES_HOST_INDICES:
        value = args[2] if len(args) > 2 else None
        filled = value is not None and not value.dim()  # by one number: a masked fill, which nobody waits for
        for one in args[1]:
            if one is not None:
                _crossed(one, torch.device(NAME))
                if one.dtype in (torch.bool, torch.uint8) and not filled:
                    _waited(f"{name} by a mask")


def _crossed(source: torch.Tensor, device: torch.device, non_blocking: bool = False) -> None:
    if device.type != source.device.type and not (device.type == NAME and non_blocking):
        _waited(f"a copy to {device.type}")


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    _crossed(source, target.device, non_blocking)
    there, here = (one.raw if isinstance(one, Away) else one for one in (target, source))
    there.copy_(here)
    return target


def _halved(operation: Any) -> Callable[..., Any]:
    """The operation under autocast: operands of other floating types are cast first."""

    def cast(one: Any) -> Any:
        kind = torch.get_autocast_dtype(NAME)
        if not isinstance(one, torch.Tensor) or not one.is_floating_point() or one.dtype in (kind, torch.float64):
            return one
        with _lock:
            for each in _open:
                each.casts += 1
        return one.to(kind)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            args, kwargs = tree.tree_map(cast, (args, kwargs))
            return operation(*args, **kwargs)

    return run


_library: list[torch.library.Library] = []


def install() -> None:
    """Give this process the accelerator. Raises `RuntimeError` where torch has another one of this kind."""
    from torch.utils import backend_registration

    class Module(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16]

    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    library, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    _library.extend((library, others))

    def empty(size: Any, *, dtype: Any = None, **_: Any) -> Any:
        return Away(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Any:
        return Away(torch.empty_strided(size, stride, dtype=dtype))

    def arange(*limits: Any, dtype: Any = None, **_: Any) -> Any:
        return Away(torch.arange(*limits, dtype=dtype))

    for name in (
        "arange",
        "arange.start",
        "arange.start_step",
    ):  # by default an empty tensor that grows: a wrapper cannot
        library.impl(name, arange, "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in _HALVES:
        library.impl(name, _halved(getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
    torch.nn.Module._apply = _tied(torch.nn.Module._apply)  # type: ignore[method-assign]


def _tied(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`Module._apply` that keeps tied parameters one, as it does where a parameter is changed and not replaced."""

    def run(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = {(one, name): id(p) for one in self.modules() for name, p in one._parameters.items() if p is not None}
        apply(self, *args, **kwargs)
        first: dict[int, Any] = {}
        for (one, name), key in before.items():
            one._parameters[name] = first.setdefault(key, one._parameters[name])
        return self

    return run
