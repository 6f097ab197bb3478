"""Reads a verl command as it stands, and runs nothing: a list of words, shell text, a script, YAML, a mapping → flat settings."""

from __future__ import annotations

import ast
import copy
import fnmatch
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from workbench.base.errors import SettingError, describe, first_line

_BEGINS = re.compile(r"(^|[./])(main_\w+|fully_async_main|(?:fsdp_)?sft_trainer(?:_ray)?)(\.py)?$")
_WORD = re.compile(r"^[+~]{0,2}[A-Za-z_][\w.@/-]*=")
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


TEXTS = ("text", "a mapping", "a list of words")
"""Sources of commands that are not a file."""
_SFT_SECTIONS = frozenset(("model", "optim", "engine", "checkpoint"))
"""Sections that the configuration of verl's SFT trainer has, and that of its RL trainer has not."""
_NAMES = ("trainer.default_local_dir", "trainer.experiment_name", "trainer.run_name", "trainer.project_name")
"""Settings that name a run; the first that is there counts."""


class Command(NamedTuple):
    """The settings that were read from one verl command, and the words that are not settings."""

    settings: dict[str, Any]
    """Dotted name → value, in the order in which they were written; of a name that stands twice the last."""
    left_out: dict[str, str]
    """What is not a setting → why: words, deleted keys, configuration files that are not there."""
    source: str
    """The file, or the kind of text."""
    suffix: str = ""
    """`-0`, `-1`, …: the command's number, where another one of the text names its run alike, or neither has a name."""
    others: tuple[str, ...] = ()
    """The text's other commands: number, and the branch of an `if` or `case` that each stands in."""
    undecided: tuple[str, ...] = ()
    """Branches that the text's own values do not decide and that assign variables: all of them are read, in order."""


def read_command(source: Any, *, command: int | str | None = None) -> Command:
    """Read the settings of a verl command: `source` is a list of words, the path of a `.sh` or YAML file, their text,
    or a mapping.

    Of a shell text with several commands `command` selects one, by its number from 0, or by the branch that it stands in
    (`"backend=fsdp"`); None: the one that the text's own values lead to. Nothing is run and no environment is read:
    variables are those that the text assigns, `$HOME` is `~`, `"$@"` is left out. Raises `SettingError` for a text
    without a command, for several of which none is selected, and for a file that cannot be read.
    """
    if isinstance(source, Mapping):
        return Command(_resolved(flat(source)), {}, "a mapping")
    if not isinstance(source, str | Path):
        return _of_words([str(word) for word in source], Path(), "a list of words")
    path = Path(source).expanduser() if isinstance(source, Path) or _is_path(source) else None
    text, name = (_text_of(path), str(path)) if path else (str(source), "text")
    if path and path.suffix in (".yaml", ".yml"):
        return Command(_resolved(_of_yaml(path)), {}, name)
    commands = [one for one in _statements(text) if one.overrides is not None]
    named = [one for one in commands if any(map(_BEGINS.search, one.words))]
    if commands := named or commands:  # words alone are a command where nothing else is
        number = _chosen(commands, command, name)
        words = [one.overrides or [] for one in commands]
        read = _of_words(words[number], path.parent if path else Path(), name)
        others = tuple(_named(at, one) for at, one in enumerate(commands) if at != number)
        return read._replace(suffix=_suffix(words, number), others=others, undecided=commands[number].undecided)
    block, left = _block(text)
    if not block:
        what = f"no verl command in {name}"
        raise SettingError(what, expected="python3 -m verl.trainer.main_ppo key=value …, or a YAML of settings")
    return Command(_resolved(flat(block)), left, name)


def _chosen(commands: Sequence[_Statement], command: int | str | None, name: str) -> int:
    """Return the number of the command that is asked for, by number or branch; None: of the only one that the text runs."""
    numbers = [at for at, one in enumerate(commands) if command in (at, one.branch) or (command is None and one.taken)]
    if len(numbers) != 1:
        listed = "; ".join(_named(at, one) for at, one in enumerate(commands))
        do = f"choose one by number or branch: command=0 … {len(commands) - 1}"
        if command is None:
            raise SettingError(f"{len(commands)} commands in {name}", found=listed, do=do)
        raise SettingError(f"command={command!r} of {name}", expected=f"one of {listed}", found=len(numbers), do=do)
    return numbers[0]


