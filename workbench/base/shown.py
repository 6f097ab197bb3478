"""How an object is displayed without importing `views`: a table of functions by class that `views` fills in.

Packages below `views` do not import it. Their classes inherit `Shown`; the table has the function that makes the document of a
class and its subclasses, from which text and HTML are rendered, and the one that makes its widget. The modules in the table
are imported when an object is displayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

_FACES: dict[str, Mapping[str, str]] = {}
_DOORS: dict[str, str] = {}


def register(faces: Mapping[str, Mapping[str, str]], **doors: str) -> None:
    """Add rows: `"module:Class"` to a mapping of what (`document`, `widget`, any other name) to `"module:function"`.

    `doors` are functions by the same kind of name: `text` and `html` render a document, `display` puts a widget over the
    static form (it gets the object and what makes the widget).
    """
    _FACES.update(faces)
    _DOORS.update(doors)


def shows(thing: Any, what: str, *args: Any, **options: Any) -> Any:
    """Call the function that the table names for an object; `RuntimeError` where the table has none."""
    name = _named(thing, what)
    if name is None:
        raise RuntimeError(f"nothing shows {what} of a {type(thing).__name__}; import workbench as a whole")
    return resolve_name(name)(thing, *args, **options)


def _named(thing: Any, what: str) -> str | None:
    """The table's function for an object's class, or for the nearest of its bases that has one; None where none has."""
    rows = (_FACES.get(f"{kind.__module__}:{kind.__qualname__}", {}) for kind in type(thing).__mro__)
    return next((row[what] for row in rows if what in row), None)


def _rendered(thing: Any, form: str) -> str | None:
    known = _named(thing, "document") is not None
    return str(resolve_name(_DOORS[form])(shows(thing, "document"))) if known else None


class Shown:
    """Base of objects that are displayed by the table: text as `repr`, HTML in a notebook, and a widget where there is one.

    A class that is not in the table has a plain repr of its name.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        text = _rendered(self, "text")
        return f"<{type(self).__name__}>" if text is None else text

    def _repr_html_(self) -> str | None:
        return _rendered(self, "html")

    def _ipython_display_(self) -> None:
        if _named(self, "widget") is None:
            raise NotImplementedError  # IPython goes on with the HTML and the text
        resolve_name(_DOORS["display"])(self, lambda: shows(self, "widget"))
