"""The `kvstore` command. Every command takes `--json`; errors are one line on standard error.

Exit codes: 0 done; 1 the job failed (`KvStoreError`); 2 wrong usage or settings; 130 Ctrl-C. `KVSTORE_DEBUG=1`
shows the traceback of an error. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

import kvstore
from kvstore.cli.checking import check
from kvstore.cli.contents import namespaces, remove
from kvstore.cli.demo import demo
from kvstore.cli.doctor import doctor
from kvstore.cli.drain import drain
from kvstore.cli.look import stats, status
from kvstore.cli.pinning import pin, pins, unpin, warm
from kvstore.cli.replay import replay
from kvstore.cli.servers import metadata, node, router, up
from kvstore.cli.settings_table import settings_table
from kvstore.cli.top import top
from kvstore.errors import ConfigurationError, KvStoreError

# Typer brings its own copy of click or uses the installed one; the base class of a public name is right in both.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(name="kvstore", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
_STARTING = (up, node, metadata, router)
_LOOKING = (status, stats, top, namespaces, pins, check, doctor)
_CHANGING = (pin, unpin, warm, remove, drain)
for _command in (*_STARTING, *_LOOKING, *_CHANGING, demo, replay):
    app.command()(_command)
app.command(hidden=True)(settings_table)


@app.callback(invoke_without_command=True)
def _kvstore(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """A tiered KV-cache pool for LLM serving. Start with `kvstore demo` or `kvstore up`."""
    if version:
        print(kvstore.__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the console script; ends by SystemExit."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its errors reach the user as ours, in one line
    try:
        code = app(arguments, prog_name="kvstore", standalone_mode=False)
    except KvStoreError as exc:
        if os.environ.get("KVSTORE_DEBUG") == "1":
            raise
        code = failed(exc)
    except _UsageError as exc:
        code = _fail(_usage_text(exc), 2)
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    sys.exit(code or 0)


def failed(exc: KvStoreError) -> int:
    """Tell of an error; returns the exit code."""
    return _fail(str(exc), 2 if isinstance(exc, ConfigurationError) else 1)


def _usage_text(exc: Any) -> str:
    command = exc.ctx.command_path if exc.ctx else "kvstore"
    return f"{exc.format_message().rstrip('.')}; see `{command} --help`"


def _fail(text: str, code: int) -> int:
    print(f"error: {text}", file=sys.stderr)
    return code
