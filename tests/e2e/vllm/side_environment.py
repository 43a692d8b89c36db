"""The side environment of the real engine: a virtual environment with vLLM's CPU build, and the tiny models.

`python tests/e2e/vllm/side_environment.py` makes what is not there yet, leaves alone what is, and prints the path of
the environment's Python. Everything is downloaded first and installed without the network afterwards, so that a failed
download is known as one (exit status 3). A lock file keeps two builds from meeting. Versions are pinned in
`requirements.txt`: other versions are another engine, with other interfaces.

`KVSTORE_VLLM` names another folder for both (default `~/.cache/kvstore`: `vllm` and `vllm-models` in it).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
REQUIREMENTS = HERE / "requirements.txt"
MODELS_SCRIPT = HERE / "tiny_models.py"
STAMP = ".installed"
# With its dependencies, unlike the rest: a build for CUDA does not even import without them.
TORCH = "torch==2.13.0"
DOWNLOAD_FAILED = 3


class BuildError(Exception):
    """The environment could not be made; `status` is the exit status that says why."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


def folder() -> Path:
    """Where the environment and the models lie."""
    return Path(os.environ.get("KVSTORE_VLLM") or Path.home() / ".cache" / "kvstore")


def home() -> Path:
    """The environment."""
    return folder() / "vllm"


def models() -> Path:
    """The tiny models, one folder each."""
    return folder() / "vllm-models"


def python() -> Path:
    """The environment's Python."""
    return home() / "bin" / "python"


def own_dependencies() -> list[str]:
    """What kvstore itself needs: it runs from its source tree there, without being installed."""
    project: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["dependencies"]


def wanted_stamp() -> str:
    """The contents of the environment's stamp: every version that was asked for."""
    return "\n".join([TORCH, REQUIREMENTS.read_text(), *own_dependencies()])


def is_made(place: Path, stamp: str) -> bool:
    """Whether this very thing was completed in that folder."""
    with contextlib.suppress(FileNotFoundError):
        return (place / STAMP).read_text() == stamp
    return False


@contextlib.contextmanager
def only_builder() -> Iterator[None]:
    """Wait for another build to end; this one is the only one then."""
    folder().mkdir(parents=True, exist_ok=True)
    with (folder() / "vllm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def pip(what: str, *arguments: str | Path, status: int = 1) -> None:
    """Run the environment's pip; BuildError with its last complaint and this status if it fails."""
    command = [python(), "-m", "pip", "--disable-pip-version-check", *arguments]
    print(f"{what} …", file=sys.stderr, flush=True)
    started = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise BuildError(f"{what} failed: {complaints[-1]}", status)
    print(f"{what}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def install() -> None:
    """Make the environment anew."""
    shutil.rmtree(home(), ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", home()], check=True)
    wheels = home() / "wheels"
    fetch: tuple[str | Path, ...] = ("download", "--only-binary", ":all:", "--dest", wheels)
    offline: tuple[str | Path, ...] = ("install", "--no-index", "--find-links", wheels)
    pinned: tuple[str | Path, ...] = ("--no-deps", "--requirement", REQUIREMENTS)
    loose: tuple[str | Path, ...] = ("--constraint", REQUIREMENTS, TORCH, *own_dependencies())
    # The pinned list is complete without what vLLM names but text models do not need, and what harms it: the usual
    # builds of torchvision, torchaudio and torchcodec are for CUDA, and transformers fails to import beside them.
    pip("download of the engine", *fetch, *pinned, status=DOWNLOAD_FAILED)
    pip("download of torch and kvstore's dependencies", *fetch, *loose, status=DOWNLOAD_FAILED)
    pip("installation of torch and kvstore's dependencies", *offline, *loose)
    pip("installation of the engine", *offline, *pinned)
    shutil.rmtree(wheels)
    (home() / STAMP).write_text(wanted_stamp())


def make_models() -> None:
    """Make the models anew."""
    shutil.rmtree(models(), ignore_errors=True)
    models().mkdir(parents=True)
    done = subprocess.run([python(), MODELS_SCRIPT, models()], stdout=sys.stderr)
    if done.returncode:
        raise BuildError(f"{MODELS_SCRIPT.name} failed")
    (models() / STAMP).write_text(models_stamp())


def models_stamp() -> str:
    """The contents of the models' stamp."""
    return hashlib.sha256(MODELS_SCRIPT.read_bytes() + wanted_stamp().encode()).hexdigest()


def main() -> None:
    """Make what is missing; exit status 3 if something could not be downloaded, 1 for other failures."""
    with only_builder():
        try:
            if not is_made(home(), wanted_stamp()):
                install()
            if not is_made(models(), models_stamp()):
                make_models()
        except BuildError as exc:
            print(exc, file=sys.stderr)
            sys.exit(exc.status)
    print(python())


if __name__ == "__main__":
    main()
