"""`workbench view`: the pages over runs, served to a browser on this machine; the widgets talk to it in place of a kernel."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape as quoted
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from workbench.base.errors import WorkbenchError, first_line
from workbench.base.loopback import LOCAL, STILL, HttpRequest, Text, is_named, serving
from workbench.jobs.pages import Page, Pages, contents, files, rendered

ALIVE = 48
"""Widgets that are kept, each with its batch: those of the pages that were opened last."""
HEADERS = {
    **STILL,
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
}


class Viewer:
    """Answers a browser's requests: pages, the widgets' scripts and messages, and what has changed in a running run."""

    def __init__(self, pages: Pages, token: str, names: tuple[str, ...] = LOCAL) -> None:
        self.pages, self.token, self._names = pages, token, names
        self._widgets: OrderedDict[str, Any] = OrderedDict()
        self._kinds: dict[str, Any] = {}
        self._one = threading.Lock()
        self._cookie = f"workbench-{secrets.token_hex(4)}"  # cookies are shared by all servers of a host

    def guard(self, request: HttpRequest) -> str:
        """Return why a request is refused, or "": a host name that is not this machine's, another page's script, or a
        missing token.
        """
        host = request.headers.get("Host") or ""
        if not is_named(host, self._names):
            return f"not served under the name {host[:80]!r}: open the address that workbench view printed"
        if request.headers.get("Origin", f"http://{host}") != f"http://{host}":
            return f"not for pages of {request.headers['Origin'][:80]!r}"
        tokens = [*parse_qs(urlsplit(request.path).query).get("token", ()), self._kept(request)]
        if not any(hmac.compare_digest(one.encode(), self.token.encode()) for one in tokens):
            return "the token is missing or wrong: open the whole address that workbench view printed"
        return ""

    def _kept(self, request: HttpRequest) -> str:
        try:
            cookie = SimpleCookie(request.headers.get("Cookie") or "").get(self._cookie)
        except CookieError:
            return ""
        return cookie.value if cookie is not None else ""

    def __call__(self, request: HttpRequest) -> tuple[int, Any]:
        """Answer one HTTP request: returns (status, body)."""
        address = urlsplit(request.path)
        path, query = unquote(address.path).lstrip("/"), parse_qs(address.query)
        with self._one:
            try:
                if "token" in query and request.method == "GET":  # out of the address, the history and the next Referer
                    kept = f"{self._cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
                    here = "/" + quote(path.lstrip("/\\"))  # browsers read `/\evil.com/` as the address of another host
                    return 302, Text("", "text/plain", {"Location": here, "Set-Cookie": kept, **HEADERS})
                if request.method == "POST":
                    return 200, self._ask(path.removeprefix("-/ask/"), json.loads(request.body))
                if path.startswith("-/"):
                    return 200, self._own(path[2:], query)
                return 200, self._page(path + "index.html" if path.endswith("/") or not path else path, query)
            except (json.JSONDecodeError, RecursionError) as error:
                return 400, _sorry(request, first_line(error, 300))
            except LookupError as error:
                return 404, _sorry(request, first_line(error, 300))
            except (WorkbenchError, ValueError, OSError) as error:
                return 500, _sorry(request, first_line(error, 1000))

    # --- pages ----------------------------------------------------------------------------------

    def _page(self, path: str, query: dict[str, list[str]]) -> Text:
        page = self.pages.page(path, query)
        up = "../" * path.count("/")
        head = f'<script type="module" src="{up}-/viewer.js"></script>'
        body = rendered(page, lambda widget: self._embedded(widget, up), head)
        if page.live is not None and (stamp := page.live()):
            said = f'<p id="said" role="status" data-page="{quoted(_address(path, query))}" data-stamp="{quoted(stamp)}"></p>'
            body = body.replace("<main>", f"{said}<main>", 1)
        return Text(body, "text/html; charset=utf-8", HEADERS)

    def _embedded(self, widget: Any, up: str) -> str:
        """Render the HTML element in which a widget's script starts, with the widget's first state as JSON. `up` is the
        relative path from the page to the site's root."""
        number = secrets.token_hex(8)
        self._widgets[number] = widget
        while len(self._widgets) > ALIVE:
            self._widgets.popitem(last=False)[1].close()
        state = {name: value for name, value in widget.get_state().items() if not name.startswith("_")}
        kind, held = type(widget).__name__, quoted(json.dumps(state, default=str))
        self._kinds[kind] = type(widget)
        style = f'<link rel="stylesheet" href="{up}-/style/{kind}.css">'
        return f'{style}<div data-widget="{number}" data-kind="{kind}" data-state="{held}"></div>'

    def _ask(self, number: str, message: Any) -> dict[str, Any]:
        """Pass a script's message to its widget and return the answer, or set the trait that the script has changed.
        Raises `LookupError` for a widget that is no longer kept.
        """
        if number not in self._widgets:
            raise LookupError("this page was closed too long ago: reload it")
        self._widgets.move_to_end(number)
        widget = self._widgets[number]
        if "content" in message:
            return widget.reply(message["content"])
        widget.set_state({name: value for name, value in message["values"].items() if not name.startswith("_")})
        return {}

    def _own(self, path: str, query: dict[str, list[str]]) -> Any:
        """Answer a request under `/-/`: scripts, styles, and what has changed since a page was made."""
        folder, _, name = path.partition("/")
        if path == "viewer.js":
            return Text(files("common.js", "viewer.js"), "text/javascript; charset=utf-8", HEADERS)
        if folder == "fresh":
            return self._fresh(query["page"][0], query["stamp"][0])
        kind = self._kinds[name.rpartition(".")[0]]
        if folder == "script":
            return Text(files(*kind.scripts), "text/javascript; charset=utf-8", HEADERS)
        return Text(files(*kind.styles), "text/css; charset=utf-8", HEADERS)

    def _fresh(self, address: str, stamp: str) -> dict[str, Any]:
        split = urlsplit(address)
        page: Page = self.pages.page(unquote(split.path), parse_qs(split.query))
        now = page.live() if page.live is not None else ""
        if now == stamp:
            return {"stamp": now, "parts": {}}
        still = [(number, one) for number, one in enumerate(page.sections) if one.shown is None]
        return {"stamp": now, "parts": {f"part{number}": contents(one) for number, one in still}}


