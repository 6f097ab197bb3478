"""Samples of judged answers, from which reward models and judges learn: a prompt, its answers, and their ratings or
preferences.

`samples(x)` reads RM-Gallery's DataSample, HelpSteer2 and 3, UltraFeedback, pairs as TRL, OpenRLHF and RewardBench have them, and
rated answers. The form is recognised by the fields of the records.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from types import MappingProxyType
from typing import Any

from workbench.base.config import require
from workbench.base.errors import DataError, boundary, describe
from workbench.base.seeds import derive
from workbench.base.shown import Shown
from workbench.datasets.pictures import text_of
from workbench.datasets.records import cells_of, chat, object_of, spoken
from workbench.datasets.rows import parts

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """An answer of a sample, with its ratings and the model that wrote it."""

    text: str
    scores: Mapping[str, float] = field(default_factory=dict)
    """Attribute → rating: `helpfulness`, `score`, …"""
    model: str = ""
    """Name of the model that wrote the answer; empty where the data do not have it."""


@dataclass(frozen=True)
class Sample:
    """A prompt, its answers, and which of them are preferred."""

    id: str
    prompt: tuple[Mapping[str, Any], ...]
    """The prompt's messages; the last one is the question."""
    answers: tuple[Answer, ...]
    best: tuple[int, ...] | None = None
    """Numbers of the preferred answers; all answers: a tie; None: not known."""
    category: str = ""
    source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """All other fields of the record."""

    @property
    def question(self) -> str:
        """The prompt as text; in a chat of several messages each stands after its role."""
        if len(self.prompt) == 1:
            return text_of(self.prompt[0]["content"])
        return "\n\n".join(f"{turn['role']}: {text_of(turn['content'])}" for turn in self.prompt)

    @property
    def key(self) -> str:
        """A hash that is equal for samples with the same prompt."""
        text = json.dumps([dict(turn) for turn in self.prompt], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()

    def preferred(self, label: str | None = None) -> tuple[int, ...] | None:
        """Return the places of the preferred answers: those with the highest rating `label`, or without a label as the
        data say."""
        if label is None:
            return self.best
        rated = [answer.scores.get(label) for answer in self.answers]
        if len(rated) < 2 or any(rating is None for rating in rated):
            return None
        most = max(rating for rating in rated if rating is not None)
        return tuple(place for place, rating in enumerate(rated) if rating == most)

    def ordered(self, order: Sequence[int]) -> Sample:
        """Return the sample with its answers in the order of these places, which may leave some out."""
        best = None if self.best is None else tuple(at for at, one in enumerate(order) if one in self.best)
        return replace(self, answers=tuple(self.answers[one] for one in order), best=best)


class Samples(Shown, Sequence[Sample]):
    """An immutable list of `Sample`s: slices, `filter` and `split` are `Samples`, too."""

    def __init__(self, samples: Sequence[Sample], source: str = "", read_as: str = "") -> None:
        self._samples = tuple(samples)
        self.source = source
        self.read_as = read_as
        """The form in which the records were recognised."""

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, key: Any) -> Any:
        return self._like(self._samples[key]) if isinstance(key, slice) else self._samples[key]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Samples) and self._samples == other._samples

    __hash__ = None  # type: ignore[assignment] # metadata may be anything

    def _like(self, samples: Sequence[Sample]) -> Samples:
        return Samples(samples, self.source, self.read_as)

    def filter(self, keep: Callable[[Sample], bool]) -> Samples:
        """Return the samples for which `keep` is true."""
        return self._like([one for one in self if keep(one)])

    def split(self, test: float = 0.1, seed: int = 0) -> tuple[Samples, Samples]:
        """Split by question; returns (train, held out). The share `test` of the questions, chosen by the seed, is held
        out with all its samples.
        """
        require(0 < test < 1, "test", expected="a share in (0, 1)", found=test)
        order = sorted({sample.key for sample in self}, key=lambda key: derive(seed, "held out", key))
        held = set(order[: math.ceil(test * len(order))])
        if len(held) == len(order):
            raise DataError("the samples cannot be split", expected="two questions or more", found=len(order))
        return self.filter(lambda sample: sample.key not in held), self.filter(lambda sample: sample.key in held)

    def pairs(self, label: str | None = None) -> Samples:
        """Return each pair of answers whose preference is known as a sample with two answers; two preferred answers of
        more make no pair."""
        pairs = []
        for sample in self:
            places = [(i, j) for i in range(len(sample.answers)) for j in range(i + 1, len(sample.answers))]
            for pair in places:
                two = sample.ordered(pair)
                best = two.preferred(label)
                tied = best is not None and len(best) == 2 and len(sample.answers) > 2
                if best and not tied:
                    name = sample.id if len(places) == 1 else f"{sample.id}:{pair[0]}-{pair[1]}"
                    pairs.append(replace(two, best=best, id=name))
        return self._like(pairs)

    @property
    def labels(self) -> dict[str, int]:
        """The ratings' names → the number of answers that have each."""
        return dict(Counter(name for one in self for answer in one.answers for name in answer.scores))

    def to_pandas(self) -> Any:
        """Make a table with a row per answer: sample, category, question, answer, model, preferred, and each rating."""
        import pandas as pd

        return pd.DataFrame(
            {
                **{"id": sample.id, "category": sample.category, "question": sample.question, "answer": answer.text},
                **{"model": answer.model, "preferred": None if sample.best is None else place in sample.best},
                **answer.scores,
            }
            for sample in self
            for place, answer in enumerate(sample.answers)
        )

    def lines(self) -> list[tuple[str, str]]:
        """Return (label, value) pairs that describe the samples, for the display as text and HTML."""
        pairs = [
            ("samples", f"{len(self):,} of {len({sample.key for sample in self}):,} questions"),
            ("read as", self.read_as),
            ("source", self.source),
            ("answers", _counts(Counter(len(sample.answers) for sample in self))),
            ("ratings", ", ".join(f"{name} {_ratings(self, name)}" for name in self.labels)),
            ("preferred", _counts(Counter(_preference(sample) for sample in self))),
            ("categories", _counts(Counter(sample.category for sample in self if sample.category))),
        ]
        return [(name, value) for name, value in pairs if value]


