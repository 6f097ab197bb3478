"""Batches between processes: rows are shared out to the ranks of a group, and the ranks' results put together again.

Tensors travel as numpy views through Ray's object store. A worker sees a batch whose columns are still in shared
memory; looking at one copies it, so nobody can change what another reads, and a column that nobody looks at costs
nothing. Torch's own pickling would copy everything twice. Every wait for Ray is here, too: outcomes of calls as they
arrive, single values with a deadline, and what Ray says of a death.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from workbench.base.errors import BatchError, EngineError, first_line
from workbench.dataproto.core import DataProto
from workbench.dataproto.value import Lazy, Origin
from workbench.functional.balancing import balanced, workload

# --- waiting ----------------------------------------------------------------------------------------

LOOK_SECONDS = 0.1
_USED = re.compile(r"was ([\d.]+) ?GB used / ([\d.]+) ?GB")
USERS = 5
"""Number of processes that the message names after Ray killed a worker for lack of memory."""
COMMAND = 60
"""Characters of each process's command in that message."""


@dataclass(frozen=True)
class Arrival:
    """The outcome of a call on one rank: done, raised or lost, its value, and when it ran."""

    rank: int
    outcome: str
    """`done`, `raised` (the call raised there) or `lost` (the worker is dead, or its result is lost with it)."""
    value: Any
    """For `done` the result; for `raised` (type, message, traceback, `WorkbenchError` or None); for `lost` the reason."""
    began: float = 0.0
    """Seconds since the epoch, on the worker's clock; 0 where no answer came."""
    ended: float = 0.0


def arrivals(refs: Mapping[int, Any], until: float, look: Callable[[], None] = lambda: None) -> Iterator[Arrival]:
    """Yield each rank's outcome as it arrives; `look` is called every 0.1 s in which none arrives, and may raise.

    Raises `TimeoutError` at `until` (a `time.monotonic` time) where ranks have not answered.
    """
    import ray

    waiting = {ref: rank for rank, ref in refs.items()}
    while waiting:
        left = until - time.monotonic()
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(min(left, LOOK_SECONDS), 0.0))
        if ready:
            yield _arrival(waiting.pop(ready[0]), ready[0], until)
        elif left > 0:
            look()
        else:
            raise TimeoutError(f"no answer in time from rank {', '.join(map(str, sorted(waiting.values())))}")


def _arrival(rank: int, ref: Any, until: float) -> Arrival:
    import ray
    from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayError, RayTaskError

    try:
        return Arrival(rank, *ray.get(ref, timeout=max(until - time.monotonic(), 5.0)))
    except GetTimeoutError:  # a TimeoutError, too
        raise
    except RayTaskError as error:  # not the call itself: its answer could not be sent, or its arguments not be read
        return Arrival(rank, "raised", (type(error.cause).__name__, str(error.cause), str(error), None))
    except RayError as error:
        # of any sudden death Ray says that it may have been the OOM killer; of its own kills it says how much was used
        hungry = isinstance(error, OutOfMemoryError) or _USED.search(str(error)) is not None
        return Arrival(rank, "lost", for_memory(str(error)) if hungry else reason(error))


def out(refs: Sequence[Any], seconds: float) -> list[int]:
    """Wait up to `seconds` for Ray object refs; returns the indices of those that are still not ready."""
    import ray

    _, late = ray.wait(list(refs), num_returns=len(refs), timeout=max(seconds, 0.0))
    return [place for place, ref in enumerate(refs) if ref in late]


def fetch(ref: Any, seconds: float) -> Any:
    """Return the value of a Ray object ref. Raises Ray's errors; after `seconds` one that is also a `TimeoutError`."""
    import ray

    return ray.get(ref, timeout=seconds)


def quietly(ref: Any, seconds: float, instead: Any) -> Any:
    """Return the value of a Ray object ref, or `instead` where it is not there within `seconds` or its worker is dead."""
    from ray.exceptions import RayError

    try:
        return fetch(ref, seconds)
    except RayError:
        return instead


def reason(error: BaseException) -> str:
    """Return why a worker died, in one line of Ray's error text."""
    lines = [line.strip() for line in str(error).splitlines()]
    telling = [line for line in lines if re.search("exit|killed|died", line, re.IGNORECASE)]
    return " ".join(telling[-2:]) or first_line(error)


def for_memory(text: str) -> str:
    """Describe in one line that Ray killed a worker for lack of memory: how much the node used, and which processes
    used most.
    """
    used = _USED.search(text)
    users = re.findall(r"^(\d+)\t([\d.]+)\t(.+)$", text, re.MULTILINE)
    most = ", ".join(f"{size} GB by {command[:COMMAND]} (pid {pid})" for pid, size, command in users[:USERS])
    node = f"the node used {used[1]} of {used[2]} GB" if used else text.splitlines()[0][:200]
    return f"killed for memory: {node}" + (f"; most of it: {most}" if most else "")


# --- packing ----------------------------------------------------------------------------------------


class Shared(Lazy):
    """A batch column in Ray's shared memory; reading the column, or some of its rows, copies them into this process."""

    def __init__(self, packed: Any) -> None:
        array, dtype, shape = packed

        def part(start: int, stop: int) -> torch.Tensor:
            return _tensor((array[start:stop], dtype, ())) if array.shape == shape else _tensor(packed)[start:stop]

        super().__init__(lambda: _tensor(packed), shape, dtype, part)
        self.packed = packed


