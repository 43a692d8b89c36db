"""`kvstore up | node | metadata | router`: start servers and stay until SIGTERM or Ctrl-C.

Whatever has a node runs under a supervisor, which keeps the node's memory when the server dies: the command replaces
this process (exec). `kvstore.assemble` is imported inside the commands: it brings gRPC, which `--help` has no use for.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli.flags import Group, JsonOption, takes_settings
from kvstore.cli.output import announcer
from kvstore.config import MetadataSettings, NodeSettings, RouterSettings, Settings

CheckOption = Annotated[
    bool, typer.Option("--check", help="Check the settings, print what is in force, start nothing.")
]


@takes_settings(
    Group(NodeSettings, without=("metadata_address",)),
    Group(MetadataSettings, prefix="metadata_"),
    Group(RouterSettings, prefix="router_", without=("metadata_address",)),
)
def up(
    node: NodeSettings,
    metadata: MetadataSettings,
    router: RouterSettings,
    *,
    with_router: Annotated[bool, typer.Option("--router/--no-router", help="Start the scheduler too.")] = True,
    check: CheckOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a whole pool on this machine: metadata service, node and scheduler."""
    others: dict[str, Settings | None] = {"metadata": metadata, "router": router if with_router else None}
    _start(node, others, check=check, as_json=as_json)


@takes_settings(Group(NodeSettings))
def node(settings: NodeSettings, *, check: CheckOption = False, as_json: JsonOption = False) -> None:
    """Run a node: the daemon that owns this host's share of the pool."""
    _start(settings, {}, check=check, as_json=as_json)


def _start(node: NodeSettings, others: dict[str, Settings | None], *, check: bool, as_json: bool) -> None:
    if check:
        from kvstore.cli.effective import print_effective

        print_effective({"node": node, **others}, as_json=as_json)
        return
    from kvstore.cli import supervised

    supervised.start(node, others, as_json=as_json)


@takes_settings(Group(MetadataSettings))
def metadata(settings: MetadataSettings, *, as_json: JsonOption = False) -> None:
    """Run the metadata service: which node holds which prefix."""
    from kvstore import assemble

    assemble.run_metadata(settings, announcer(as_json=as_json))


@takes_settings(Group(RouterSettings))
def router(settings: RouterSettings, *, as_json: JsonOption = False) -> None:
    """Run the scheduler: it sends each request to the worker that can start first."""
    from kvstore import assemble

    assemble.run_router(settings, announcer(as_json=as_json))