def _counts(counted: Counter[Any]) -> str:
    most = counted.most_common(12)
    more = f", and {len(counted) - len(most)} more" if len(counted) > len(most) else ""
    return ", ".join(f"{name}: {count}" for name, count in most) + more


def _ratings(samples: Samples, name: str) -> str:
    ratings = [answer.scores[name] for one in samples for answer in one.answers if name in answer.scores]
    return f"{min(ratings):g} to {max(ratings):g} (mean {sum(ratings) / len(ratings):.3g})"


def _preference(sample: Sample) -> str:
    if sample.best is None:
        return "not said"
    if len(sample.best) == len(sample.answers):
        return "tie"
    if len(sample.best) > 1:
        return f"{len(sample.best)} of {len(sample.answers)}"
    return f"{_ordinal(sample.best[0])} answer"


def _ordinal(place: int) -> str:
    return f"{place + 1}{ {0: 'st', 1: 'nd', 2: 'rd'}.get(place, 'th') }"


def samples(x: Any, *, limit: int | None = None) -> Samples:
    """Read samples of judged answers from files (`.jsonl`, `.parquet`, …), a list of dicts, a DataFrame or a Hugging
    Face `Dataset`.

    Recognised by their fields:

    - RM-Gallery's DataSample: `input`, `output` (lists, or JSON text of them); an answer's `label` has its ratings or
      its `preference`
    - HelpSteer2: `prompt`, `response` and ratings; with `response_1`, `response_2`, `preference_strength`; HelpSteer3
    - UltraFeedback: `instruction`, `completions` with `annotations`
    - pairs: `chosen` and `rejected` (a text, messages, or of RewardBench 2 a list), with or without `prompt`;
      `score_chosen`, `margin`; RewardBench's `subset` is the category
    - rated answers: `prompt`, `response` or `completion`, and numbers or a truth value (`label`)

    Raises `DataError`, naming file, row and its fields, for a record of no such form, and where forms are mixed.

    Example:
        >>> train, held_out = wb.datasets.samples("helpsteer2.jsonl").split(0.1)  # doctest: +SKIP
    """
    if isinstance(x, Samples):
        return x if limit is None else x[:limit]
    listed: list[Sample] = []
    sources: list[str] = []
    form: RecordForm | None = None
    for source, _, records in parts(x):
        sources.append(source)
        for number, record in enumerate(islice(records, None if limit is None else limit - len(listed))):
            place = f"{source or 'samples'}, row {number}"
            cells = {name: cell for name, cell in cells_of(record, place).items() if cell is not None}
            form = form or _form_of(cells, place)
            if not form.fits(cells):
                expected = f"{form.name}, as the rows before it"
                raise DataError(f"fields of {place}", expected=expected, found=", ".join(cells))
            with boundary(f"{place}, read as {form.name}", DataError):
                listed.append(form.read(cells, place, len(listed)))
    if not listed or form is None:
        raise DataError(f"no samples in {', '.join(filter(None, sources)) or 'an empty list'}")
    return Samples(listed, ", ".join(filter(None, sources)), form.name)


