"""What weights are, whatever they are called: a digest of the files that an engine computes with.

Names and shapes say nothing of values: a fine-tuned model has the same headers, the same index file and often the same
name. So of every tensor some bytes are read too, spread over it; of small folders all bytes. Training and quantising
change nearly every tensor, so this tells revisions apart without reading hundreds of GB; who edits single elements of a
tensor by hand gives a revision of their own. What is read is the same on each host, so the digest is.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from kvstore.errors import ConfigurationError

WHOLE_BYTES = 64 << 20
"""Files up to this size together are read whole."""
SAMPLE_BYTES = 4096
SAMPLES_A_TENSOR = 4
SAMPLES_A_FILE = 256
"""Of a file whose tensors are not known."""
_HEADER_LIMIT_BYTES = 100 << 20
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_BESIDE = ("config.json", "*.index.json", "adapter_config.json", "quantize_config.json", "hf_quant_config.json")


def weights_digest(folder: Path, also: Sequence[str] = ()) -> str:
    """Hexadecimal digest (128 bits) of the weights in a folder or file, their configuration, and the texts `also`.

    Raises ConfigurationError where there are none or they cannot be read.
    """
    digest = blake2b(digest_size=16, person=b"kvstore-weights")
    for text in also:
        _add(digest, text.encode())
    try:
        files = _files(folder, _WEIGHTS)
        if not files:
            raise ConfigurationError(f"no weights in {folder}; give the revision of the model by `revision`")
        whole = sum(path.stat().st_size for path in files) <= WHOLE_BYTES
        for path in (*_files(folder, _BESIDE), *files):
            _add(digest, path.name.encode())
            if whole or path.suffix == ".json":
                _add(digest, path.read_bytes())
            else:
                for part in _samples(path):
                    _add(digest, part)
    except (OSError, ValueError, struct.error) as exc:
        raise ConfigurationError(f"the weights in {folder} cannot be read ({exc}); give `revision`") from exc
    return digest.hexdigest()


def _add(digest: blake2b, part: bytes) -> None:
    digest.update(struct.pack("<Q", len(part)))
    digest.update(part)


def _files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Files of these patterns, by name; only the first pattern of weights that is there, as engines load them."""
    if folder.is_file():
        return [folder] if patterns is _WEIGHTS else []
    found: list[Path] = []
    for pattern in patterns:
        found += sorted(path for path in folder.glob(pattern) if path.is_file())
        if found and patterns is _WEIGHTS:
            break
    return found


def _samples(path: Path) -> Iterator[bytes]:
    """Size, header and spread bytes of a large file."""
    size = path.stat().st_size
    yield struct.pack("<Q", size)
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > _HEADER_LIMIT_BYTES:
                raise ValueError(f"{path.name} has a header of {header_bytes} bytes")
            header = file.read(header_bytes)
            yield header
            spans = [tuple(each["data_offsets"]) for name, each in json.loads(header).items() if name != "__metadata__"]
            runs, count = (
                [(8 + header_bytes + first, 8 + header_bytes + last) for first, last in spans],
                SAMPLES_A_TENSOR,
            )
        else:
            runs, count = [(0, size)], SAMPLES_A_FILE
        for start, stop in sorted(runs):
            last = max(start, stop - SAMPLE_BYTES)
            for number in range(count):
                at = start + (last - start) * number // max(1, count - 1)
                file.seek(at)
                yield file.read(min(SAMPLE_BYTES, stop - at))


class LoraDigests:
    """Digests of adapters' contents by number and folder, computed in a thread: whoever asks never waits.

    An engine loads an adapter once under a number. If its files change (size, time of change) without that, the engine
    may have the old ones or the new ones, and the number has no digest any more.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="kvstore-lora")
        self._known: dict[tuple[int, str], tuple[object, Future[str]]] = {}

    def ask(self, number: int, folder: str, *, reloaded: bool = False) -> bytes | None:
        """The digest, None while it is being computed. `reloaded`: the engine loads changed files anew by itself.

        Raises ConfigurationError where the adapter cannot be read, or has changed.
        """
        path, name = Path(folder), (number, folder)
        try:
            stamp = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in _stats(path))
        except OSError as exc:
            raise ConfigurationError(f"the adapter {folder} cannot be read: {exc}") from exc
        known = self._known.get(name)
        if known is None or (reloaded and known[0] != stamp):
            known = self._known[name] = stamp, self._threads.submit(weights_digest, path)
        if known[0] != stamp:
            self._known[name] = None, known[1]  # for good: going back to the old files says nothing either
            raise ConfigurationError(f"the adapter {folder} has changed since it was loaded; load it under a new name")
        return bytes.fromhex(known[1].result()) if known[1].done() else None

    def close(self) -> None:
        """End the thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _stats(path: Path) -> list[tuple[str, os.stat_result]]:
    files = (*_files(path, _BESIDE), *_files(path, _WEIGHTS))
    return [(file.name, file.stat()) for file in files]
