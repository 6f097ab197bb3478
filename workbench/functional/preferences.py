"""Losses of preference pairs by TRL's names, from the log-probs of both answers, in nats.

c and r are log π(y|x) − log π_ref(y|x) of the chosen and of the rejected answer, each summed over its tokens, [N]; `simpo` has no
reference: there they are log π(y|x). The formulas are the papers', with what TRL 1.16 adds where a line says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class PairScores:
    """What a preference loss reads of N pairs, and its settings."""

    chosen: Tensor
    """c, [N]."""
    rejected: Tensor
    """r, [N]."""
    chosen_tokens: Tensor
    """Length of the chosen answers in tokens, [N]."""
    rejected_tokens: Tensor
    """Length of the rejected answers in tokens, [N]."""
    beta: float = 0.1
    label_smoothing: float = 0.0
    """ε: the share of pairs whose labels are wrong, for `robust` and `exo_pair`."""
    gamma: float = 0.5
    """simpo's target margin."""
    kl: Tensor | float = 0.0
    """kto's z₀, the KL to the reference, ≥ 0."""

    @property
    def margin(self) -> Tensor:
        """β·(c − r), [N]."""
        return self.beta * (self.chosen - self.rejected)

    @property
    def each_token(self) -> Tensor:
        """c per token less r per token, [N]."""
        return self.chosen / self.chosen_tokens.clamp(min=1) - self.rejected / self.rejected_tokens.clamp(min=1)


def _exo_pair(p: PairScores) -> Tensor:
    epsilon = torch.tensor(max(p.label_smoothing, 1e-3), device=p.chosen.device)  # TRL's least
    log_win, log_lose = logsigmoid(p.margin), logsigmoid(-p.margin)
    return log_win.exp() * (log_win - torch.log1p(-epsilon)) + log_lose.exp() * (log_lose - epsilon.log())


def _robust(p: PairScores) -> Tensor:
    e = p.label_smoothing
    return (e * logsigmoid(-p.margin) - (1 - e) * logsigmoid(p.margin)) / (1 - 2 * e)


def _nca_pair(p: PairScores) -> Tensor:
    won, lost = p.beta * p.chosen, p.beta * p.rejected
    return -logsigmoid(won) - 0.5 * (logsigmoid(-won) + logsigmoid(-lost))


def _kto(p: PairScores) -> Tensor:
    won, lost = torch.sigmoid(p.beta * (p.chosen - p.kl)), torch.sigmoid(p.beta * (p.kl - p.rejected))
    return 1 - 0.5 * (won + lost)


PreferenceLoss: TypeAlias = Callable[[PairScores], Tensor]
PREFERENCE_LOSSES: Mapping[str, PreferenceLoss] = {
    # DPO, https://arxiv.org/abs/2305.18290
    "sigmoid": lambda p: -logsigmoid(p.margin),
    # SLiC, https://arxiv.org/abs/2309.06657
    "hinge": lambda p: torch.relu(1 - p.margin),
    # https://arxiv.org/abs/2310.12036, eq. 17, per token as its authors said to TRL
    "ipo": lambda p: (p.each_token - 1 / (2 * p.beta)).square(),
    # https://arxiv.org/abs/2403.00409
    "robust": _robust,
    # EXO, https://arxiv.org/abs/2402.00856, eq. 16
    "exo_pair": _exo_pair,
    # https://arxiv.org/abs/2402.05369
    "nca_pair": _nca_pair,
    # https://arxiv.org/abs/2405.00675, of a sure winner
    "sppo_hard": lambda p: (p.chosen - 0.5 / p.beta).square() + (p.rejected + 0.5 / p.beta).square(),
    # APO, https://arxiv.org/abs/2408.06266, eq. 7 and 8
    "apo_zero": lambda p: 1 - torch.sigmoid(p.beta * p.chosen) + torch.sigmoid(p.beta * p.rejected),
    "apo_down": lambda p: torch.sigmoid(p.beta * p.chosen) + 1 - torch.sigmoid(p.margin),
    # https://arxiv.org/abs/2405.14734; γ is not multiplied by β, as in TRL's CPO
    "simpo": lambda p: -logsigmoid(p.beta * p.each_token - p.gamma),
    # https://arxiv.org/abs/2402.01306, eq. 7; the mean over both answers
    "kto": _kto,
}
"""Name → the loss of each pair, [N]."""
WITHOUT_REFERENCE = ("simpo",)
"""Those whose c and r are the policy's own log-probs."""
