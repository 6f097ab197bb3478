"""`search`: BM25 over a local corpus, with the arguments and the answer's form of verl's search tool."""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from workbench.agents.tools.base import BaseTool, Executed, answered
from workbench.agents.tools.functions import in_thread
from workbench.config import require
from workbench.datasets.files import read
from workbench.errors import DataError, SettingError, describe, message

K1, B = 1.2, 0.75
"""BM25's usual constants: how fast a repeated word saturates, how much a long document pays."""
MAX_QUERIES = 16
_WORD = re.compile(r"\w+")
_FIELDS = ("contents", "text", "content", "body")


class Corpus:
    """Documents with an inverted index. `documents` are texts, or records with `contents` (or `text`) and maybe `title`.

    Raises `DataError` for a record without a text.
    """

    def __init__(self, documents: Iterable[Any]) -> None:
        self.documents = [_text(number, one) for number, one in enumerate(documents)]
        require(bool(self.documents), "a corpus", expected="at least one document", found=0)
        self._postings: dict[str, list[tuple[int, int]]] = {}
        lengths = []
        for number, text in enumerate(self.documents):
            words = Counter(_words(text))
            lengths.append(words.total())
            for word, times in words.items():
                self._postings.setdefault(word, []).append((number, times))
        mean = sum(lengths) / len(lengths) or 1.0
        self._norms = [K1 * (1 - B + B * length / mean) for length in lengths]

    def __len__(self) -> int:
        return len(self.documents)

    def best(self, query: str, topk: int = 3) -> list[tuple[float, str]]:
        """(score, document) of the documents that share a word with the query, best first; ties in the corpus's order."""
        scores: dict[int, float] = {}
        for word in _words(query):
            found = self._postings.get(word, ())
            rarity = math.log(1 + (len(self) - len(found) + 0.5) / (len(found) + 0.5))
            for number, times in found:
                gain = rarity * times * (K1 + 1) / (times + self._norms[number])
                scores[number] = scores.get(number, 0.0) + gain
        chosen = heapq.nsmallest(topk, scores.items(), key=lambda item: (-item[1], item[0]))
        return [(score, self.documents[number]) for number, score in chosen]


class Search(BaseTool):
    """`Search(corpus)`: looks up several queries at once in a jsonl or parquet file, or a list of texts or records.

    `config`: `corpus` (where it is not given first), `topk` (3). The answer has each document's first line as its title.
    """

    SCHEMA: ClassVar[Mapping[str, Any]] = {
        "name": "search",
        "description": "Searches for documents that answer the queries.",
        "parameters": {
            "query_list": {"type": "array", "items": {"type": "string"}, "description": "The queries"},
        },
    }

    def __init__(
        self,
        corpus: Corpus | str | Path | Sequence[Any] | None = None,
        config: Mapping[str, Any] | None = None,
        tool_schema: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__({**(config or {}), **settings}, tool_schema)
        corpus = corpus if corpus is not None else self.config.get("corpus")
        if corpus is None:
            do = "give a jsonl or parquet file, or a list of texts; a retrieval service is not asked"
            raise SettingError(message(f"tool {self.name!r} has no corpus", expected="config.corpus", do=do))
        if isinstance(corpus, str | Path):
            corpus = read(Path(corpus))
        self.corpus = corpus if isinstance(corpus, Corpus) else Corpus(corpus)
        self.topk = int(self.config.get("topk", 3))
        require(self.topk >= 1, "topk", expected="≥ 1", found=self.topk)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """The best documents of each query, in a thread: a large corpus takes its time."""
        if wrong := self.refusal(parameters):
            return wrong
        queries = parameters["query_list"][:MAX_QUERIES]
        found = await in_thread(lambda: [self.corpus.best(query, self.topk) for query in queries])
        text = "\n---\n".join(_listed(documents) for documents in found) or "No query."
        return answered(text, None, found=[len(documents) for documents in found])


def _listed(found: Sequence[tuple[float, str]]) -> str:
    told = []
    for number, (_, text) in enumerate(found, 1):
        title, _, rest = text.partition("\n")
        told.append(f"Doc {number} (Title: {title})\n{rest}" if rest else f"Doc {number}: {title}")
    return "\n\n".join(told) or "No document found."


def _text(number: int, document: Any) -> str:
    if isinstance(document, str):
        return document
    if isinstance(document, Mapping):
        text = next((document[name] for name in _FIELDS if isinstance(document.get(name), str)), None)
        title = document.get("title")
        if text is not None:
            return f"{title}\n{text}" if isinstance(title, str) and not text.startswith(title) else text
    raise DataError(
        message(f"document {number}", expected=f"text, or a record with {_FIELDS[0]!r}", found=describe(document))
    )


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
