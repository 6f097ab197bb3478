"""A text that a model wrote, drawn as what it is: Markdown, LaTeX, code with colours.

The libraries only parse: what they find becomes parts of a `document`, with tags and attributes from the lists below, so that
no markup, address or style of the text gets into a page, and a page asks the network for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import unescape
from typing import TYPE_CHECKING, Any

from workbench.base.distribution import optional
from workbench.base.errors import PackageMissing, first_line
from workbench.base.shown import TEXT_LIMIT
from workbench.views import document as doc

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from markdown_it.tree import SyntaxTreeNode

LONGEST_FORMULA = 2_000
"""Longest formula that is drawn, in characters; a longer one, and a text of more than `TEXT_LIMIT` characters, is shown
as written."""
DEEPEST = 60
"""Most levels of nested parts in a formula."""

_FORMULAS = re.compile(
    r"(?P<code>(?:^|(?<=\n))[ ]{0,3}(?P<fence>`{3,}|~{3,})[^\n]*(?:\n|\Z).*?(?:(?<=\n)[ ]{0,3}(?P=fence)[`~]*[ ]*(?=\n|\Z)|\Z)"
    r"|(?<!`)(?P<tick>`+)(?!`).{1,1000}?(?<!`)(?P=tick)(?!`))"
    r"|\$\$(?P<dollars>.{1,2000}?)\$\$|\\\[(?P<square>.{1,2000}?)\\\]|\\\((?P<round>.{1,1000}?)\\\)"
    r"|(?P<lines>\\begin\{(?P<name>align|aligned|equation|gather|multline|eqnarray)(?P<star>\*?)\}.{1,2000}?\\end\{(?P=name)(?P=star)\})"
    r"|(?<![\\$\w])\$(?![\s$])(?P<dollar>[^$\n]{1,500}?)(?<![\s\\])\$(?![\d$])"
    r"|(?P<box>\\boxed\{(?:[^{}]|\{[^{}]{0,200}\}){0,200}\})",
    re.DOTALL,
)
"""Formulas between the signs that models write, and the code in which such signs are none."""
_HELD = re.compile("\ue000(\\d+)\ue001")
"""What stands for a formula while the rest is read as Markdown, in which a line of it could be a list or a heading."""
_AS_TABLE = {"gather": "matrix", "multline": "matrix", "equation": "matrix"}


def rendered(text: str, formulas: bool = True) -> doc.Part:
    """Draw a text as Markdown, LaTeX and code on a page. A terminal, and a page where it cannot be drawn, show it as it
    was written.

    `formulas=False` keeps formulas as LaTeX, for pages whose sanitiser removes MathML and would leave `12` of one half.
    """
    if len(text) > TEXT_LIMIT:
        note = f"of {len(text):,} characters: too long to be drawn, as it was written"
        return doc.Either(text, (doc.small(doc.faint(note)), doc.wrapped(text)))
    try:
        page = _Page(text, formulas)
        parts: doc.Part = page.parts()
    except Exception as error:  # noqa: BLE001 - the libraries' own: a text is shown all the same
        note = f"cannot be drawn ({first_line(error)}), as it was written"
        return doc.Either(text, (doc.small(doc.faint(note)), doc.wrapped(text)))
    notes = [f"{doc.counted(page.failed, 'formula')} cannot be drawn, as written"] if page.failed else []
    notes += [str(page.lacking)] if page.lacking else []
    return doc.Either(text, doc.line(doc.small(doc.faint("; ".join(notes))) if notes else (), parts, style=_TEXT))


_TEXT = "overflow-wrap:anywhere;overflow:auto;line-height:1.45"
_MONO = "font-family:monospace;font-size:95%"
_EDGE = "border-left:3px solid rgba(128,128,128,0.5);padding-left:8px;margin:4px 0;opacity:0.85"
_BOX = "background:rgba(128,128,128,0.10);padding:4px 8px;margin:4px 0;border-radius:4px;white-space:pre-wrap"
_HEADING = ("150%", "130%", "115%", "105%", "100%", "100%")
_INLINE: Mapping[str, tuple[str, str]] = {"strong": ("b", ""), "em": ("i", ""), "s": ("s", "")}


class _Page:
    """Turns one text into parts of a document: finds its formulas, parses its Markdown, and converts the parsed nodes."""

    def __init__(self, text: str, formulas: bool) -> None:
        self.drawn, self.failed = formulas, 0
        self.lacking: PackageMissing | None = None
        self._held: list[tuple[str, str, bool]] = []
        """(as written, LaTeX, on a line of its own) of each formula."""
        self._text = _FORMULAS.sub(self._hold, re.sub("[\ue000\ue001]", "\ufffd", text))

    def parts(self) -> doc.Part:
        """Return the parts of the whole text."""
        with optional("prose", "text with Markdown and formulas"):
            from markdown_it import MarkdownIt
            from markdown_it.tree import SyntaxTreeNode

        parser = MarkdownIt("commonmark", {"html": False, "maxNesting": 20}).enable(["table", "strikethrough"])
        return [self._block(node) for node in SyntaxTreeNode(parser.parse(self._text)).children]

    def _hold(self, match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        if match["lines"]:
            name = _AS_TABLE.get(match["name"], "align*")
            begin = len(rf"\begin{{{match['name']}{match['star']}}}")
            end = len(rf"\end{{{match['name']}{match['star']}}}")
            latex, block = rf"\begin{{{name}}}{match[0][begin:-end]}\end{{{name}}}", True
        else:
            latex = next(filter(None, (match[name] for name in ("dollars", "square", "round", "dollar", "box"))), "")
            block = bool(match["dollars"] or match["square"])
        self._held.append((match[0], latex.strip(), block))
        return f"\ue000{len(self._held) - 1}\ue001"

    def _written(self, text: str) -> str:
        """Put the formulas back into a text as they were written."""
        return _HELD.sub(lambda found: self._held[int(found[1])][0], text)

    # --- blocks and what stands in a line ---------------------------------------------------------

    def _block(self, node: SyntaxTreeNode) -> doc.Part:
        match node.type:
            case "paragraph":
                hidden = node.hidden  # of a list without blank lines
                return doc.line(self._line(node.children), style="" if hidden else "margin:4px 0")
            case "heading":
                level = int(node.tag[1])
                mark = doc.faint("#" * level + " ") if level > 3 else ()  # before an answer, as GSM8K has it
                style = f"font-weight:600;font-size:{_HEADING[level - 1]};margin:8px 0 4px"
                return doc.line(mark, self._line(node.children), style=style)
            case "fence" | "code_block":
                language = self._written(node.info).split(maxsplit=1) if node.type == "fence" else []
                return doc.line(
                    self._code(self._written(node.content), language[0] if language else ""), style=f"{_MONO};{_BOX}"
                )
            case "bullet_list" | "ordered_list":
                first = int(node.attrs.get("start", 1))
                marks = [
                    f"{first + place}." if node.type == "ordered_list" else "•" for place in range(len(node.children))
                ]
                return [self._item(mark, one) for mark, one in zip(marks, node.children, strict=True)]
            case "blockquote":
                return doc.line([self._block(one) for one in node.children], style=_EDGE)
            case "hr":
                return doc.RULE
            case "table":
                return self._table(node)
        return self._line([node])

    def _item(self, mark: str, item: SyntaxTreeNode) -> doc.Part:
        inside = doc.line([self._block(one) for one in item.children], style="min-width:0")
        return doc.line(doc.Span(mark), inside, style="display:flex;gap:6px;margin:2px 0 2px 10px")

    def _table(self, table: SyntaxTreeNode) -> doc.Part:
        head, *body = [
            [self._line(cell.children) for cell in row.children] for part in table.children for row in part.children
        ]
        cell = "border:1px solid rgba(128,128,128,0.35);padding:2px 8px;text-align:left;vertical-align:top"
        rows = [
            [doc.Span(one, cell, "th") for one in head],
            *([doc.Span(one, cell, "td") for one in row] for row in body),
        ]
        return doc.Span([doc.Span(row, tag="tr") for row in rows], "border-collapse:collapse;margin:4px 0", "table")

    def _line(self, nodes: list[SyntaxTreeNode]) -> doc.Part:
        parts = [self._inline(node) for node in nodes]
        block = [False, *(self._is_block(node) for node in nodes), False]
        # a formula on lines of its own needs no line ends
        return [
            part
            for place, part in enumerate(parts, 1)
            if part is not doc.BREAK or not (block[place - 1] or block[place + 1])
        ]

    def _is_block(self, node: SyntaxTreeNode) -> bool:
        found = _HELD.fullmatch(node.content.strip()) if node.type == "text" else None
        return found is not None and self._held[int(found[1])][2]

    def _inline(self, node: SyntaxTreeNode) -> doc.Part:
        match node.type:
            case "inline":
                return self._line(node.children)
            case "text" | "text_special":
                return self._formulas(node.content)
            case "softbreak" | "hardbreak":  # a model that ends a line means it
                return doc.BREAK
            case "code_inline":
                return doc.Span(
                    self._written(node.content), f"{_MONO};background:rgba(128,128,128,0.14);padding:0 3px", "code"
                )
            case "link":  # an address is something to read
                parts, address = self._line(node.children), self._written(str(node.attrs.get("href", "")))
                known = "".join(one.content for one in node.children) == address
                return doc.Span(parts, "text-decoration:underline dotted"), () if known else doc.faint(f" ({address})")
            case "image":
                address = self._written(str(node.attrs.get("src", "")))
                return doc.faint(f"[picture: {self._written(node.content)}, {address}]")
        tag, style = _INLINE.get(node.type, ("span", ""))
        parts = self._line(node.children) if node.children else self._formulas(getattr(node, "content", ""))
        return doc.Span(parts, style, tag)

    def _code(self, code: str, language: str) -> doc.Part:
        try:
            return coloured(code, language)
        except PackageMissing as error:
            self.lacking = error
            return code

    # --- formulas ---------------------------------------------------------------------------------

    def _formulas(self, text: str) -> doc.Part:
        pieces = _HELD.split(text)
        return [self._formula(*self._held[int(one)]) if place % 2 else one for place, one in enumerate(pieces)]

    def _formula(self, written: str, latex: str, block: bool) -> doc.Part:
        style = "text-align:center;margin:6px 0" if block else ""
        source = doc.Span(written, f"{_MONO};white-space:pre-wrap", "code")
        if not self.drawn:
            return doc.line(source, style=style) if block else source
        try:
            return doc.Span(formula(latex, block), style, "div" if block else "span", title=written)
        except Exception as error:  # noqa: BLE001 - whatever the library makes of what a model wrote
            self.failed += 1
            self.lacking = error if isinstance(error, PackageMissing) else self.lacking
            reason = f"cannot be drawn: {first_line(error, 100) or type(error).__name__}"
            return doc.Span(source, "border-bottom:2px dotted rgba(190,70,50,0.9)", title=reason)


TAGS = {
    "math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "mfrac", "msqrt", "mroot", "msub", "msup", "msubsup",
    "mover", "munder", "munderover", "mtable", "mtr", "mtd", "mstyle", "mpadded", "mphantom",
}  # fmt: skip
"""MathML elements that a page may have; of any other element only the content is kept."""
_VALUES = {
    **dict.fromkeys(("stretchy", "fence", "separator", "accent", "accentunder", "displaystyle"), r"true|false"),
    **dict.fromkeys(("width", "minsize", "maxsize", "lspace", "rspace"), r"\d(\.\d{1,3})?(em)?"),
    "linethickness": r"0", "form": r"prefix|infix|postfix", "scriptlevel": r"[0-3]",
}  # fmt: skip
"""Attributes of MathML that a page gets, and their values: none that names an address, a style, or a place beside the line."""
_LOOKS = {
    "columnalign=left": "text-align:left",
    "columnalign=right": "text-align:right",
    "notation=box": "border:1px solid;padding:2px 4px",
}


def formula(latex: str, block: bool = False) -> doc.Span:
    """Convert LaTeX to MathML, which browsers draw. Raises whatever the parser raises, and `ValueError` for a formula
    that is too large.
    """
    with optional("prose", "formulas"):
        from latex2mathml.converter import convert_to_element

    if len(latex) > LONGEST_FORMULA:
        raise ValueError(f"a formula of {len(latex):,} characters, more than {LONGEST_FORMULA:,}")
    # the library knows one table of equations, whose other name numbers them
    latex = re.sub(r"\\(begin|end)\{(?:aligned|align|alignedat)\}", r"\\\1{align*}", latex)
    latex = re.sub(r"\\(begin|end)\{(?:gathered|gather)\*?\}", r"\\\1{matrix}", latex)
    made = convert_to_element(latex, display="block" if block else "inline")
    return doc.Span([_mathml(one) for one in made], tag="math", attributes=(("display", "block"),) if block else ())


def _mathml(element: Element, depth: int = 0) -> doc.Part:
    if depth > DEEPEST:
        raise ValueError(f"a formula nested more than {DEEPEST} parts deep")
    attributes = tuple(
        (name, value) for name, value in element.attrib.items() if re.fullmatch(_VALUES.get(name, "(?!)"), value)
    )
    looks = ";".join(filter(None, (_LOOKS.get(f"{name}={value}") for name, value in element.attrib.items())))
    text = element.text or ""
    sign = unescape(text) if re.fullmatch(r"(&#x[0-9A-F]{5};)+", text) else text  # the library's names of signs
    tag = element.tag if element.tag in TAGS else "mrow"
    return doc.Span([sign, *(_mathml(one, depth + 1) for one in element)], looks, tag, attributes=attributes)


# --- code -----------------------------------------------------------------------------------------

LANGUAGES = (
    "bash", "c", "cpp", "csharp", "css", "diff", "go", "haskell", "html", "java", "javascript", "json", "julia",
    "kotlin", "latex", "lean4", "lua", "matlab", "perl", "php", "python", "r", "ruby", "rust", "scala", "sql",
    "swift", "toml", "typescript", "xml", "yaml",
)  # fmt: skip
"""Languages whose code is coloured."""
_SHORT = {"py": "python", "python3": "python", "js": "javascript", "ts": "typescript", "sh": "bash", "shell": "bash", "c++": "cpp",
          "tex": "latex", "lean": "lean4", "cs": "csharp", "rs": "rust", "yml": "yaml"}  # fmt: skip
_COLOURS = (
    ("Comment", "wb-k-comment", "font-style:italic"),
    ("Literal.String", "wb-k-string", ""),
    ("Literal.Number", "wb-k-number", ""),
    ("Keyword", "wb-k-keyword", "font-weight:600"),
    ("Operator.Word", "wb-k-keyword", "font-weight:600"),
    ("Name.Function", "wb-k-name", ""),
    ("Name.Class", "wb-k-name", ""),
    ("Name.Builtin", "wb-k-name", ""),
)
"""(kind of token, class whose colour the page's theme knows, looks without one)."""


def coloured(code: str, language: str = "") -> doc.Part:
    """Split code into spans of keywords, strings, numbers, comments and names; code in a language not in `LANGUAGES`
    stays one text.
    """
    name = _SHORT.get(language.lower(), language.lower())
    if name not in LANGUAGES:
        return code
    with optional("prose", "coloured code"):
        from pygments.lexers import get_lexer_by_name

    lexer: Any = get_lexer_by_name(name, stripnl=False, ensurenl=False)
    return [_token(str(kind)[6:], piece) for kind, piece in lexer.get_tokens(code)]


def _token(kind: str, text: str) -> doc.Part:
    for start, name, style in _COLOURS:
        if kind.startswith(start) and text.strip():
            return doc.Span(text, style, attributes=(("class", name),))
    return text
