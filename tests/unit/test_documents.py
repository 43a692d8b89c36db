"""README, ARCHITECTURE, CONTRIBUTING and docs/ against the repository: what they name is there, what they show runs."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main
from fenced_code import blocks

from kvstore.analytics.processes import Children
from kvstore.cli import app
from kvstore.config import OTHER_ENVIRONMENT, describe

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))
START_DEADLINE_S = 30.0

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def code(text: str) -> Iterator[str]:
    """Code spans, and the lines of shell blocks: continued lines are one, the parts of a pipe are several."""
    for block in blocks(text, "bash"):
        for line in re.sub(r"\\\n\s*|(?<=\|)\n\s*", "", block).splitlines():
            yield from line.partition("# ")[0].split("|")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"`([^`\n]+)`", prose)


# --- what a document gets wrong, in words ---


def broken_links(text: str, folder: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            name, _, anchor = target.partition("#")
            file = folder / name if name else None
            if file is not None and not file.exists():
                yield f"link to {target}"
            elif anchor and anchor not in anchors(file.read_text() if file is not None else text):
                yield f"anchor #{anchor}"


def anchors(text: str) -> set[str]:
    """The places that headings make, as code hosts name them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


_PATH = re.compile(r"(?<![\w/.-])((?:kvstore|engine_adapter|tests|docs|bench|protos|deploy|\.ci)/[\w./{},*-]*)")
_FILE = re.compile(r"(?<![\w/.-])((?:[A-Z]{3,}|[a-z_]+)\.(?:md|toml))\b")
OTHER_FILES = {"kvstore.toml"}
"""Of the user, not of the repository."""


def missing_paths(text: str) -> Iterator[str]:
    for piece in code(text):
        found = [path.rstrip(".,") for path in _PATH.findall(piece) if not re.search(r"[A-Z]{4}", path)]
        found += [name for name in _FILE.findall(piece) if name not in OTHER_FILES]
        for path in itertools.chain.from_iterable(map(expanded, found)):
            if not any(ROOT.glob(path.rstrip("/"))):
                yield f"path {path}"


def expanded(path: str) -> list[str]:
    """`a/{b,c}.py` -> a/b.py, a/c.py."""
    match = re.search(r"\{([^}]*)\}", path)
    return [path] if match is None else [path.replace(match[0], part) for part in match[1].split(",")]


@cache
def options_of(program: str) -> frozenset[str]:
    """Options of `kvstore COMMAND`, or of a Python file by its source; empty for an unknown command."""
    if program.endswith(".py"):
        return frozenset(re.findall(r"add_argument\(\"(--[\w-]+)", (ROOT / program).read_text())) | {"--help"}
    command = typer.main.get_command(app)
    if program:
        command = command.commands.get(program)  # type: ignore[attr-defined]
    if command is None:
        return frozenset()
    named = (option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts))
    return frozenset(option for option in named if option.startswith("--")) | {"--help"}


def all_options() -> frozenset[str]:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    files = (path.relative_to(ROOT).as_posix() for path in (ROOT / "bench").glob("*.py"))
    programs = ("", *commands, "engine_adapter/reference.py", *files)
    return frozenset().union(*(options_of(program) for program in programs))


def unknown_commands(text: str) -> Iterator[str]:
    for piece in code(text):
        program = None
        if match := re.match(r"(?:\S*/)?kvstore(?: ([a-z][\w-]*))?(?= |$)", piece.strip()):
            program = match[1] or ""
        elif match := re.match(r"\S*python (?:-m engine_adapter\.(\w+)|(bench/\w+\.py))", piece.strip()):
            program = match[2] or f"engine_adapter/{match[1]}.py"
        known = all_options() if program is None and piece.startswith("--") else None
        if program is not None:
            known = options_of(program) if not program.endswith(".py") or (ROOT / program).exists() else frozenset()
            if not known:
                yield f"command {piece.strip()}"
                continue
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", piece) if known is not None else ():
            if option not in known:
                yield f"option {option} of {piece.strip()}"


def unknown_targets(text: str) -> Iterator[str]:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for piece in code(text):
        if (match := re.match(r"make ([a-z-]+)$", piece.strip())) and match[1] not in known:
            yield f"make target {match[1]}"


def unknown_variables(text: str) -> Iterator[str]:
    known = {row.environment for row in describe()} | set(OTHER_ENVIRONMENT)
    for name in re.findall(r"\bKVSTORE_[A-Z][A-Z_]*", text):
        if name not in known:
            yield f"variable {name}"


