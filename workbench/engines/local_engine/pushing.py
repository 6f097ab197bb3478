"""A local engine as the sender and as the receiver of weights: `engines.weights` says what these are."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from workbench.base import runtime, teams
from workbench.base.errors import EngineError
from workbench.engines.local_engine import lora
from workbench.engines.local_engine.states import new_id
from workbench.engines.vllm_server.process import Piece, device_name, joined
from workbench.engines.weights import Entry, Outbox, check_shapes, layout_of, machine, pieces_in, rows_of


class Pushing:
    """What a local engine has of a `WeightSender` and of a `WeightReceiver`."""

    _model: Any
    _optimizer: Any
    version: int
    state_id: str
    path: str
    _outbox: Outbox | None = None
    _group: Any = None
    _missing: dict[str, int] | None = None
    """Rows by name that a push has not brought yet; None outside of one."""
    sharing: bool = False
    """Whether sampling lets other work of this process in between two tokens (`Renewable`)."""
    _between: int = 0

    # --- sending ----------------------------------------------------------------------------

    def weight_layout(self) -> dict[str, Entry]:
        """Its tensors by Hugging Face names, adapters merged."""
        return layout_of(self._model)

    def sends(self) -> dict[str, Any]:
        """Where it is, as `WeightSender.sends`."""
        name = device_name(self._model.device)
        here = {"machines": [machine()], "pid": os.getpid(), "devices": [name] if name else []}
        return {**here, "adapter": lora.adapter_of(self._model)}

    def send_weights(self, pieces: Sequence[Piece], place: Mapping[str, Any]) -> Any:
        """Write pieces to a place, as `Outbox.send`."""
        held, layers = lora.by_plain_names(self._model.state_dict()), lora.layers(self._model)

        def value(piece: Piece) -> torch.Tensor:
            layer = layers.get(piece.name)
            if layer is None:
                return rows_of(held[piece.name], piece)
            base, a, b = lora.parts(held, piece.name)
            rows = slice(piece.first, piece.first + piece.rows)
            return base[rows] + lora.delta(layer, a, b, rows)

        self._outbox = self._outbox or Outbox()
        return self._outbox.send(pieces, place, value, self._model.device)

    def open_group(self, join: tuple[int, str] | None = None) -> Any:
        """For a broadcast: open the port where all meet and return (host, port); then `join` (processes, backend)."""
        self._outbox = self._outbox or Outbox()
        return self._outbox.listen() if join is None else self._outbox.join(*join)

    def empty_cache(self) -> None:
        """Give the device memory back that torch keeps for later."""
        if self._outbox is not None:
            self._outbox.drop()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    # --- receiving --------------------------------------------------------------------------

    def receives(self) -> dict[str, Any]:
        """Where it is, and what it takes, as `WeightReceiver.receives`."""
        name = device_name(self._model.device)
        kind = str(next(self._model.parameters()).dtype)[6:]
        where = {"machines": [machine()], "pids": [os.getpid()], "devices": [name] if name else [], "processes": 1}
        return {**where, "dtype": kind, "split": True, "adapter_rank": 0, "folder": self.path}

    def begin_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Begin a push of tensors of these shapes; until its end the engine refuses to sample."""
        mine = self._model.state_dict()
        check_shapes("the tensors passed to load_weights", shapes, mine)
        self.state_id = new_id()  # half-way there is no state that anybody knows
        self._missing = {name: tensor.shape[0] if tensor.dim() else 1 for name, tensor in mine.items()}

    @torch.no_grad()
    def take_weights(self, pieces: Sequence[Piece], place: Mapping[str, Any]) -> None:
        """Load one bucket."""
        mine, missing = self._model.state_dict(), self._missing
        if missing is None:
            raise EngineError("a bucket of weights", expected="begin_weights() before it", found="no push")
        for piece, rows in pieces_in(pieces, place, self._model.device, self._group):
            if piece.name in mine:
                rows_of(mine[piece.name], piece).copy_(rows)
                missing[piece.name] -= piece.rows

    def end_weights(self, version: int) -> int:
        """Serve the new weights as a policy version; the optimizer starts anew."""
        lacks = [name for name, rows in (self._missing or {"every tensor": 1}).items() if rows]
        if lacks:
            raise EngineError("a push of weights is not whole", expected=f"{lacks[0]}", found="rows that never arrived")
        self._reset()
        self._missing = None
        self.version, self.state_id = version, new_id()
        return version

    def _reset(self) -> None:
        """Forget what belongs to the weights before."""

    def cancel_weights(self) -> None:
        """End a push that broke off: it goes on refusing to sample."""

    def check_weights(self) -> None:
        """Raises `EngineError` where a push of weights is under way, or broke off."""
        if self._missing is not None:
            what, do = "this engine's weights are half old, half new", "push again"
            raise EngineError(what, found="a push that is under way, or one that broke off", do=do)

    def load_adapter(self, folder: str, version: int) -> int:
        """Not here: a local engine takes merged weights."""
        raise EngineError("an adapter alone", expected="merged weights", found=str(Path(folder).name))

    def join_group(self, host: str, port: int, first: int, size: int, backend: str) -> None:
        """Join a broadcast as rank `first`."""
        self._group = joined(host, port, first, size, backend)

    # --- while responses are under way -------------------------------------------------------

    def _still(self, state: str) -> bool:
        """Whether the weights are those of `state`."""
        return self.state_id == state

    def _let_in(self, state: str) -> bool:
        """Between two tokens: let other work of this process in, where it waits and sampling shares; whether the weights are
        others since."""
        while self.sharing and (self._between or teams.wanted()):
            with teams.waiting():
                time.sleep(0.001)
        return self.sharing and self.state_id != state

    @contextmanager
    def between_tokens(self) -> Iterator[None]:
        """Context manager: inside it no token is sampled. Responses under way go on after it, by the weights there are then: what
        they have so far is prefilled again, so that each token is of one policy version."""
        self._between += 1
        try:
            with teams.alone(runtime.check):
                yield
        finally:
            self._between -= 1