@dataclass(frozen=True)
class RecordForm:
    """A form of records of judged answers: the fields by which it is known, and the function that reads a record."""

    name: str
    fields: tuple[str, ...]
    read: Callable[[Record, str, int], Sample]

    def fits(self, cells: Record) -> bool:
        """Return whether a record has the fields of this form."""
        return all(any(name in cells for name in one.split("|")) for one in self.fields)


def _form_of(cells: Record, place: str) -> RecordForm:
    chosen = next((form for form in FORMS if form.fits(cells)), None)
    if chosen is None:
        known = "; ".join(f"{form.name} ({', '.join(form.fields)})" for form in FORMS)
        raise DataError(f"fields of {place}", expected=f"those of a known form: {known}", found=", ".join(cells))
    return chosen


# --- forms ----------------------------------------------------------------------------------------


def _sample(
    cells: Record, place: str, number: int, prompt: Any, answers: Sequence[Answer], best: Any, used: Sequence[str]
) -> Sample:
    """Make the sample of a record; its fields that are not `used` become the metadata."""
    if any(not isinstance(one.text, str) for one in answers) or not answers:
        raise DataError(f"answers of {place}", expected="texts", found=describe([one.text for one in answers]))
    turns = tuple(MappingProxyType(turn) for turn in chat(prompt, f"prompt of {place}"))
    named = {*used, *_IDS, "source", *_CATEGORIES}
    kept = {name: cell for name, cell in cells.items() if name not in named}
    return Sample(
        id=str(next((cells[name] for name in _IDS if name in cells), number)),
        prompt=turns,
        answers=tuple(answers),
        best=None if best is None else tuple(best),
        category=str(next((cells[name] for name in _CATEGORIES if name in cells), "")),
        source=str(cells.get("source", "")),
        metadata=MappingProxyType(kept),
    )


_IDS = ("unique_id", "prompt_id", "id")
_CATEGORIES = ("task_category", "subset", "domain", "category")


def _numbers(cells: Any, *without: str) -> dict[str, float]:
    """Return the fields of a mapping that are numbers, or texts of numbers, as floats."""
    ratings = {}
    for name, cell in (cells or {}).items():
        value = finite(cell)
        if value is not None and name not in without:
            ratings[str(name)] = value
    return ratings


def finite(cell: Any) -> float | None:
    """Convert a finite number, or a text of one, to a float; None for anything else."""
    try:
        value = float(cell) if isinstance(cell, int | float | str) else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _objects_of(cell: Any, place: str) -> list[Any]:
    value = json.loads(cell) if isinstance(cell, str) else cell
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise DataError(place, expected="a list of objects, or its JSON text", found=describe(cell))
    return value


def _data_sample(cells: Record, place: str, number: int) -> Sample:
    turns = [
        {"role": turn["role"], "content": turn["content"]} for turn in _objects_of(cells["input"], f"input of {place}")
    ]
    metadata = object_of(cells.get("metadata"), f"metadata of {place}") or {}
    outputs = _objects_of(cells["output"], f"output of {place}")
    judged = [_gallery_answer(output.get("answer") or {}, place) for output in outputs]
    preferred = [at for at, (_, chosen) in enumerate(judged) if chosen]
    choice = metadata.get("preferred")
    best: Any = {"A": (0,), "B": (1,), "tie": (0, 1)}.get(choice) if choice is not None else preferred or None
    cells = {**cells, "source": cells.get("source") or metadata.get("source") or ""}
    flat = {**{name: one for name, one in cells.items() if name != "metadata"}, **metadata}
    answers = [answer for answer, _ in judged]
    return _sample(flat, place, number, turns, answers, best, ("input", "output", "preferred", "created_at"))


def _gallery_answer(answer: Record, place: str) -> tuple[Answer, bool]:
    """Read an answer of a DataSample: (the answer, whether its label says that it is preferred)."""
    label = object_of(answer.get("label"), f"label of {place}") or {}
    rewarded = answer.get("reward") or {}
    # a reward without details is the default of an answer that nobody has scored
    scores = _numbers({"reward": rewarded.get("score")} if rewarded.get("details") else {})
    chosen = label.get("preference") == "chosen" or label.get("is_preferred") in (True, 1)
    return Answer(answer["content"], {**scores, **_numbers(label, "is_preferred")}, label.get("model") or ""), chosen


def _helpsteer_pair(cells: Record, place: str, number: int) -> Sample:
    """Read a pair of HelpSteer 2 or 3: `preference_strength` or `overall_preference` is above 0 where the second answer
    is better."""
    names = ("response_1", "response_2") if "response_1" in cells else ("response1", "response2")
    strength = next((name for name in ("preference_strength", "overall_preference") if name in cells), None)
    lead = None if strength is None else finite(cells[strength])
    best = None if lead is None else (0, 1) if lead == 0 else (1,) if lead > 0 else (0,)
    prompt = cells.get("prompt", cells.get("context"))
    margin = {} if lead is None else {"margin": abs(lead)}
    used = ("prompt", "context", *names)
    return _sample({**cells, **margin}, place, number, prompt, [Answer(cells[one]) for one in names], best, used)