def _address(path: str, query: dict[str, list[str]]) -> str:
    return f"{quote(path)}?{urlencode(query, doseq=True)}"


def _sorry(asked: HttpRequest, why: str) -> Any:
    """Return the reason of an error: as JSON for a script, as a line of text for a reader."""
    plain = asked.method == "POST" or asked.path.startswith("/-/")
    return {"detail": why} if plain else Text(why, "text/plain; charset=utf-8", HEADERS)


@contextmanager
def viewing(source: str | Path, *, port: int = 0, host: str = "127.0.0.1", token: str | None = None) -> Iterator[str]:
    """Context manager that serves the pages over a run, a folder of runs or a dump, and yields the address with its
    token.

    A `host` other than loopback lets others reach it: only the token keeps them out, and nothing is encrypted. Raises
    `RunError` where there is neither run nor dump, `OSError` where the port is taken.
    """
    names = LOCAL if host in LOCAL else (*LOCAL, host, socket.gethostname(), socket.getfqdn())
    viewer = Viewer(Pages(source), token or secrets.token_urlsafe(24), names)
    with serving(viewer, name="workbench-view", port=port, host=host, guard=viewer.guard) as address:
        yield f"http://{address}/?token={viewer.token}"


def view(source: str | Path, *, port: int, host: str, say: Callable[[str], None]) -> None:
    """Serve the pages until Ctrl-C, and print the address by `say`."""
    with viewing(source, port=port, host=host) as address:
        number = urlsplit(address).port
        say(f"{source} at {address}")
        if host in LOCAL:
            say(
                f"from another machine: ssh -N -L {number}:localhost:{number} {socket.gethostname()}, then the same address there"
            )
        say("Ctrl-C ends it")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            say("ended")
