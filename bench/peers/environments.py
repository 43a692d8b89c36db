"""Where the peers live: one virtual environment each under `KVSTORE_PEERS` (default `~/.cache/kvstore/peers`).

`make peers` runs this file. It makes what is not there yet and leaves alone what is. As root it installs the system
packages that a peer needs, else it names them. Versions are pinned: figures of other versions are other figures.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STAMP = ".installed"
NUMPY = "numpy>=2.0,<=2.2.6"


@dataclass(frozen=True, slots=True)
class Peer:
    """A store to compare with. `steps` are arguments of `pip install`, in order; `system` are Debian packages;
    `way` is how its bytes move."""

    name: str
    label: str
    way: str
    steps: tuple[tuple[str, ...], ...]
    system: tuple[str, ...] = ()

    @property
    def home(self) -> Path:
        """Its environment."""
        return folder() / self.name

    @property
    def python(self) -> Path:
        """Its Python."""
        return self.home / "bin" / "python"

    def missing(self) -> str:
        """Why it cannot run; empty if it can."""
        stamp = self.home / STAMP
        if not stamp.is_file():
            return f"there is no environment in {self.home}; `make peers` makes it"
        if stamp.read_text() != repr(self.steps):
            return f"the environment in {self.home} has other versions; `make peers` makes it anew"
        absent = absent_packages(self.system)
        return f"these Debian packages are not installed: {' '.join(absent)}" if absent else ""


MOONCAKE = Peer(
    "mooncake",
    "mooncake-store 0.3.13.post1",
    "tcp",
    # 0.3.13 itself is linked with a CUDA library that the machine need not have.
    (("mooncake-transfer-engine-non-cuda==0.3.13.post1", NUMPY),),
    ("libibverbs1", "librdmacm1", "libnuma1", "libcurl4", "liburing2"),
)
LMCACHE = Peer(
    "lmcache",
    "lmcache 0.5.6",
    "shm",
    (
        # torch first: what wants any torch takes this build then, and not one with gigabytes of CUDA.
        ("torch==2.13.0",),
        # Its other dependencies are CUDA bindings and clouds, which a server on the CPU does not import.
        ("--no-deps", "lmcache==0.5.6"),
        (
            NUMPY,
            *("numba", "aiofile", "aiofiles", "blake3", "aiohttp", "awscrt", "cryptography", "fastapi", "httpx"),
            *("huggingface_hub>=1.5.0,<2", "msgspec", "nvtx", "opentelemetry-api<=1.40.0,>=1.20.0"),
            *("opentelemetry-sdk", "opentelemetry-exporter-otlp", "opentelemetry-exporter-prometheus<=0.61b0"),
            *("prometheus_client<=0.24.1", "psutil", "py-cpuinfo", "pyyaml", "pyzmq", "grpcio>=1.78.0"),
            *("grpcio-observability==1.78.0", "protobuf<7,>=6.31.1", "redis", "safetensors", "sortedcontainers"),
            *("transformers>=5.4", "uvicorn", "httptools", "cachetools"),
        ),
    ),
)
REDIS = Peer("redis", "redis 7", "tcp", (("redis==8.0.0", "hiredis==3.5.0", NUMPY),), ("redis-server",))
PEERS = (MOONCAKE, LMCACHE, REDIS)


def folder() -> Path:
    """Where the environments are."""
    return Path(os.environ.get("KVSTORE_PEERS") or Path.home() / ".cache" / "kvstore" / "peers")


def absent_packages(names: Sequence[str]) -> list[str]:
    """Those of the Debian packages that are not installed; none where there is no dpkg to ask."""
    if shutil.which("dpkg-query") is None:
        return []
    query = ["dpkg-query", "-W", "-f", "${db:Status-Status}"]
    answers = {name: subprocess.run([*query, name], capture_output=True, text=True).stdout for name in names}
    return [name for name, status in answers.items() if status != "installed"]


def install(peer: Peer) -> str:
    """Make one environment; what went wrong, empty if nothing did."""
    if problem := install_system(absent_packages(peer.system)):
        return problem
    if not peer.missing():
        return ""
    shutil.rmtree(peer.home, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", peer.home], check=True)
    for step in peer.steps:
        pip = [str(peer.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *step]
        done = subprocess.run(pip, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
            return f"could not download or install {' '.join(step)}: {last[-1]}"
    (peer.home / STAMP).write_text(repr(peer.steps))
    return ""


def install_system(names: Sequence[str]) -> str:
    """Install Debian packages as root; what went wrong, empty if nothing did."""
    if not names:
        return ""
    if os.geteuid():
        return f"as root: apt-get install {' '.join(names)}"
    # RUNLEVEL=1: a package with a server (redis-server) does not start it.
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *names]
    for attempt in (command, ["apt-get", "update", "-qq"], command):
        done = subprocess.run(attempt, env=environment, stdout=sys.stderr)
        if attempt is command and not done.returncode:
            return ""
    return f"could not install {' '.join(names)}"


def main() -> None:
    """Make all of them; exit status 1 if one is not complete."""
    problems = {peer.label: problem for peer in PEERS if (problem := install(peer))}
    for peer in PEERS:
        print(f"{peer.label}: {problems.get(peer.label, 'ready in ' + str(peer.home))}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
