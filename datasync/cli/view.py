"""`datasync view`: the viewer."""

from __future__ import annotations

from typing import Annotated

import typer


def view(
    host: Annotated[
        str, typer.Option(help="Address to listen on; it has no login, so mind who can reach it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8765,
) -> None:
    """Show clusters and datasets in a browser: state, schema, sizes, samples.

    \b
      datasync view
      datasync view --port 9000
    """
    from datasync.cli import load_config
    from datasync.errors import UsageError

    config = load_config()
    if not config.clusters:
        raise UsageError(
            "no cluster is configured", mend="write [clusters.NAME] with its url into datasync.toml"
        )
    try:
        from datasync.web.app import serve
    except ModuleNotFoundError as error:
        raise UsageError(f"the viewer needs {error.name}", mend="pip install 'datasync[web]'") from error
    typer.echo(f"http://{host}:{port}/   (Ctrl-C ends it)", err=True)
    serve(config, host=host, port=port)