def unknown_names(text: str) -> Iterator[str]:
    """Dotted names of the package that cannot be had; those of the protos are another matter."""
    for piece in code(text):
        match = re.match(r"((?:kvstore|engine_adapter)(?:\.\w+)+)(?:\(.*)?$", piece)
        if match and not match[1].startswith("kvstore.v1") and match[1] not in OTHER_FILES and not exists(match[1]):
            yield f"name {match[1]}"


def exists(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def problems(text: str, folder: Path = ROOT) -> list[str]:
    checks = (missing_paths, unknown_commands, unknown_targets, unknown_variables, unknown_names)
    return [*broken_links(text, folder), *(problem for check in checks for problem in check(text))]


# --- the tests ---


@each_document
def test_what_is_named_is_there(document: Path) -> None:
    assert problems(document.read_text(), document.parent) == []


FAULTY = """
# A title
[gone](docs/gone.md), [here](#a-title), [nowhere](#another-title), [far](https://example.org/x)
`kvstore/gone.py`, `kvstore/node/{pool,gone}.py`, `docs/*.rst`, `GONE.md`, `tests/`, `bench/NAME.py`
`kvstore gone`, `kvstore status --gone`, `--gone`, `kvstore up --dram 1GiB --metadata-gone 1`, `--json`
`make gone`, `make test`, KVSTORE_NODE_GONE, KVSTORE_NODE_DRAM, `KVSTORE_*`
`kvstore.gone`, `kvstore.node.core.NodeCore.gone`, `kvstore.open_local("1MiB")`, `kvstore.v1.NodeService`

```bash
echo {} |
    python -m engine_adapter.reference --role prefill \\
    --gone 1   # --not-an-option
python bench/gone.py
```
"""


def test_every_kind_of_fault_is_noticed() -> None:
    assert sorted(problems(FAULTY)) == sorted(
        [
            "link to docs/gone.md",
            "anchor #another-title",
            "path kvstore/gone.py",
            "path kvstore/node/gone.py",
            "path docs/*.rst",
            "path GONE.md",
            "path bench/gone.py",
            "command kvstore gone",
            "command python bench/gone.py",
            "option --gone of kvstore status --gone",
            "option --gone of --gone",
            "option --metadata-gone of kvstore up --dram 1GiB --metadata-gone 1",
            "option --gone of python -m engine_adapter.reference --role prefill --gone 1",
            "make target gone",
            "variable KVSTORE_NODE_GONE",
            "name kvstore.gone",
            "name kvstore.node.core.NodeCore.gone",
        ]
    )


def test_the_quick_start_is_two_commands() -> None:
    start = (ROOT / "README.md").read_text().split("\n## Quick start\n", 1)[1]
    assert blocks(start, "bash")[0] == "make demo\nmake test\n"


def test_every_command_and_bench_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name in (name for name, command in commands.items() if not command.hidden):
        assert re.search(rf"`kvstore {name}\b", text), name
    for path in (ROOT / "bench").glob("*.py"):
        if "__main__" in path.read_text():
            assert f"bench/{path.name}" in text, path.name


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    """`kvstore up` on free ports; the default addresses with those that it got."""
    with Children() as children:
        home = str(children.folder)
        free = [("--control-address", "127.0.0.1:0"), ("--metadata-address", "127.0.0.1:0"), ("--metrics-address", "")]
        free += [("--router-address", "127.0.0.1:0"), ("--metadata-metrics-address", "")]
        free += [("--socket-dir", home), ("--data-dir", home), ("--dram", "64MiB")]
        pool = children.start_console("up", ["up", *(part for pair in free for part in pair)])
        ready = [pool.announcement, pool.receive(START_DEADLINE_S), pool.receive(START_DEADLINE_S)]
        bound = {str(facts["role"]): str(facts["control_address"]) for facts in ready}
        yield {"127.0.0.1:7420": bound["node"], "127.0.0.1:7410": bound["metadata"], "127.0.0.1:7400": bound["router"]}


EXAMPLES = [
    pytest.param(block, id=f"{document.name}-{number}")
    for document in DOCUMENTS
    for number, block in enumerate(blocks(document.read_text(), "python"))
]


@pytest.mark.slow
@pytest.mark.skipif(not (Path(sys.executable).parent / "kvstore").is_file(), reason="the package is not installed")
@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example: str, addresses: dict[str, str]) -> None:
    for default, bound in addresses.items():
        example = example.replace(default, bound)
    exec(compile(example, "example", "exec"), {"__name__": "__main__"})


def test_there_are_examples_of_both_kinds() -> None:
    text = "\n".join(blocks((ROOT / "README.md").read_text(), "python"))
    assert "kvstore.open_local(" in text and 'kvstore.connect(node="127.0.0.1:7420"' in text
