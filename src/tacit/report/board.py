"""A live page on the runs in a folder, for this machine only.

It listens on 127.0.0.1 and answers only GET requests, and only those whose address has its token (a fresh one
each time) and its own host name, so no other page in the browser can query it. It reads only runs inside its
folder. A run is chosen from the list that the board made itself, never by a path, and a link that leads out
of the folder is not followed.
"""

from __future__ import annotations

import hmac
import secrets
import sys
from hashlib import sha256
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from tacit.errors import UserError
from tacit.federation.checkpoint import CONFIG, LINEAGE
from tacit.federation.ending import RESULT
from tacit.federation.passed import OBJECTS
from tacit.federation.statements import STATEMENT
from tacit.federation.tracking import METRICS
from tacit.report.compare import Run, read_run, rows
from tacit.report.guarantee import last_stated
from tacit.report.page import body, page, shell

READ = (CONFIG, METRICS, STATEMENT, LINEAGE, OBJECTS, RESULT)
"""Everything that the board reads of a run."""


class Board(ThreadingHTTPServer):
    """The server; `address` is what to open in the browser."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.root = folder.resolve()
        if not self.root.is_dir():
            raise UserError(f"{folder}: there is no such folder; `tacit run` makes runs/")
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise UserError(f"--port {port}: {error.strerror}; leave it out for a free one") from None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    def link(self, run: Run) -> str:
        """The address of one run's page."""
        return f"/?token={self.token}&run={quote(self.name(run.folder))}"

    def name(self, folder: Path) -> str:
        return str(folder.relative_to(self.root)) or "."

    def runs(self) -> tuple[list[Run], list[str]]:
        """The runs to show, and one line for each run that cannot be shown."""
        found, silent = [], []
        for file in sorted(
            [*self.root.glob(CONFIG), *self.root.glob(f"*/{CONFIG}"), *self.root.glob(f"*/*/{CONFIG}")]
        ):
            folder = file.parent
            if not self._inside(folder):
                continue
            try:
                run = read_run(folder)
            except (UserError, OSError) as error:
                silent.append(str(error))
                continue
            if run.metrics:
                found.append(run)
            else:
                silent.append(f"{self.name(folder)}: no round has ended yet")
        return found, silent

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One line instead of a traceback. A browser that leaves before its answer is not an error."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            print(f"tacit: board: {type(error).__name__}: {error}", file=sys.stderr)

    def _inside(self, folder: Path) -> bool:
        """Whether a run, and everything read of it, is in the folder, also after following links."""
        places = [folder, *(folder / name for name in READ)]
        return all(place.resolve().is_relative_to(self.root) for place in places)


class _Handler(BaseHTTPRequestHandler):
    server: Board
    server_version, sys_version = "tacit", ""

    def do_GET(self) -> None:
        try:
            parts = urlsplit(self.path)
            asked = parse_qs(parts.query, max_num_fields=8)
        except ValueError:
            return self._answer(400, "that is no address")
        here = {f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")}
        if self.headers.get("Host") not in here:
            return self._answer(403, "this board is for this machine alone")
        given = asked.get("token", [""])[0]
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            return self._answer(
                403, "the address lacks the board's token; it is where `tacit board` was started"
            )
        if parts.path != "/":
            return self._answer(404, "there is nothing but /")
        return self._show(asked.get("run", [None])[0])

    def _show(self, name: str | None) -> None:
        board = self.server
        runs, silent = board.runs()
        if name is not None:
            runs = [run for run in runs if board.name(run.folder) == name]
            if not runs:
                return self._answer(404, "there is no such run on this board")
        notes = "".join(f'<p class="warn">{escape(line)}</p>' for line in silent) if name is None else ""
        up = "" if name is None else f'<p><a href="/?token={board.token}">All runs</a></p>'
        part = self.headers.get("X-Part") == "main"
        if not runs:
            inside = f"{notes}<p>No round has ended in {escape(str(board.root))} yet.</p>"
            text = inside if part else shell("No runs yet", "", inside, live=True)
        elif part:
            text = up + notes + body(rows(runs), 200, last_stated, board.link)
        else:
            text = page(rows(runs), None, last_stated, board.link)
            text = text.replace("data-live=1>", f"data-live=1>{up}{notes}", 1)
        tag = f'"{sha256(text.encode()).hexdigest()[:24]}"'
        if part and self.headers.get("If-None-Match") == tag:
            return self._answer(304, "")
        return self._answer(200, text, "text/html; charset=utf-8", {"ETag": tag})

    def _answer(
        self,
        code: int,
        text: str,
        kind: str = "text/plain; charset=utf-8",
        more: dict[str, str] | None = None,
    ) -> None:
        content = text.encode()
        self.send_response(code)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            **(more or {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # any method other than GET
            return lambda: self._answer(405, "only GET", more={"Allow": "GET"})
        raise AttributeError(name)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: every line would contain the token."""
