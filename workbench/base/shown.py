"""How an object is displayed without importing `views`: a table of functions by class that `views` fills in.

Packages below `views` do not import it. Their classes inherit `Shown`; the table has the function that makes the document of a
class and its subclasses, from which text and HTML are rendered, and the one that makes its widget. The modules in the table
are imported when an object is displayed.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from workbench.base.errors import PackageMissing, first_line

log = logging.getLogger("workbench")

TEXT_LIMIT = 20_000
"""Characters of one foreign text that are shown; a note says how many were left out."""
_FACES: dict[str, Mapping[str, str]] = {}
_DOORS: dict[str, str] = {}


def register(faces: Mapping[str, Mapping[str, str]], **doors: str) -> None:
    """Register how classes are displayed: `"module:Class"` → {`document`, `widget` or another name: `"module:function"`}.

    `doors` are `"module:function"` names, too: of `text` and `html`, which render a document, and `display`, which shows a
    widget in a notebook (it gets the object and a function that makes its widget).
    """
    _FACES.update(faces)
    _DOORS.update(doors)


def shows(thing: Any, what: str, *args: Any, **options: Any) -> Any:
    """Call, with an object, the function registered as `what` for its class. Raises `RuntimeError` where there is none."""
    name = _named(thing, what)
    if name is None:
        kind = type(thing).__name__
        raise RuntimeError(f"no function is registered for {what!r} of a {kind}; `import workbench` registers all")
    return resolve_name(name)(thing, *args, **options)


def _named(thing: Any, what: str) -> str | None:
    """The table's function for an object's class, or for the nearest of its bases that has one; None where none has."""
    rows = (_FACES.get(f"{kind.__module__}:{kind.__qualname__}", {}) for kind in type(thing).__mro__)
    return next((row[what] for row in rows if what in row), None)


def _rendered(thing: Any, form: str) -> str | None:
    known = _named(thing, "document") is not None
    return str(resolve_name(_DOORS[form])(shows(thing, "document"))) if known else None


class Shown:
    """Base of classes displayed as `register` sets it: text as `repr`, HTML in a notebook, a widget where there is one.

    A class that is not registered has a plain repr of its name.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        text = _rendered(self, "text")
        return f"<{type(self).__name__}>" if text is None else text

    def _repr_html_(self) -> str | None:
        return _rendered(self, "html")

    def _ipython_display_(self) -> None:
        if _named(self, "widget") is None:
            raise NotImplementedError("this object has no widget")  # IPython goes on with the HTML and the text
        try:
            resolve_name(_DOORS["display"])(self, lambda: shows(self, "widget"))
        except Exception as error:
            if not os.environ.get("WORKBENCH_JOB"):  # whose notebook has no widgets
                colab = "google.colab" in sys.modules and not isinstance(error, PackageMissing)
                do = "; from google.colab import output; output.enable_custom_widget_manager()" if colab else ""
                log.warning("the widget cannot be shown, its static form is: %s%s", first_line(error), do)
            raise NotImplementedError("the widget cannot be shown") from error


def plain(text: str) -> str:
    """Text that is safe to show: control characters and direction overrides are made visible, line ends and tabs are kept.

    A text of more than `TEXT_LIMIT` characters is cut, and a note says how many are left out.
    """
    if len(text) > TEXT_LIMIT:
        text = f"{text[:TEXT_LIMIT]}… ({len(text) - TEXT_LIMIT:,} more characters)"
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]",
        lambda found: f"\\x{ord(found[0]):02x}",
        text,
    )


def encodable(text: str) -> str:
    """A text that UTF-8 can hold: each unpaired surrogate becomes `�`."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
