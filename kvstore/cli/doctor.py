"""`kvstore doctor`: what this machine lacks for a node with these settings, each with a remedy. Changes nothing."""

from __future__ import annotations

import typer

from kvstore.cli.flags import Group, JsonOption, takes_settings
from kvstore.cli.output import print_json, print_table
from kvstore.config import MetadataSettings, NodeSettings, RouterSettings


@takes_settings(
    Group(NodeSettings, without=("metadata_address",)),
    Group(MetadataSettings, prefix="metadata_"),
    Group(RouterSettings, prefix="router_", without=("metadata_address",)),
)
def doctor(
    node: NodeSettings, metadata: MetadataSettings, router: RouterSettings, *, as_json: JsonOption = False
) -> None:
    """Look at this machine for a node with these settings. Exit code 1: something keeps it from working."""
    from kvstore.cli import probes, probes_software

    subject = probes.Subject.of(node, {"metadata.address": metadata.address, "router.address": router.address})
    every = (*probes.PROBES, *probes_software.PROBES)
    found = [one for probe in every for one in probes.run(probe, subject)]
    failed = sum(one.state is probes.State.FAIL for one in found)
    if as_json:
        listed = [{"name": p.name, "state": p.state, "found": p.found, "remedy": p.remedy} for p in found]
        print_json({"failed": failed, "probes": listed})
    else:
        rows = [[one.state, one.name, one.found, one.remedy] for one in found]
        print_table(f"kvstore doctor: {failed} of {len(found)} probes failed", ["", "probe", "found", "remedy"], rows)
    if failed:
        raise typer.Exit(1)
