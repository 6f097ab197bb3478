"""`judge_report`: whether a judge's verdicts can be trusted: against the truth, a constant, length, position and itself."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

from workbench.base.errors import DataError, SettingError, describe
from workbench.base.progress import working
from workbench.base.shown import Shown, shows
from workbench.dataproto.core import DataProto
from workbench.datasets.preferences import Sample, Samples
from workbench.datasets.preferences import samples as read_samples
from workbench.rewards import judge_stats as stats
from workbench.rewards import judge_verdicts as verdicts
from workbench.rewards.base import row_views
from workbench.rewards.judge import Judge, PairwiseJudge
from workbench.rewards.judge_stats import Bin, Estimate
from workbench.rewards.judge_verdicts import Cost, Item, Vote
from workbench.rewards.reward import as_reward

if TYPE_CHECKING:
    import pandas as pd

TIE, NONE = "tie", "no verdict"


@dataclass(frozen=True)
class Calibration:
    """A judge's stated or derived confidence in bins, with the accuracy of the verdicts in each bin."""

    of: str
    """What the confidence is: `stated` by the judge, the reward model's `margin` as a probability, the share of an item's
    `votes` for its most frequent verdict, or a `size`, the difference of two numbers that is not a probability."""
    bins: Sequence[Bin]
    error: float
    """Expected calibration error; NaN of a `size`."""


