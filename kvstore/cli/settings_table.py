"""`kvstore settings-table`: the text of `docs/settings.md`, made from `kvstore.config`."""

from __future__ import annotations

from kvstore.config import TABLES, describe

_HEAD = """\
# Settings

Made by `kvstore settings-table > docs/settings.md`; do not edit.

A setting comes from, strongest first: the flag (`--dram 8GiB`), the environment (`KVSTORE_NODE_DRAM=8GiB`), one TOML
file (`--config FILE`, else `./kvstore.toml`, else `/etc/kvstore.toml`), its default. The flag is the name with dashes;
`kvstore up` puts `metadata-` and `router-` before the flags of those two tables. Sizes are bytes or carry KiB, MiB, GiB
or TiB. An unknown name in the file or in a `KVSTORE_` variable is an error that names the nearest known one.
"""
_COLUMNS = "| setting | default | environment | what it does |\n|---|---|---|---|\n"


def settings_markdown() -> str:
    """The whole page."""
    parts = [_HEAD]
    for kind in TABLES:
        parts.append(f"\n## [{kind.table}]\n\n{kind.__doc__}\n\n{_COLUMNS}")
        for row in describe():
            if row.table == kind.table:
                default = f"`{row.default}`" if row.default else "empty"
                parts.append(f"| `{row.name}` | {default} | `{row.environment}` | {row.text} |\n")
    return "".join(parts)


def settings_table() -> None:
    """Print docs/settings.md."""
    print(settings_markdown(), end="")
