"""The pins of operators in a file of the data folder, so that they outlive worker and node.

The file names the wall-clock time at which each pin ends, because no other clock goes on over a restart; everywhere
else a lifetime is a duration. It is replaced as a whole: after a crash the old or the new one is there.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import CapacityExhausted

logger = logging.getLogger(__name__)
_VERSION = 1


@dataclass(frozen=True, slots=True)
class KeptPin:
    """One pin with the seconds that are left of its lifetime."""

    name: str
    namespace_id: bytes
    key: bytes
    left_s: float


class PinFile:
    """`pins.json` of one node. `wall_clock` gives seconds since 1970."""

    def __init__(self, data_dir: Path, wall_clock: Callable[[], float] = time.time) -> None:
        self._path = data_dir / "pins.json"
        self._wall_clock = wall_clock

    def load(self) -> list[KeptPin]:
        """The pins that have not ended. A file that cannot be read is told in the log: a node starts without pins."""
        try:
            content = json.loads(self._path.read_bytes())
            if content["version"] != _VERSION:
                raise ValueError(f"version {content['version']}")
            now_s = self._wall_clock()
            pins = [
                KeptPin(
                    pin["name"],
                    bytes.fromhex(pin["namespace_id"]),
                    bytes.fromhex(pin["key"]),
                    float(pin["ends_unix_s"]) - now_s,
                )
                for pin in content["pins"]
            ]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as exc:
            logger.warning("the pins in %s are lost, they cannot be read: %s", self._path, exc)
            return []
        return [pin for pin in pins if pin.left_s > 0]

    def save(self, pins: Sequence[KeptPin]) -> None:
        """Replace the file. Blocks for the disk. Raises CapacityExhausted if it cannot be written."""
        now_s = self._wall_clock()
        listed = [
            {
                "name": pin.name,
                "namespace_id": pin.namespace_id.hex(),
                "key": pin.key.hex(),
                "ends_unix_s": round(now_s + pin.left_s, 3),
            }
            for pin in pins
        ]
        draft = self._path.with_suffix(".new")
        try:
            with draft.open("w") as file:
                json.dump({"version": _VERSION, "pins": listed}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
        except OSError as exc:
            raise CapacityExhausted(f"the pins cannot be written to {self._path}: {exc.strerror or exc}") from exc