class JudgeReport(Shown):
    """The result of `judge_report`. Print it; `figures` are its numbers, `to_pandas()` its items, `figure()` draws it.

    Accuracy is the mean over items of the credit of an item's verdicts. A pair's verdict has credit 1 if it names the
    better answer, and a grade has credit 1 if it equals the true grade, else 0. Where a judge gives each answer a
    number, a best answer with the highest number has credit 1, shared by all answers with that number (RewardBench 2).
    A missing verdict has credit 0; `accuracy among answered` leaves such verdicts out.
    """

    def __init__(
        self, judge: str, kind: str, items: Sequence[Item], asked: Sequence[Vote], cost: Cost, label: str = "",
        bounds: tuple[float, float] | None = None, notes: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.judge, self.kind, self.label, self.cost, self.notes = judge, kind, label, cost, tuple(notes)
        self.items, self.asked, self.bounds = tuple(items), tuple(asked), bounds
        self.answered = [one for one in self.asked if one.verdict is not None]
        """The votes that have a verdict."""
        self.seeds = tuple(dict.fromkeys(one.seed for one in self.asked))

    # --- credits ----------------------------------------------------------------------------------

    @cached_property
    def same_scale(self) -> bool:
        """Whether the judge's grades are in the unit of the true grades; otherwise only their order is compared."""
        if self.kind != "grades" or not self.answered:
            return self.kind != "grades"
        truths = [item.grade for item in self.items]
        low, high = min(truths), max(truths)
        if self.bounds is not None and not self.bounds[0] <= low <= high <= self.bounds[1]:
            return False
        # a schema of 0 to 10 has another unit than grades of 0 to 4, which are in its bounds, too
        like = self.bounds is not None and self.bounds[1] - self.bounds[0] <= 2 * (high - low)
        return like or all(low <= one.verdict <= high for one in self.answered)

    def right(self, vote: Vote) -> float:
        """Return the credit of a verdict, in [0, 1]; NaN for a grade in another unit than the true grade."""
        item = self.items[vote.item]
        if vote.verdict is None:
            return 0.0
        if self.kind == "grades":
            return float(_rounded(vote.verdict) == _rounded(item.grade)) if self.same_scale else math.nan
        if self.kind == "pairs":
            return float(vote.verdict == item.best)
        if item.category.lower() == "ties":
            return float(_rated(item, vote).gap > 0)
        return stats.best_of([value for value in vote.values if value is not None], item.best)

    def _means(self, value: Callable[[Vote], float | None], of: Sequence[Vote] | None = None) -> dict[Hashable, float]:
        """Average a value over the verdicts of each item: item number → mean. None and NaN are left out."""
        pairs = ((one.item, value(one)) for one in (self.asked if of is None else of))
        return stats.item_means((item, number) for item, number in pairs if number is not None and number == number)

    @cached_property
    def constant(self) -> tuple[str, dict[Hashable, float]]:
        """The constant predictor, which always gives the most frequent truth: (its description, item number → its
        credit)."""
        if self.kind == "choices":
            chances = (len(one.best) / len(one.answers) * (one.category.lower() != "ties") for one in self.items)
            return "the same number", dict(enumerate(chances))
        first = (vote for vote in self.asked if vote.seed == self.seeds[0])
        truths = [(vote.item, self._label_of(vote, self._truth(vote.item))) for vote in first]
        ((most, _),) = Counter(truth for _, truth in truths).most_common(1)
        return f"always {most}", stats.item_means((item, float(truth == most)) for item, truth in truths)

    def _truth(self, item: int) -> Any:
        return self.items[item].grade if self.kind == "grades" else self.items[item].best

    def _label_of(self, vote: Vote, verdict: Any) -> str:
        """Write a verdict or a truth as the judge would: `A`, `B` or `tie` in the order in which it read the answers,
        or a grade."""
        if verdict is None:
            return NONE
        if self.kind == "grades":
            return f"{_rounded(verdict)}"
        return TIE if len(verdict) > 1 else "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[vote.order.index(min(verdict)) % 26]

    def _follows_rule(self, rule: Callable[[Item, Vote], frozenset[int]]) -> Callable[[Vote], float | None]:
        """Make a function that returns how far a verdict agrees with a rule, in [0, 1], such as "the longest answer
        wins".

        `rule` returns the numbers of the answers that win; where these are all answers, the agreement is None.
        """

        def agreement(vote: Vote) -> float | None:
            won = rule(self.items[vote.item], vote)
            if len(won) == len(self.items[vote.item].answers):
                return None
            return len(won & vote.verdict) / len(vote.verdict) if vote.verdict else 0.0

        return agreement

    def _rule(self, rule: Callable[[Item, Vote], frozenset[int]]) -> Estimate:
        """Estimate the accuracy of a rule that chooses answers; answers that the rule does not distinguish share the
        credit."""
        won = {one.item: rule(self.items[one.item], one) for one in self.asked}
        right = {item: len(answers & self.items[item].best) / len(answers) for item, answers in won.items()}
        return stats.share((n, 0.0 if self._tied(n) else credit) for n, credit in right.items())

    def _tied(self, item: int) -> bool:
        return len(self.items[item].best) == len(self.items[item].answers)

    # --- figures ----------------------------------------------------------------------------------

    @cached_property
    def figures(self) -> dict[str, Estimate]:
        """The report's numbers by name, each with a 95 % interval over items; `how` of each says how the interval was
        computed."""
        estimates: dict[str, Estimate] = {}
        if self.same_scale:
            estimates["accuracy"] = stats.share(self._means(self.right).items())
            estimates["accuracy among answered"] = stats.share(self._means(self.right, self.answered).items())
            estimates[f"constant ({self.constant[0]})"] = stats.share(self.constant[1].items())
            estimates["accuracy less the constant's"] = self._beats(self._means(self.right), self.constant[1])
        estimates |= self._of_grades() if self.kind == "grades" else self._of_choices()
        estimates |= self._of_orders() if self.kind == "pairs" else {}
        estimates |= self._of_seeds()
        return estimates | {"answered": stats.share((one.item, float(one.verdict is not None)) for one in self.asked)}

    def _of_grades(self) -> dict[str, Estimate]:
        grades, truth, lengths = self._columns()
        estimates = {}
        if self.same_scale:
            middle = median(item.grade for item in self.items)
            estimates["mean absolute error"] = stats.bootstrap(stats.mean, abs(grades - truth))
            estimates[f"its constant ({middle:g})"] = stats.bootstrap(stats.mean, [abs(x - middle) for x in truth])
        estimates["Spearman with the truth"] = stats.bootstrap(stats.spearman, grades, truth)
        estimates["Spearman with length"] = stats.bootstrap(stats.spearman, grades, lengths)
        return estimates | {"truth's Spearman with length": stats.bootstrap(stats.spearman, truth, lengths)}

    def _columns(self) -> tuple[Any, Any, Any]:
        """Return three arrays over the items with a verdict: the judge's mean grade over its repetitions, the true grade, and
        the answer's length in characters."""
        import numpy as np

        means = self._means(lambda vote: vote.verdict)
        there = [self.items[int(str(n))] for n in means]
        lengths = np.array([one.lengths[0] for one in there], float)
        return np.array(list(means.values()), float), np.array([one.grade for one in there], float), lengths

    def _of_choices(self) -> dict[str, Estimate]:
        estimates = {"the longer": self._rule(_longest), "the shorter": self._rule(_shortest)}
        decided = [vote for vote in self.answered if len(vote.verdict) < len(self.items[vote.item].answers)]
        estimates["prefers the longer"] = stats.share(self._means(self._follows_rule(_longest), decided).items())
        for name, rule in (("longer", _longest), ("shorter", _shortest)):
            there = [vote for vote in self.asked if rule(self.items[vote.item], vote) == self.items[vote.item].best]
            estimates[f"accuracy where the better is the {name}"] = stats.share(self._means(self.right, there).items())
        ties = ((vote.item, float(len(vote.verdict) > 1)) for vote in self.answered)
        return estimates | {"no preference": stats.share(ties)}

    @cached_property
    def _swapped(self) -> list[tuple[Vote, Vote]]:
        """The verdicts on a pair in its two orders, for each pair and seed where both orders have a verdict."""
        by_seed: dict[tuple[int, int], list[Vote]] = {}
        for one in self.answered:
            by_seed.setdefault((one.item, one.seed), []).append(one)
        return [(two[0], two[1]) for two in by_seed.values() if len(two) == 2]

    def _of_orders(self) -> dict[str, Estimate]:
        decided = [vote for vote in self.answered if len(vote.verdict) == 1]
        estimates = {"says the first": stats.share(self._means(self._follows_rule(_first_shown), decided).items())}
        if not self._swapped:
            return estimates
        same = [(vote.item, float(vote.verdict == other.verdict)) for vote, other in self._swapped]
        sure = {(vote.item, vote.seed): self.right(vote) * self.right(other) for vote, other in self._swapped}
        counted = dict.fromkeys((vote.item, vote.seed) for vote in self.asked)
        estimates["swap consistency"] = stats.share(same)
        estimates["right in both orders"] = stats.share((key[0], sure.get(key, 0.0)) for key in counted)
        turned = [(a, b) for a, b in self._swapped if a.verdict != b.verdict and len(a.verdict) == len(b.verdict) == 1]
        first = [(vote.item, float(vote.verdict == _first_shown(self.items[vote.item], vote))) for vote, _ in turned]
        return estimates | {"says the first, of inconsistent pairs": stats.share(first)}

    def _of_seeds(self) -> dict[str, Estimate]:
        if len(self.seeds) < 2:
            return {}
        answers: dict[tuple[int, tuple[int, ...]], list[str]] = {}
        for vote in self.answered:
            answers.setdefault((vote.item, vote.order), []).append(self._label_of(vote, vote.verdict))
        whole = {key: labels for key, labels in answers.items() if len(labels) == len(self.seeds)}
        same = stats.share((key[0], float(len(set(labels)) == 1)) for key, labels in whole.items())
        kappa = Estimate(stats.fleiss_kappa(list(whole.values())), math.nan, math.nan, len(whole), "no interval")
        return {"identical between seeds": same, "Fleiss' kappa between seeds": kappa}

    @property
    def statuses(self) -> dict[str, int]:
        """Count the verdicts by status; a verdict that is missing is not *scored*."""
        return dict(Counter(one.status for one in self.asked))

    # --- what it means ----------------------------------------------------------------------------

    def _beats(self, credits: Mapping[Hashable, float], rival: Mapping[Hashable, float]) -> Estimate:
        """Estimate the mean difference between two credits over the items that have both, with its interval."""
        return stats.bootstrap(stats.mean, [value - rival[item] for item, value in credits.items() if item in rival])

    @cached_property
    def findings(self) -> tuple[str, ...]:
        """The conclusions from the figures, as sentences; the first says whether the judge is better than a constant."""
        if not self.answered:
            return ("gives no verdict",)
        lines = [self._of_constant()]
        if self.kind == "grades":
            grades, truth, lengths = self._columns()
            gap = stats.bootstrap(
                lambda *of: abs(stats.spearman(of[0], of[2])) - stats.spearman(*of[:2]), grades, truth, lengths
            )
            lines += [f"follows length (Spearman {stats.spearman(grades, lengths):.2f})"] if gap.low > 0 else []
        else:
            lines += self._biases()
        kinds = {self._label_of(one, one.verdict) for one in self.answered}
        if len(kinds) == 1 and self.kind != "choices":
            lines.append(f"always says {kinds.pop()}")
        elif len(kinds) == 1 and kinds == {TIE}:
            lines.append("gives every answer the same number")
        lost = len(self.asked) - len(self.answered)
        return tuple(lines + ([f"no verdict in {lost} of {len(self.asked)}"] if lost else []))

    def _of_constant(self) -> str:
        if not self.same_scale:
            low, value = self.figures["Spearman with the truth"].low, self.figures["Spearman with the truth"].value
            ranked = f"(Spearman {value:.2f}; its numbers are not in the unit of {self.label!r})"
            return f"ranks as the truth does {ranked}" if low > 0 else f"no better than the constant {ranked}"
        gap, accuracy = self.figures["accuracy less the constant's"], self.figures["accuracy"].value
        against = f"({accuracy:.1%} right, {self.constant[0]} {stats.mean(list(self.constant[1].values())):.1%})"
        if gap.low > 0:
            return f"better than the constant {against}"
        if self.kind == "grades":
            middle = median(item.grade for item in self.items)
            off = self._means(lambda one: abs(one.verdict - self.items[one.item].grade), self.answered)
            if self._beats({n: abs(one.grade - middle) for n, one in enumerate(self.items)}, off).low > 0:
                return f"nearer to the truth than the constant, not more often right {against}"
        return f"{'worse' if gap.high < 0 else 'no better'} than the constant {against}"

    def _biases(self) -> list[str]:
        """Describe the rules (longer, shorter, first or second answer) that verdicts agree with significantly more
        often than with the truth."""
        rules: dict[str, tuple[str, Callable[[Item, Vote], frozenset[int]]]] = {
            "length": ("the longer", _longest), "brevity": ("the shorter", _shortest),
        }  # fmt: skip
        if self.kind == "pairs":
            rules |= {"position": ("the first", _first_shown), "position ": ("the second", _second_shown)}
        lines = []
        for name, (which, rule) in rules.items():
            follows = self._means(self._follows_rule(rule))
            if self._beats(follows, self._means(self.right)).low > 0:
                share = stats.mean(list(self._means(self._follows_rule(rule), self.answered).values()))
                lines.append(f"follows {name.strip()} (prefers {which} in {share:.1%})")
        return lines

    @property
    def headline(self) -> str:
        """Join the findings into one line."""
        return "; ".join(self.findings)

    @property
    def caveats(self) -> tuple[str, ...]:
        """What limits the findings: how the judge was asked, and samples in which an answer's length alone tells that
        it is better."""
        lines = list(self.notes)
        for name in ("longer", "shorter") if self.kind != "grades" else ():
            if (rule := self.figures[f"the {name}"]).low > stats.mean(list(self.constant[1].values())):
                lines.append(f"In these samples the {name} answer is the better in {rule.value:.1%}.")
        return tuple(lines)

    @property
    def trusted(self) -> bool:
        """Whether the judge is better than a constant and follows neither the answers' length nor their position."""
        return not any(one.startswith(("no better", "worse", "follows", "gives", "always")) for one in self.findings)

    @cached_property
    def confusion(self) -> pd.DataFrame:
        """Count verdicts (columns) by truth (rows); of pairs `A` is the answer that the judge read first. Empty for
        judges that give each answer a number."""
        import pandas as pd

        if self.kind == "choices" or not self.same_scale:
            return pd.DataFrame()
        pairs = [
            (self._label_of(vote, self._truth(vote.item)), self._label_of(vote, vote.verdict)) for vote in self.asked
        ]
        classes = {name for two in pairs for name in two} - {NONE}
        known = ["A", "B", TIE] if self.kind == "pairs" else sorted(classes, key=int)
        rows = [name for name in known if any(truth == name for truth, _ in pairs)]
        columns = [name for name in (*known, NONE) if any(name in two for two in pairs)]
        counts = Counter(pairs)
        return pd.DataFrame([[counts[row, column] for column in columns] for row in rows], rows, columns)

    @cached_property
    def calibration(self) -> Calibration | None:
        """Compare confidence with accuracy, in bins, with the expected calibration error; None where the verdicts have
        no confidence."""
        sure = [vote for vote in self.answered if not math.isnan(vote.confidence) and self.same_scale]
        if sure:
            of = "stated" if self.kind != "choices" else "margin"
            return Calibration(of, *stats.calibration([vote.confidence for vote in sure], list(map(self.right, sure))))
        if self.kind == "choices":
            margins = [_margin(vote) for vote in self.answered]
            return Calibration("size", stats.by_margin(margins, list(map(self.right, self.answered))), math.nan)
        mine = [found for found in self._by_item(self.answered).values() if found]
        if not self.same_scale or max(map(len, mine), default=0) < 2:
            return None
        agreed = list(map(self._vote, mine))
        return Calibration("votes", *stats.calibration([share for share, _ in agreed], [right for _, right in agreed]))

    def _by_item(self, votes: Sequence[Vote]) -> dict[int, list[Vote]]:
        groups: dict[int, list[Vote]] = {n: [] for n in range(len(self.items))}
        for vote in votes:
            groups[vote.item].append(vote)
        return groups

    def _vote(self, mine: Sequence[Vote]) -> tuple[float, float]:
        """Return (share of an item's verdicts that agree with the most frequent one, its credit); of equally frequent
        ones the mean credit."""
        counts = Counter(one.verdict for one in mine)
        most = max(counts.values())
        return most / len(mine), stats.mean([self.right(one) for one in mine if counts[one.verdict] == most])

    # --- tables -----------------------------------------------------------------------------------

    @cached_property
    def categories(self) -> dict[str, Estimate]:
        """Accuracy by category of the samples; a missing verdict counts as wrong. {} without categories. RewardBench
        2's Ties follow its formula."""
        if not self.same_scale:
            return {}
        credits, estimates = self._means(self.right), {}
        for name in dict.fromkeys(item.category for item in self.items if item.category):
            mine = [(n, credit) for n, credit in credits.items() if self.items[int(str(n))].category == name]
            estimates[name] = self._ties(name) or stats.share(mine)
        return estimates

    def _ties(self, name: str) -> Estimate | None:
        if self.kind != "choices" or name.lower() != "ties":
            return None
        rated: dict[str, dict[Hashable, stats.Rated]] = {"ref": {}, "tied": {}}
        for vote in self.asked:
            item = self.items[vote.item]
            if item.category == name and (which := re.search(r"(ref|tied):(\w+)$", item.id)):
                rated[which[1]][which[2], vote.seed] = _rated(item, vote)
        n = len(rated["ref"]) + len(rated["tied"])
        return Estimate(stats.ties_score(**rated), math.nan, math.nan, n, "RewardBench 2's formula") if n else None

    @cached_property
    def sections(self) -> dict[str, float]:
        """RewardBench's score by section and their mean `score`, if the categories are its subsets; for RewardBench 2
        the `score` alone."""
        values = {name: one.value for name, one in self.categories.items()}
        if set(values) <= set(stats.SECOND) and len(values) > 1:
            return {"score": stats.mean(list(values.values()))}
        scores = stats.sections(values)
        return {**scores, "score": stats.mean(list(scores.values()))} if scores else {}

    def to_pandas(self) -> pd.DataFrame:
        """Make a table with one row per item.

        Columns: `id, category, prompt, truth`, `verdicts` (of all orders and seeds), `accuracy`, `answered` (share of
        the verdicts that were given), `longer` (characters of the best answers less those of the others, in the mean),
        `tokens`, `seconds`, `cut`, `why`.
        """
        import pandas as pd

        return pd.DataFrame([self._line(self.items[n], found) for n, found in self._by_item(self.asked).items()])

    def _line(self, item: Item, answers: Sequence[Vote]) -> dict[str, Any]:
        graded = self.kind == "grades"
        return {
            "id": item.id, "category": item.category, "prompt": item.prompt,
            "truth": item.grade if graded else sorted(item.best),
            "verdicts": [vote.verdict if graded or vote.verdict is None else sorted(vote.verdict) for vote in answers],
            "accuracy": stats.mean([self.right(vote) for vote in answers]),
            "answered": stats.mean([float(vote.verdict is not None) for vote in answers]),
            "longer": _length_gap(item),
            "tokens": sum(vote.tokens for vote in answers), "seconds": sum(vote.seconds for vote in answers),
            "cut": any(vote.cut for vote in answers), "why": next((vote.why for vote in answers if vote.verdict is None), ""),
        }  # fmt: skip

    def figure(self) -> Any:
        """Draw a matplotlib figure: accuracy beside the constants', confusion, calibration, categories."""
        return shows(self, "figure")

    def __len__(self) -> int:
        return len(self.items)


def _rounded(grade: float) -> int:
    """Round a grade to the nearest whole number, halves upwards."""
    return math.floor(grade + 0.5)


def _longest(item: Item, _: Vote) -> frozenset[int]:
    return frozenset(n for n, size in enumerate(item.lengths) if size == max(item.lengths))


def _shortest(item: Item, _: Vote) -> frozenset[int]:
    return frozenset(n for n, size in enumerate(item.lengths) if size == min(item.lengths))


def _first_shown(_: Item, vote: Vote) -> frozenset[int]:
    return frozenset(vote.order[:1])


def _second_shown(_: Item, vote: Vote) -> frozenset[int]:
    return frozenset(vote.order[1:2])


def _length_gap(item: Item) -> float:
    """Return the mean length of the best answers less that of the others, in characters; NaN where there are no others."""
    sides = [[size for n, size in enumerate(item.lengths) if (n in item.best) == best] for best in (True, False)]
    return stats.mean(sides[0]) - stats.mean(sides[1])


def _margin(vote: Vote) -> float:
    """Return the difference between the highest number that the judge gave and the next one."""
    *_, second, first = sorted(value for value in vote.values if value is not None)
    return first - second


def _rated(item: Item, vote: Vote) -> stats.Rated:
    sides = [[value for n, value in enumerate(vote.values) if (n in item.best) == right] for right in (True, False)]
    return stats.Rated(*sides)


@working("judge_report")
def judge_report(
    judge: Any, samples: Any, *, seeds: int | Sequence[int] = 3, orders: bool = True, label: str | None = None
) -> JudgeReport:
    """Ask a judge about samples whose truth is known, and compare: print the result, draw it by `figure()`.

    A `PairwiseJudge` compares the best answers with the others two by two; any other reward scores each answer. With
    `label`, or where no sample says which answer is best, the scores are compared with the grades that the answers have
    under `label`; otherwise the highest score must be a best answer's.

    Args:
        judge: a `Judge`, `PairwiseJudge`, `RewardModel`, or whatever `as_reward` takes.
        samples: `wb.datasets.samples(…)`, a list of its samples, or what that function reads. A ground truth that the
            judge
            reads is the sample's `metadata["ground_truth"]`.
        seeds: how often a chat model is asked, or the seeds. A reward without a seed is asked once.
        orders: ask about each pair in both orders; False: in one order, drawn by the sample's id.
        label: the attribute of the answers' `scores` whose values are the true grades.

    A missing verdict has no credit. Raises `SettingError` where no sample has a truth to compare verdicts with.

    Example:
        >>> wb.rewards.judge_report(judge, wb.datasets.samples("pairs.jsonl"))  # doctest: +SKIP
    """
    reward, known = as_reward(judge), read(samples)
    drawn = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not drawn:
        raise SettingError("seeds of a judge report", expected="at least one", found=describe(seeds))
    compares, chats = isinstance(reward, PairwiseJudge), isinstance(reward, Judge)
    label = label or ("" if any(one.best for one in known) else _only_label(known))
    kind = "pairs" if compares else "grades" if label else "choices"
    items = _items(known, kind, label, chats)
    answers, cost = verdicts.ask(reward, items, drawn if chats else [0], orders, label)
    notes = []
    if chats and len(drawn) > 1 and not reward.asking.temperature:  # type: ignore[attr-defined]
        notes.append("The judge is asked at temperature 0: seeds differ by the engine's own noise alone.")
    if compares and not orders:
        notes.append("Each pair was judged in one order only: swap consistency is not known.")
    return JudgeReport(str(reward), kind, items, answers, cost, label, verdicts.bounds(reward), notes)


def _items(samples: Samples, kind: str, label: str, whole: bool) -> list[Item]:
    items = verdicts.items_of(samples, kind, label, whole)
    if not items:
        expected = f"at least one with a rating {label!r}" if label else "at least one with a better and a worse answer"
        found = f"ratings {', '.join(samples.labels) or '(none)'} in {len(samples)} samples"
        raise SettingError("samples whose truth is known", expected=expected, found=found)
    return items


def read(samples: Any) -> Samples:
    """Return `Samples` of a list of samples, or of whatever `wb.datasets.samples` reads."""
    listed = isinstance(samples, list | tuple) and all(isinstance(one, Sample) for one in samples)
    return Samples(samples) if listed and samples else read_samples(samples)


def _only_label(samples: Samples) -> str:
    if len(samples.labels) != 1:
        found = ", ".join(samples.labels) or "neither best answers nor ratings"
        raise SettingError("ground truth of the samples", expected="best answers, or the argument label", found=found)
    return next(iter(samples.labels))


def win_rate(judge: PairwiseJudge, batch: DataProto, against: DataProto) -> Estimate:
    """Estimate how often a pairwise judge prefers the responses of `batch` to those of `against`, row by row: a tie is
    half a win.

    Both are scored or sampled batches of the same prompts in the same order (`wb.evaluate(…).batch`). Each pair is
    judged in both orders; pairs whose two verdicts disagree or are missing do not count: `n` of the `Estimate` is the
    number of pairs that do. Raises `DataError` where the prompts differ.
    """
    mine, theirs = row_views(batch), row_views(against)
    same = len(mine) == len(theirs) and all(a["prompt"] == b["prompt"] for a, b in zip(mine, theirs, strict=True))
    if not same:
        rows = f"{len(mine)} and {len(theirs)} rows of prompts that differ"
        raise DataError("win_rate needs two batches with the same prompts in the same order", found=rows)
    pairs = [{**row, "uid": number} for number, two in enumerate(zip(mine, theirs, strict=True)) for row in two]
    found = judge.judge(pairs)[::2]
    return stats.share((number, (one.value + 1) / 2) for number, one in enumerate(found) if one.scored)
