"""The ranks of an FSDP engine as the sender of weights: `engines.weights` says what that is.

Into shared memory each rank writes its own part, and no rank ever has a whole tensor. Other ways gather one bucket at a time, cast
to the sampler's dtype before it is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from workbench.engines.fsdp_engine.meshes import box
from workbench.engines.local_engine import lora
from workbench.engines.vllm_server.process import Piece, device_name, mapped
from workbench.engines.weights import Outbox, machine, rows_of


class ShardedPushing:
    """What one rank's part of a model has for a push; its methods are called on all ranks together."""

    _outbox: Outbox | None = None

    def sends(self: Any) -> tuple[str, str]:
        """This rank's machine and GPU."""
        return machine(), device_name(self._device())

    def _device(self: Any) -> torch.device:
        kind = self.mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    @torch.no_grad()
    def send_weights(self: Any, pieces: Sequence[Piece], place: Mapping[str, Any]) -> Any:
        """Write pieces to a place, as `Outbox.send`: to a file its own part, else whole tensors (of a broadcast rank 0's)."""
        if "file" in place:
            held, layers = lora.by_plain_names(self.plain), lora.layers(self.whole.causal)
            memory = mapped(place["file"], place["nbytes"], write=True)
            for piece in (one for one in pieces if not one.tied):
                self._write(piece, piece.within(memory), held, layers.get(piece.name))
            return None

        whole = self.gathering()

        def value(piece: Piece) -> torch.Tensor:
            return rows_of(whole(piece.name, getattr(torch, piece.dtype)), piece)

        self._outbox = self._outbox or Outbox()
        if "broadcast" in place and distributed.get_rank():
            for piece in pieces:
                value(piece) if not piece.tied else None  # its part of what rank 0 gathers
            return None
        sent = self._outbox.send(pieces, place, value, self._device())
        return sent if "data" not in place or distributed.get_rank() == 0 else None

    def gathering(self: Any) -> Callable[..., torch.Tensor]:
        """A function that gives one whole tensor to every rank, by its plain name, adapters merged; others in another `dtype`."""
        held, layers = lora.by_plain_names(self.plain), lora.layers(self.whole.causal)

        def whole(name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
            if name not in layers:
                return _full(held[name].to(dtype))
            base, a, b = (_full(one) for one in lora.parts(held, name))
            return base + lora.delta(layers[name], a, b)

        return whole

    def _write(self: Any, piece: Piece, there: torch.Tensor, held: Mapping[str, Any], layer: Any) -> None:
        """Write what this rank has of a piece; what several ranks have the first of them writes."""
        base, *small = [held[piece.name]] if layer is None else lora.parts(held, piece.name)
        small = [_full(one) for one in small]  # by all ranks together
        if not self.mesh.counts(base):
            return
        mine = base.to_local() if isinstance(base, DTensor) else base
        if not piece.shape:
            there.copy_(mine)
            return
        rows, *further = box(base)
        begin, end = max(rows.start, piece.first), min(rows.stop, piece.first + piece.rows)
        if begin < end:
            part = mine[begin - rows.start : end - rows.start]
            if layer is not None:
                part = part + lora.delta(layer, *small, slice(begin, end))[:, *further]
            there[begin - piece.first : end - piece.first, *further].copy_(part)

    def open_group(self: Any, size: int | None = None, backend: str = "") -> Any:
        """On rank 0, open the port of a broadcast (returns host, port), or join it."""
        if distributed.get_rank():
            return None
        self._outbox = self._outbox or Outbox()
        return self._outbox.listen() if size is None else self._outbox.join(size, backend)

    def empty_cache(self: Any) -> None:
        """Give the device memory back that torch keeps for later."""
        if self._outbox is not None:
            self._outbox.drop()
        if self.mesh.device_type == "cuda":
            torch.cuda.empty_cache()


def _full(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
