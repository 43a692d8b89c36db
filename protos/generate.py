"""Generates kvstore/rpc/v1 from the .proto files beside this script; with --check only compares.

protoc writes imports after the proto path (`kvstore.v1`); the package lives at `kvstore.rpc.v1`, so the
import lines are rewritten. Message types get `.pyi` stubs from protoc itself.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent / "kvstore" / "rpc" / "v1"
IMPORT = re.compile(r"^from kvstore\.v1 import", re.MULTILINE)


def generated() -> dict[str, str]:
    """File name -> text of everything that protoc makes."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        sources = sorted(str(path) for path in HERE.glob("kvstore/v1/*.proto"))
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{HERE}", *outputs, *sources], check=True)
        texts = {path.name: path.read_text() for path in (Path(folder) / "kvstore" / "v1").iterdir()}
    return {name: IMPORT.sub("from kvstore.rpc.v1 import", text) for name, text in texts.items()}


def main() -> int:
    """Write the stubs, or with --check name those that differ."""
    texts = generated()
    if "--check" in sys.argv:
        on_disk = {path.name: path.read_text() for path in TARGET.glob("*_pb2*")}
        stale = sorted(name for name in texts.keys() | on_disk.keys() if texts.get(name) != on_disk.get(name))
        for name in stale:
            print(f"kvstore/rpc/v1/{name} does not fit the protos; run `make protos`", file=sys.stderr)
        return 1 if stale else 0
    for path in TARGET.glob("*_pb2*"):
        path.unlink()
    for name, text in texts.items():
        (TARGET / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