class Packed:
    """A batch or tensor in the form that is sent through Ray: unpickling it returns `make(*arguments)`."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._made = make, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._made


def pack(value: Any) -> Any:
    """Replace batches and tensors in a value, also in tuples, lists and dicts, by the `Packed` form sent through Ray."""
    if isinstance(value, DataProto):
        # a column that nobody has looked at goes on as it came
        tensors = {
            name: column.packed if isinstance(column, Shared) else _array(value.batch[name])
            for name, column in value.batch.raw().items()
        }
        objects = {name: value.non_tensor_batch[name] for name in value.non_tensor_batch}
        return Packed(_open, tensors, objects, dict(value.meta_info), dict(value.origins))
    if type(value) is torch.Tensor:
        return Packed(_tensor, _array(value))
    if type(value) in (tuple, list):
        return type(value)(pack(one) for one in value)
    if type(value) is dict:
        return {key: pack(one) for key, one in value.items()}
    return value


def read(value: Any) -> Any:
    """Copy every column of every batch in a value into this process's memory, so that the object store can drop it."""
    if isinstance(value, DataProto):
        for name in value.batch:
            value.batch[name]
    elif isinstance(value, Mapping | tuple | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            read(one)
    return value


def _array(tensor: torch.Tensor) -> Any:
    """Return (numpy array, dtype, shape) of a tensor, without a copy where the tensor is contiguous and on the CPU."""
    tensor = tensor.detach().cpu()
    if tensor.dtype != torch.bfloat16 and not tensor.is_complex():
        array = np.ascontiguousarray(tensor.numpy())
    elif tensor.numel():
        array = tensor.contiguous().flatten().view(torch.uint8).numpy()
    else:
        array = np.empty(0, np.uint8)
    return array, tensor.dtype, tuple(tensor.shape)


def _tensor(packed: tuple[np.ndarray, torch.dtype, tuple[int, ...]]) -> torch.Tensor:
    array, dtype, shape = packed
    # arrays from shared memory are read-only; a tensor over them would be a writable alias
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(dtype).view(shape) if tensor.dtype != dtype else tensor


def _open(
    tensors: dict[str, Any], objects: dict[str, Any], meta: dict[str, Any], origins: dict[str, Origin]
) -> DataProto:
    new = object.__new__(DataProto)
    new._set({name: Shared(packed) for name, packed in tensors.items()}, objects, meta, origins)
    return new


# --- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scatter:
    """Which rows of a batch each rank gets. Made by `scatter`; `parts` splits a batch, `joined` joins results."""

    rows: tuple[tuple[int, ...], ...]
    """Row numbers by rank: its own rows first, then padding, which repeats rows and is dropped again."""
    own: tuple[int, ...]
    """By rank, how many of `rows` are its own (not padding)."""
    total: int
    """Rows of the batch."""

    def parts(self, batch: DataProto) -> list[DataProto]:
        """Split a batch into one batch per rank; some may be empty."""
        return [batch.select_idxs(list(rows)) for rows in self.rows]

    def joined(self, results: Sequence[Any]) -> Any:
        """Join the results of all ranks, rows in the batch's order.

        Batches and tensors [b, …] lose their padding and are concatenated; dicts of them entry by entry; anything else
        (`None`, metrics) comes back as the list by rank. Raises `EngineError` where a rank returns another number of rows
        than it got.
        """
        busy = [rank for rank, own in enumerate(self.own) if own]
        first = results[busy[0]] if busy else None
        kinds = list(first.values()) if isinstance(first, dict) else [first]
        if not kinds or not all(isinstance(part, DataProto | torch.Tensor) for part in kinds):
            return list(results)
        if isinstance(first, dict):
            return {name: self.joined([result[name] if result else None for result in results]) for name in first}
        kept = [self._own_rows(rank, results[rank]) for rank in busy]
        order = [torch.tensor(self.rows[rank][: self.own[rank]]) for rank in busy]
        back = torch.argsort(torch.cat(order))
        return DataProto.concat(kept).select_idxs(back) if isinstance(first, DataProto) else torch.cat(kept)[back]

    def _own_rows(self, rank: int, result: Any) -> Any:
        if len(result) != len(self.rows[rank]):
            raise EngineError(f"the result of rank {rank}", expected=f"{len(self.rows[rank])} rows", found=len(result))
        return result[: self.own[rank]]


def scatter(batch: DataProto, size: int, *, balance: bool = True, pad: bool = False) -> Scatter:
    """Decide which of `size` ranks gets which rows of a batch of any size.

    `balance` evens out the work (24576·L + L² for a row of L tokens, as in verl) where there is an `attention_mask`;
    otherwise rows go in order, and the first ranks get one more. `pad` gives every rank the same number of rows by repeating
    some; without it a rank may get none. Raises `BatchError` for an empty batch.
    """
    total = len(batch)
    if total == 0 or size < 1:
        found = f"{total} rows, {size} ranks"
        raise BatchError("splitting a batch over ranks", expected="at least one row and one rank", found=found)
    if balance and total >= size and "attention_mask" in batch.batch:
        loads = [workload(float(length)) for length in batch.batch["attention_mask"].sum(-1).tolist()]
        rows = balanced(loads, size, equal_size=total % size == 0)
    else:
        least, more = divmod(total, size)
        ends = [least * rank + min(rank, more) for rank in range(size + 1)]
        rows = [list(range(start, stop)) for start, stop in pairwise(ends)]
    owned = tuple(map(len, rows))
    if pad:
        width = max(owned)
        rows = [one + [(one or [0])[place % max(len(one), 1)] for place in range(width - len(one))] for one in rows]
    return Scatter(tuple(map(tuple, rows)), owned, total)