def _named(number: int, command: _Statement) -> str:
    return f"command={number}" + (f" where {command.branch}" if command.branch else "")


def _suffix(several: Sequence[Sequence[str]], number: int) -> str:
    """Return the selected command's number as a suffix, if another command gives its run the same name; else ""."""
    return f"-{number}" if [_run_name(words) for words in several].count(_run_name(several[number])) > 1 else ""


def _run_name(words: Sequence[str]) -> str | None:
    """Return the value of the setting that names a command's run, such as `trainer.experiment_name`."""
    settings = dict(word.lstrip("+").partition("=")[::2] for word in words)
    return next((settings[name] for name in _NAMES if settings.get(name)), None)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise SettingError(f"{str(path)!r} cannot be read", found=first_line(cause)) from cause


def leaves(block: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of nested settings, which may have dotted names themselves; an empty mapping is a
    value."""
    for key, value in block.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def flat(block: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested settings: dotted name → value, converted to the type that its text has."""
    return {key: _typed(value) for key, value in leaves(block)}


def keys(pattern: str) -> list[str]:
    """Expand the braces of a pattern: `{a,b}.c` → `a.c`, `b.c`."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = [part.split(",") if number % 2 else [part] for number, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def parsed(text: str) -> Any:
    """Parse the value of a hydra override: a number, a boolean, null, a list, a mapping, quoted text, or the text."""
    text = text.strip()
    if text[:1] in ("[", "{"):
        import yaml

        spaced = re.sub(r"(?<=[\w'\"]):(?=[^\s/])", ": ", text) if text[0] == "{" else text
        try:
            content = yaml.safe_load(spaced)
        except yaml.YAMLError:
            return text
        return flat(content) if isinstance(content, Mapping) else _typed(content)
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        inner = text[1:-1]
        return parsed(inner) if inner[:1] == "[" else inner
    return _typed(text)


def _typed(value: Any) -> Any:
    """Convert a text to the number, boolean, None or list that it stands for, as YAML leaves `1e-6` a text and a shell
    every value."""
    if isinstance(value, list | tuple):
        return [_typed(one) for one in value]
    if not isinstance(value, str):
        return value
    low = value.strip().lower()
    if low in ("true", "false"):
        return low == "true"
    if low in ("null", "none", "~", ""):
        return None
    if re.fullmatch(r"[+-]?\d+", low):
        return int(low)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", low):
        return float(low)
    if value.strip()[0] == "[" and value.strip()[-1] == "]":
        return parsed(value)
    return value


def _is_path(text: str) -> bool:
    if "\n" in text or len(text) >= 4096:
        return False
    if Path(text).suffix in (".sh", ".yaml", ".yml") and "=" not in text:
        return True
    try:
        return Path(text).is_file()
    except OSError:  # longer than a file's name may be: a command
        return False


# --- words and files ------------------------------------------------------------------------------


def _overrides(words: Sequence[str]) -> list[str] | None:
    """Return the words after verl's entry point, or those of a bare list of overrides; None for another command."""
    for place, word in enumerate(words):
        if _BEGINS.search(word):
            rest = list(words[place + 1 :])
            redirect = next((number for number, one in enumerate(rest) if re.match(r"[12]?>", one)), len(rest))
            ahead = ["trainer.scheduler=one_step_off"] if "one_step_off_policy.main_ppo" in word else []
            return [*ahead, *rest[:redirect]]
    bare = [word for word in words if _WORD.match(word) and "." in word.partition("=")[0]]
    return list(words) if bare and len(bare) == len(words) else None


_OPTIONS = {"-cp": "--config-path", "-cn": "--config-name"}


def _of_words(words: Sequence[str], folder: Path, name: str) -> Command:
    overrides, options = _overrides(words), {"--config-path": "", "--config-name": ""}
    settings: dict[str, Any] = {}
    left: dict[str, str] = {}
    waiting = list(words if overrides is None else overrides)
    while waiting:
        word = waiting.pop(0)
        option, equals, value = word.partition("=")
        option = _OPTIONS.get(option, option)
        if option in options:
            options[option] = value if equals else waiting.pop(0) if waiting else ""
        elif word.startswith("~"):
            left[word] = "deletes a setting of verl's defaults, which are not read"
        elif _WORD.match(word):
            content = parsed(value)
            inner = {"": content} if not isinstance(content, Mapping) or not content else content
            settings |= {f"{option.lstrip('+')}.{key}".rstrip("."): one for key, one in inner.items()}
        elif word not in ("...", "…", "\\", ""):
            left[word] = "no setting: expected key=value"
    below: dict[str, Any] = {}
    if any(options.values()) and options["--config-name"] not in ("ppo_trainer", "ppo_trainer.yaml"):
        below = _configured(options, folder, left)
    return Command(_resolved({**below, **settings}), left, name)


def _configured(options: Mapping[str, str], folder: Path, left: dict[str, str]) -> dict[str, Any]:
    """Read the YAML file that hydra's options name; it is looked for beside the script and in the working folder."""
    name = (options["--config-name"] or "ppo_trainer").removesuffix(".yaml")
    places = [root / options["--config-path"] / f"{name}.yaml" for root in (folder, Path())]
    for place in places:
        if place.is_file():
            return _of_yaml(place)
    config = " ".join(f"{option}={value}" for option, value in options.items() if value)
    if name == "ppo_megatron_trainer":  # verl's own defaults with Megatron as the engine
        return {"actor_rollout_ref.actor.strategy": "megatron"}
    left[config] = f"no file {places[0]}: put it there, or give its settings"
    return {}


def _of_yaml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a YAML file's settings, over those of the files in its `defaults` that stand beside it; verl's own files are
    left out."""
    text = _text_of(path)
    block = _mapping(text)
    if block is None:
        what, expected = f"content of {str(path)!r}", "a YAML mapping of settings"
        raise SettingError(what, expected=expected, found=describe(text[:60]))
    below: dict[str, Any] = {}
    for entry in block.pop("defaults", None) or []:
        beside = path.parent / f"{entry}.yaml" if isinstance(entry, str) else path
        if beside.is_file() and beside not in (path, *seen):
            below |= _of_yaml(beside, (*seen, path))
    block.pop("hydra", None)
    return {**below, **flat(block)}


def _mapping(text: str) -> dict[str, Any] | None:
    import yaml

    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    return dict(content) if isinstance(content, Mapping) else None


def _block(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Read the settings of a YAML text, or only of its lines `dotted.name: value`: (settings, other line → why it is
    left out)."""
    if (whole := _mapping(text)) is not None:
        return whole, {}
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    dotted = [line for line in lines if re.match(r"\s*[A-Za-z_]\w*(\.\w+)+:\s", line)]
    found = _mapping("\n".join(line.strip() for line in dotted)) or {}
    return found, {
        line.strip(): "no setting: expected key: value" for line in lines if line not in dotted and "export" not in line
    }


def _resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in interpolations (`${data.x}`) from the settings; a setting whose interpolation names an unset key is left
    out. Settings with a section of the SFT trainer's get the key `sft_trainer`."""
    if not _SFT_SECTIONS.isdisjoint(key.partition(".")[0] for key in settings):
        settings = {**settings, "sft_trainer": True}
    known = {key: value for key, value in settings.items() if key.rpartition(".")[2] != "_target_"}
    found = {key: _expand(value, known) for key, value in known.items()}
    return {key: value for key, value in found.items() if value is not _UNSET}


def _expand(value: Any, settings: Mapping[str, Any], depth: int = 0) -> Any:
    if not isinstance(value, str):
        return value
    interpolation = re.fullmatch(r"\$\{([^${}]+)\}", value)
    if interpolation is None or depth > 8:
        return _UNSET if value.startswith(("${oc.", "${.")) else value
    kind, colon, rest = interpolation[1].partition(":")
    name, comma, default = (part.strip() for part in rest.partition(","))
    if kind == "oc.env":
        return _typed(default) if comma else value
    if colon and kind != "oc.select":
        return value
    key = name if colon else interpolation[1]
    return _expand(settings[key], settings, depth + 1) if key in settings else _typed(default) if comma else _UNSET


_UNSET = object()

# --- a shell's text -------------------------------------------------------------------------------


class _Statement(NamedTuple):
    """A statement of a shell text: its words, expanded, and the branch of `if` and `case` that it stands in."""

    words: list[str]
    branch: str
    """The conditions around it, `backend=fsdp`; "" where there are none."""
    taken: bool
    """False where the text's own values lead to another branch."""
    undecided: tuple[str, ...]
    """Branches before it that assign variables, and of which the text's own values do not say whether they are taken."""

    @property
    def overrides(self) -> list[str] | None:
        """The words after verl's entry point, or those of a bare list of overrides; None for another command."""
        return _overrides(self.words)


def _statements(text: str) -> Iterator[_Statement]:
    """Yield the statements of a shell text, with variables and arrays as the text assigns them before each.

    Of an `if`, `case`, `&&` or `||` that the text's own values decide, what they do not lead to changes no variable
    behind it. Where they do not decide, all is read in order, as all is of a text whose `if` and `fi` do not match.
    """
    raw = [*_raw_statements(text)]
    words = [word for statement, _ in raw for word in statement]
    opened, closed = (sum(map(words.count, names)) for names in (("if", "case"), ("fi", "esac")))
    flow = _Flow(opened == closed)
    for statement, ends in raw:
        if (read := flow.read(statement, ends)) is not None:
            yield read


def _raw_statements(text: str) -> Iterator[tuple[list[str], str]]:
    """Yield statements as raw words, with their quotes, and what ends each: a line's end, `;`, `;;`, `&`, `&&`, `|`, `||`.

    A backslash before a comment continues the line, as people write it. Bodies of here-documents are left out.
    """
    text = re.sub(r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*)\n(?:.*?\n)??[ \t]*\2(?=\n|$)", r"<< \2\3", text, flags=re.DOTALL)
    text = re.sub(r"\\[ \t]+#[^\n]*(?=\n|$)", r"\\", text.replace("\r\n", "\n"))
    text = re.sub(r"(?<=\s)\\\n(?:[ \t]*#[^\n]*\n)*|\\[ \t]+\n(?:[ \t]*#[^\n]*\n)*", " ", text)
    text = text.replace("\\\n", "")  # between two quoted pieces of one word
    words: list[str] = []
    word, place, array = "", 0, False
    while place < len(text):
        if (end := _unit_end(text, place)) > place:
            word, place = word + text[place:end], end
            continue
        char, place = text[place], place + 1
        if char == "#" and not word:
            place = len(text) if (end := text.find("\n", place)) < 0 else end
        elif char == "(" and word.endswith("="):
            words, word, array = [*words, f"{word}("], "", True
        elif char == ")" and array:
            words, word, array = [*words, *filter(None, [word]), ")"], "", False
        elif not char.isspace() and char not in ";|&":
            word += char
        else:
            words, word = [*words, *filter(None, [word])], ""
            if char not in " \t" and not array:
                double = char != "\n" and text.startswith(char, place)
                place += double
                yield words, char * (1 + double)
                words = []
    yield [*words, *filter(None, [word])], ""


def _unit_end(text: str, place: int) -> int:
    """Return the position after the quoted text, escaped character or expansion that begins at `place`; `place` where
    none begins."""
    if text[place] in "'\"":
        return _quoted(text, place)
    return place + 2 if text[place] == "\\" else _expansion(text, place)


def _expansion(text: str, place: int) -> int:
    """Return the position after the expansion (`$name`, `${…}`, `$(…)`) that begins at `place`; `place` where none
    begins."""
    if (start := _EXPANSION.match(text, place)) is None:
        return place
    return _closed(text, place + 1) if start[0][1] in "({" else start.end()


def _quoted(text: str, start: int) -> int:
    """Return the position after the quote that ends the quoted text beginning at `start`."""
    mark, place = text[start], start + 1
    while place < len(text) and text[place] != mark:
        if mark == '"' and text.startswith(("$(", "${"), place):
            place = _closed(text, place + 1)
        else:
            place += 2 if text[place] == "\\" and mark == '"' else 1
    return min(place + 1, len(text))


def _closed(text: str, start: int) -> int:
    """Return the position after the bracket that closes the one at `start`."""
    pairs, depth = {"(": ")", "{": "}"}, 0
    opening = text[start]
    for place in range(start, len(text)):
        depth += (text[place] == opening) - (text[place] == pairs[opening])
        if depth == 0:
            return place + 1
    return len(text)


_EXPANSION = re.compile(r"\$\(\(|\$\(|\$\{|\$[A-Za-z_]\w*|\$[@*#?!$0-9]")


@dataclass
class _Frame:
    """An `if` or `case` that is open, and which of its branches is being read. Truth is 1, 0, or ½ where the text does
    not say: *and* is the minimum, *or* the maximum."""

    subject: str | None
    """Of a `case` the word after it; None: an `if`."""
    condition: list[tuple[list[str], str]] = field(default_factory=list)
    """The statements of the condition, or the patterns, that are being read."""
    reading: bool = True
    """Whether they are."""
    now: float = 1
    """Whether the branch is taken."""
    left: float = 1
    """Whether no earlier branch was."""
    label: str = ""
    shell: _Shell | None = None
    """The variables of a branch that is not taken."""

    def ended(self) -> None:
        """End a branch; a condition, or patterns, of another one follow."""
        self.left = min(self.left, 1 - self.now)
        self.condition, self.reading, self.shell = [], True, None


class _Flow:
    """Reads the statements of a shell text in order; `branching`: follow its `if`s and `case`s."""

    def __init__(self, branching: bool) -> None:
        self._branching = branching
        self._frames: list[_Frame] = []
        self._text = _Shell()
        self._true, self._joined = 1.0, ""
        self._undecided: dict[str, None] = {}

    @property
    def _shell(self) -> _Shell:
        return next((frame.shell for frame in reversed(self._frames) if frame.shell), self._text)

    def read(self, words: list[str], ends: str) -> _Statement | None:
        """Return a statement, expanded; None for an assignment, a condition, and what `&&` or `||` leaves out."""
        while words and self._branching and (rest := self._past(words, ends)) is not None:
            words = rest
        skipped = self._true == {"&&": 0, "||": 1}.get(self._joined)
        self._joined = ends if words else ""
        read = None
        if words and not skipped:
            read = self._shell.read(words)
            self._true = 1 if read is None else self._tested(words)
        if ends == ";;" and self._frames:
            self._frames[-1].ended()
        branch = " and ".join(frame.label for frame in self._frames if frame.label)
        taken = min((frame.now for frame in self._frames), default=1)
        if read is None and words and 0 < taken < 1:
            self._undecided[branch] = None
        return None if read is None else _Statement(read, branch, taken > 0, tuple(self._undecided))

    def _past(self, words: list[str], ends: str) -> list[str] | None:
        """Follow the keyword that a statement begins with, and return the words after it; None where it has none."""
        frame, word = self._frames[-1] if self._frames else _Frame(None, reading=False), words[0]
        if word in ("fi", "esac") and self._frames:
            self._frames.pop()
        elif frame.reading and frame.subject is not None:
            return self._pattern(frame, words, ends)
        elif frame.reading and word == "then":
            plain = " ".join(part for one, joined in frame.condition for part in (*one, joined))
            label = re.sub(r"\s*(!?=)=?\s*", r"\1", re.sub(r"[\[\]\"'${};]|:-[^}]*(?=})", "", plain))
            self._enter(frame, self._condition(), " ".join(label.split()))
        elif frame.reading:
            frame.condition.append((words, ends))
            return []
        elif word == "if":
            self._frames.append(_Frame(None))
        elif word == "case" and "in" in words:
            self._frames.append(_Frame(words[1]))
            return words[words.index("in") + 1 :]
        elif word in ("elif", "else") and self._frames:
            frame.ended()
            if word == "else":
                self._enter(frame, 1, f"not {frame.label}")
        else:
            return None
        return words[1:]

    def _pattern(self, frame: _Frame, words: list[str], ends: str) -> list[str]:
        """Read patterns of a `case`, up to the one that ends with a bracket."""
        end = next((at for at, word in enumerate(words, 1) if word.endswith(")")), None)
        frame.condition.append((words[:end], ends))
        if end is None:
            return []
        patterns = [word.strip("()\"'") for one, _ in frame.condition for word in one]
        name, value = re.sub(r"[\"'${}]|:-.*", "", str(frame.subject)), self._shell.value_of(str(frame.subject))
        fits = 0.5 if "$" in value else any(fnmatch.fnmatchcase(value, one) for one in patterns)
        self._enter(frame, fits, f"{name}={'|'.join(patterns)}")
        return words[end:]

    def _enter(self, frame: _Frame, fits: float, label: str) -> None:
        frame.now, frame.label, frame.reading = min(frame.left, fits), label, False
        frame.shell = None if frame.now else copy.deepcopy(self._shell)

    def _condition(self) -> float:
        """Decide the condition of the innermost `if`."""
        items: list[Any] = []
        for words, ends in self._frames[-1].condition:
            inner = [word for word in words if word not in ("{", "}", "!")]
            first = words.index(inner[0]) if inner else len(words)
            items += [*words[:first], *([self._tested(inner)] if inner else []), *words[first + len(inner) :], ends]
        return _value(items)

    def _tested(self, words: Sequence[str]) -> float:
        """Decide a test such as `[ "$A" = b ]`; ½ for another command, and where the text's own values do not say."""
        if words[0] not in ("[", "[[", "test"):
            return {"true": 1.0, "false": 0.0}.get(words[0], 0.5)
        parts = [self._shell.value_of(word) for word in words[1:] if word not in ("]", "]]")]
        if parts[:1] == ["!"]:
            return 1 - self._tested([words[0], *words[2:]])
        if any("$" in part for part in parts):
            return 0.5
        if len(parts) == 2:
            return {"-z": not parts[1], "-n": bool(parts[1])}.get(parts[0], 0.5)
        left, sign, right = parts if len(parts) == 3 else ("", "", "")
        if sign in ("=", "==", "!="):
            return fnmatch.fnmatchcase(left, right) == (sign != "!=")
        whole = re.fullmatch(r"-?\d+ -(eq|ne|gt|lt|ge|le) -?\d+", " ".join(parts))
        return getattr(operator, whole[1])(int(left), int(right)) if whole else 0.5


def _value(items: list[Any]) -> float:
    """Decide tests joined by `&&` and `||`, from left to right, up to the end of the group."""
    total, joined, opposite = 1.0, "&&", False
    while items and (item := items.pop(0)) != "}":
        if isinstance(item, str) and item != "{":
            joined, opposite = (item if item in ("&&", "||") else joined), item == "!"
            continue
        value = _value(items) if item == "{" else item
        value = 1 - value if opposite else value
        total, opposite = (min if joined == "&&" else max)(total, value), False
    return total


_SKIPPED = ("export", "local", "readonly", "set", "-x", "then", "do", "else", "if", "{", "}")


class _Shell:
    """The variables and arrays that a shell text has assigned so far."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {"HOME": "~", "PWD": "."}
        self._arrays: dict[str, list[str]] = {}

    def read(self, raw: Sequence[str]) -> list[str] | None:
        """Return a statement's words, expanded; None for an assignment, whose value is kept."""
        raw = [word for word in raw if word not in _SKIPPED]
        if not raw:
            return None
        if (array := re.fullmatch(r"([A-Za-z_]\w*)(\+?)=\(", raw[0])) is not None:
            inner = [piece for word in raw[1 : raw.index(")") if ")" in raw else None] for piece in self._word(word)]
            self._arrays[array[1]] = [*(self._arrays.get(array[1], []) if array[2] else []), *inner]
            return None
        while raw and (assignment := re.match(r"([A-Za-z_]\w*)=(.*)", raw[0], re.DOTALL)) is not None:
            self._names[assignment[1]] = self.value_of(assignment[2])
            raw = raw[1:]
        return [piece for word in raw for piece in self._word(word)] if raw else None

    def value_of(self, raw: str) -> str:
        """Expand a raw word to one text."""
        return " ".join(self._word(raw))

    def _word(self, raw: str) -> list[str]:
        """Expand a raw word: its quotes are removed, and it is split where an unquoted variable has spaces."""
        pieces, place = [""], 0
        while place < len(raw):
            char, end = raw[place], _unit_end(raw, place)
            if char == '"':
                pieces = self._spread(pieces, raw[place + 1 : end - 1], quoted=True)
            elif char == "'":
                pieces[-1] += raw[place + 1 : end - 1]
            elif char == "\\":
                pieces[-1] += raw[place + 1 : end]
            elif end > place:
                pieces = self._spread(pieces, raw[place:end], quoted=False)
            else:
                pieces[-1] += char
            place = max(end, place + 1)
        return pieces if "'" in raw or '"' in raw else [piece for piece in pieces if piece]

    def _spread(self, pieces: list[str], text: str, *, quoted: bool) -> list[str]:
        array = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", text)
        if array or re.fullmatch(r"\$[@*]|\$\{@(:\d+)?\}", text):
            words = self._arrays.get(array[1], []) if array else []
        else:
            expanded = self._expanded(text)
            words = [expanded] if quoted or expanded == text else expanded.split() or [""]
        return [*pieces[:-1], pieces[-1] + words[0], *words[1:]] if words else pieces

    def _expanded(self, text: str) -> str:
        expanded, place = "", 0
        while place < len(text):
            if text[place] == "\\" and place + 1 < len(text) and text[place + 1] in '"$\\`':
                expanded, place = expanded + text[place + 1], place + 2
            elif (end := _expansion(text, place)) > place:
                expanded, place = expanded + self._value(text[place:end]), end
            else:
                expanded, place = expanded + text[place], place + 1
        return expanded

    def _value(self, text: str) -> str:
        """Return the value of an expansion; an unknown one stays as it is written."""
        if text.startswith("$(("):
            return self._arithmetic(text[3:-2])
        if text.startswith("$("):
            choice = re.search(r"\|\|\s*echo\s+([\w.-]+)\s*\)$", text)  # of a probe: what a machine without it gives
            return choice[1] if choice else "." if text[2:-1].strip() == "pwd" else re.sub(r"\s+", "_", text)
        body = text[2:-1] if text.startswith("${") else text[1:]
        expansion = re.fullmatch(r"(\w+)(:?[-=?+])?(.*)", body, re.DOTALL)
        if expansion is None:
            return text  # OmegaConf's own, `${data.x}`, or a form that is not read
        if expansion[2] in ("+", ":+"):
            return self.value_of(expansion[3]) if self._names.get(expansion[1]) else ""
        if expansion[1] in self._names:
            return self._names[expansion[1]] or (" ".join(self._word(expansion[3])) if expansion[2] else "")
        return " ".join(self._word(expansion[3])) if expansion[2] in (":-", "-", ":=", "=") else text

    def _arithmetic(self, text: str) -> str:
        known = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda match: self._names.get(match[1], match[0]), text)

        def number(node: ast.AST) -> int:
            if isinstance(node, ast.Constant) and isinstance(node.value, int):
                return node.value
            if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
                return int(_OPERATORS[type(node.op)](number(node.left), number(node.right)))
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
                return -number(node.operand)
            raise SettingError(f"arithmetic $(({text}))", expected="whole numbers, + - * / %", found=known)

        try:
            return str(number(ast.parse(known.strip(), mode="eval").body))
        except (SyntaxError, ZeroDivisionError, SettingError):
            return "$((" + re.sub(r"\s+", "", text) + "))"
