"""Where our answer is not verl's, and why. Whatever else differs is an error, and so is an entry that differs no longer."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Entry:
    """Outputs of cases, on batches of some kinds, in which ours is not verl's."""

    cases: str
    """Pattern of cases' names."""
    outputs: str
    """Patterns of outputs, with | between."""
    kinds: str
    """Kinds of batches, with | between; * for any."""
    why: str

    def about(self, name: str, kind: str) -> bool:
        """Whether it is about this case on this kind of batch."""
        return _among(name, self.cases) and _among(kind, self.kinds)

    def of(self, output: str) -> bool:
        """Whether it is about this output."""
        return _among(output, self.outputs)

    def __str__(self) -> str:
        return f"{self.cases} {self.outputs} @ {self.kinds}"


def _among(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split("|"))


ALONE = "a row alone in its group has nothing to be compared with: 0, unless singleton='verl' asks for its raw score"
NO_TOKEN = "where no token counts, ours is a loss of 0, and no number for a mean; verl's is NaN, 0 or an error"
ONE_TOKEN = "one token alone is not whitened; verl stops"
EMPTY = "a row without a token is in no mean over rows; verl divides by it, too"
REJECTED = f"{EMPTY}: one that was wholly rejected"
UNBOUNDED = "log ρ is bounded by ±20 before it is exponentiated, in every loss; verl forgets that in these"
FLOAT32 = "half precision is computed in float32; verl rounds at every step, here across a threshold"
NONE_LEFT = "no weight is inside the band: ours are all 0; verl divides by their mean and stops"

LOSS = "loss|gradient|actor/pg_loss"
DIFFERS: tuple[Entry, ...] = (
    # estimators
    Entry("estimator *, singleton=zero", "advantages", "groups of one", ALONE),
    Entry("estimator rloo, *zero|estimator opo, *zero|estimator gpg, *zero|estimator grpo, *zero", "advantages", "one row|one token", ALONE),
    Entry("*grpo_passk*", "raises", "groups of one|one row|one token", "the best of a group of one has no second: 0; verl stops"),
    Entry("estimator gae*|*(gae)|estimator reinforce*|stage Advantage(reinforce*|estimator gdpo of one*|*(gdpo)", "raises", "one token", ONE_TOKEN),
    Entry("estimator gae*|*(gae)|estimator reinforce*|stage Advantage(reinforce*|*gdpo*", "raises", "no token", NO_TOKEN),
    # losses
    Entry("aggregate token-mean|aggregate seq-mean-token-mean|aggregate seq-mean-token-sum|aggregate seq-mean-token-sum-norm", "loss", "no token", NO_TOKEN),
    Entry("loss [!g]*|loss gpg*|loss gspo*|value loss, token-mean|value loss, seq*", "loss", "no token", NO_TOKEN),
    Entry("stage PolicyLoss(*)|stage ValueLoss(*)", "loss|actor/*|critic/*", "no token", NO_TOKEN),
    Entry("*loss geo_mean*|stage PolicyLoss(geo_mean*", LOSS, "empty rows", EMPTY),
    Entry("stage PolicyLoss(geo_mean) after RolloutCorrection(* and *|stage PolicyLoss(geo_mean) after *(all at once)", LOSS, "ragged|tool holes|NaN outside", REJECTED),
    Entry("loss geo_mean*|loss *_cov*|stage PolicyLoss(geo_mean)|stage PolicyLoss(*_cov)", LOSS, "far ratios", UNBOUNDED),
    # rollout correction
    Entry("importance weights*|rejection *|stage RolloutCorrection(*", "raises", "no token", NO_TOKEN),
    Entry("importance weights, sequence, (0.5, 2.0)*|importance weights, *, (0.9, 1.2)*|*Correction(sequence, band)|*Correction(all at once)", "raises", "far ratios", NONE_LEFT),
    Entry("importance weights, *, (0.9, 1.2)*", "raises", "one token each|one token", NONE_LEFT),
    Entry("importance weights, sequence, (0.9, 1.2)*", "raises", "reference|unequal groups|one row", NONE_LEFT),
    Entry("stage RolloutCorrection(token, band)", "raises", "one token", NONE_LEFT),
    Entry("rejection seq_mean_k3*|*(seq_mean_k3)|rejection token_k1, (None*|*Correction(token_k1)|*Correction(two kinds)|*Correction(* and token_k1)", "kept", "bf16", FLOAT32),
    Entry("stage RolloutCorrection(token, band)", "weights", "bf16", FLOAT32),
    Entry("stage PolicyLoss(bypass, ppo_clip, seq_mean_k1, *", "actor/*", "reference", NO_TOKEN),
    # metrics
    Entry("data metrics", "critic/*|response_length_non_aborted/*", "no token", "a metric without a value is left out; verl writes NaN"),
    Entry("data metrics", "critic/vf_explained_var", "one token", "a metric without a value is left out; verl writes NaN"),
    # rewards
    Entry("stage Overlong", "rewards", "tool holes", "a reward stands on the model's last token, where estimators read it; verl's on the last one, tool text too"),
    Entry("route openai/gsm8k", "scores", "numbers", "a truth with commas or .0 is the number that it is; verl compares texts"),
    Entry("scorer gsm8k, flexible, format", "scores", "numbers", "a lone dot is no number; verl takes it for a wrong answer"),
)  # fmt: skip
