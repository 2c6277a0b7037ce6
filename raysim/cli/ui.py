"""`raysim ui`: open MLflow's web pages."""

from __future__ import annotations

import os
import sys
import webbrowser
from typing import Annotated

import typer

from raysim.cli.base import app
from raysim.cli.completion import complete_experiment
from raysim.cli.terminal import aside, say
from raysim.errors import RaysimError


@app.command()
def ui(
    experiment: Annotated[
        str,
        typer.Argument(
            help="experiment to open; default: the list of all",
            autocompletion=complete_experiment,
        ),
    ] = "",
    uri: Annotated[
        str | None, typer.Option(help="tracking store; default sqlite:///mlflow.db")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="port of the server; default 5000, or a free one"),
    ] = None,
    browser: Annotated[bool, typer.Option(help="open a browser")] = True,
) -> None:
    """Open MLflow at an experiment. A database is served here until Ctrl-C."""
    from raysim.config.sections.storage import Tracking
    from raysim.config.tracking_uri import absolute_uri, mask_secrets, restored_uri
    from raysim.system.signals import stoppable
    from raysim.tracking import ui as pages

    store = absolute_uri(restored_uri(uri or Tracking().uri))
    opened = pages.find_experiment(store, experiment)
    if store.startswith("http"):
        _show(pages.link(mask_secrets(store), opened), browser)
        return
    port = pages.free_port(port)
    try:
        with stoppable(), pages.served(store, port) as server:
            _show(pages.link(f"http://127.0.0.1:{port}", opened), browser)
            aside("Ctrl-C ends it")
            code = server.wait()
    except KeyboardInterrupt:
        return
    raise RaysimError(f"MLflow's server has ended by itself, with code {code}")


def _show(link: str, browser: bool) -> None:
    """Print a link, and open it in a browser if there is a desktop."""
    say(link)
    has_desktop = sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    # Without a desktop, `webbrowser` might open a browser in this terminal.
    if browser and has_desktop:
        webbrowser.open(link)
