"""`vlmrl view`: runs as a web page."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import tyro

from vlmrl.utils.http_server import Binding
from vlmrl.utils.terminal import printable

if TYPE_CHECKING:
    from vlmrl.report.viewer.followed_run import FollowedRun

TOKEN_VARIABLE = "VLMRL_VIEW_TOKEN"


@dataclass(frozen=True)
class ViewCommand:
    """Show runs as a web page: curves, trajectories with images and tokens, failures, settings.

    Without `--serve`, write the runs' current state as one HTML file."""

    runs: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="(required)"),
    ]
    """Folders of runs, such as `runs/quickstart`. Several are compared."""
    serve: bool = False
    """Serve a page that follows the runs, until Ctrl-C."""
    host: str = "127.0.0.1"
    """Address to listen on. Any other than the loopback address requires a token."""
    port: int = 0
    """Port to listen on; 0 chooses a free one."""
    token_variable: str = TOKEN_VARIABLE
    """Environment variable with the token that the page's URL must contain. Unset: no token."""
    out: Path | None = None
    """File to write, for example `page.html`. By default `trajectories.html` in the folder of the first run."""
    open: bool = False
    """Open the page in a browser."""

    def run(self, options: Sequence[str]) -> None:
        from vlmrl.report.viewer.followed_run import FollowedRun

        if not self.runs:
            raise ValueError("RUN: name at least one run's folder, such as runs/quickstart.")
        if self.serve and self.out is not None:
            raise ValueError("--serve and --out: a page that is served is not written; use one of the two.")
        runs = [FollowedRun(folder) for folder in self.runs]
        title = ", ".join(run.name for run in runs)
        if self.serve:
            self._serve(runs, title)
        else:
            self._write(runs, title)

    def _write(self, runs: Sequence[FollowedRun], title: str) -> None:
        from vlmrl.report.viewer.page import PAGE, write_snapshot
        from vlmrl.utils.output_files import check_writable

        path = self.out or self.runs[0] / PAGE
        check_writable(path, "--out")
        write_snapshot(runs, path, title)
        print(f"{path}: what the runs have so far; `--serve` follows them", flush=True)
        if self.open:
            webbrowser.open(path.resolve().as_uri())

    def _serve(self, runs: Sequence[FollowedRun], title: str) -> None:
        from vlmrl.report.viewer.view_server import MAX_BODY, create_view_app
        from vlmrl.utils.http_server import serve_on, url_of

        binding = Binding.from_options(self.host, self.port, self.token_variable, MAX_BODY / 2**20)
        app = create_view_app(runs, title, binding.token)
        with binding.open_port() as port:
            address = url_of(self.host, port.getsockname()[1]) + "/"
            hint = f"#token=TOKEN, with the value of {self.token_variable} for TOKEN" if binding.token else ""
            print(f"{printable(title)}: {address}{hint}  (Ctrl-C ends it)", flush=True)
            with TemporaryDirectory(prefix="vlmrl-view-") as folder:
                if self.open:
                    webbrowser.open(_opening(address, binding.token, Path(folder)))
                serve_on(port, app)


def _opening(address: str, token: str | None, folder: Path) -> str:
    """The URL to open in the browser. With a token: of a private file that redirects, since command lines are public."""
    if token is None:
        return address
    page = folder / "open.html"
    page.write_text(f'<meta http-equiv="refresh" content="0; url={address}#token={quote(token, safe="")}">')
    return page.as_uri()