def _ultra_feedback(cells: Record, place: str, number: int) -> Sample:
    answers = []
    for completion in _objects_of(cells["completions"], f"completions of {place}"):
        notes = {
            name: (note[0] if isinstance(note, list) and note else note).get("Rating")
            for name, note in (completion.get("annotations") or {}).items()
            if isinstance(note, Mapping | list) and note
        }
        whole = {name: completion.get(name) for name in ("overall_score", "fine-grained_score")}
        scores = {**_numbers(notes), **_numbers(whole)}
        answers.append(Answer(completion["response"], scores, completion.get("model") or ""))
    return _sample(cells, place, number, cells["instruction"], answers, None, ("instruction", "completions"))


def _pair(cells: Record, place: str, number: int) -> Sample:
    chosen, rejected = (_several(cells[name]) for name in ("chosen", "rejected"))
    prompt = next((cells[name] for name in ("prompt", "instruction", "question", "input") if name in cells), None)
    if prompt is None:
        prompt, chosen[0], rejected[0] = _shared(chosen[0], rejected[0], place)
    models = [[*_several(cells.get(f"{name}_model", ()))] for name in ("chosen", "rejected")]
    if isinstance(cells.get("models"), list):
        models = [cells["models"][: len(chosen)], cells["models"][len(chosen) :]]
    scores = [finite(cells.get(name)) for name in ("score_chosen", "score_rejected")]
    answers = []
    for kind, texts in enumerate((chosen, rejected)):
        for text, model in zip_longest(texts, models[kind][: len(texts)], fillvalue=""):
            score = scores[kind]
            answer = spoken(text if isinstance(text, str) else text[-1:], f"answers of {place}")
            answers.append(Answer(answer, {} if score is None else {"score": score}, str(model or "")))
    used = ("prompt", "instruction", "question", "input", "chosen", "rejected", "models")
    return _sample(cells, place, number, prompt, answers, range(len(chosen)), used)


def _several(cell: Any) -> list[Any]:
    """Return the contents of `chosen` or `rejected` as a list: it may hold one text or chat, or several."""
    if isinstance(cell, list | tuple) and not (cell and isinstance(cell[0], Mapping)):
        return list(cell)
    return [cell]


def _shared(chosen: Any, rejected: Any, place: str) -> tuple[Any, Any, Any]:
    """Split a pair without a prompt: (prompt, chosen, rejected); the prompt is what both answers begin with (TRL's
    "implicit prompt")."""
    alike = [first == second for first, second in zip(chosen, rejected, strict=False)]
    same = [*alike, False].index(False)
    if isinstance(chosen, str):
        turn = chosen.rfind("\n\nAssistant:", 0, same)
        if turn >= 0:  # Anthropic's transcripts: what was said before is the prompt
            prompt, ends = chosen[:turn].removeprefix("\n\nHuman:"), turn + len("\n\nAssistant:")
            return prompt.strip(), chosen[ends:].strip(), rejected[ends:].strip()
        same -= same > 0 and chosen[same - 1] == " "
    if not same:
        expected = "a prompt, or answers that begin with the same one"
        raise DataError(f"chosen and rejected of {place}", expected=expected, found="nothing in common")
    return chosen[:same], chosen[same:], rejected[same:]


def _rated(cells: Record, place: str, number: int) -> Sample:
    name = next(one for one in ("response", "completion", "answer") if one in cells)
    scores = _numbers({key: cell for key, cell in cells.items() if key not in (*_IDS, "prompt", name)})
    if not scores:
        raise DataError(f"ratings of {place}", expected="a field with a number", found=", ".join(cells))
    answer = Answer(spoken(cells[name], f"{name} of {place}"), scores, str(cells.get("model") or ""))
    return _sample(cells, place, number, cells["prompt"], [answer], None, ("prompt", name, "model", *scores))


FORMS = (
    RecordForm("RM-Gallery's DataSample", ("input", "output"), _data_sample),
    RecordForm("UltraFeedback", ("instruction", "completions"), _ultra_feedback),
    RecordForm(
        "HelpSteer's preferences", ("prompt|context", "response_1|response1", "response_2|response2"), _helpsteer_pair
    ),
    RecordForm("pairs", ("chosen", "rejected"), _pair),
    RecordForm("rated answers", ("prompt", "response|completion|answer"), _rated),
)
"""The forms that `samples` knows; the first that fits a record is taken."""
