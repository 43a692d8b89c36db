"""From the node's SSD into an engine's blocks on a device: today a read by way of DRAM, in one call of the client.

Several prompts are stored durably, together more than DRAM holds, so that the first one is on the SSD only; reading it
is what counts. Against a read of as many bytes that are in DRAM already.

    python bench/gpu_ssd.py                     a CUDA device; ends with status 3 where there is none
    python bench/gpu_ssd.py --device cpu        a trial of the bench itself
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

import numpy as np
from devices import LAYOUT, EngineKv, facts, parsed, wait
from measure import report
from servers import Node

import kvstore
from engine_adapter.device_copy import DeviceCopier
from engine_adapter.pinned import pin_host
from kvstore.client import Cache, Durability
from kvstore.model.prefix import Keys

DRAM_PROMPTS = 3
"""Prompts that fit into DRAM; so many rounds of them are stored."""


def keys_of(cache: Cache, number: int, chunks: int) -> Keys:
    """The keys of one prompt."""
    base = (number + 1) * 1_000_003
    return cache.keys(np.arange(base, base + chunks * LAYOUT.chunk_tokens))


def read(cache: Cache, keys: Keys, engine: EngineKv, copier: DeviceCopier) -> tuple[float, int]:
    """(seconds, tokens that came from the SSD)."""
    began = time.perf_counter()
    result = cache.read(keys, engine.kv(copier), deadline_s=60.0)
    wait(engine.blocks.device)
    took = time.perf_counter() - began
    if result.chunks != len(keys):
        sys.exit(f"read {result.chunks} of {len(keys)} chunks: {result.reason}")
    return took, result.ssd_tokens


def main() -> None:
    """Store, read back from the SSD, read again from DRAM."""
    given = parsed(__doc__, chunks=16)
    chunks, prompts = given.chunks, DRAM_PROMPTS * 3
    mib = chunks * (LAYOUT.chunk_bytes >> 20)
    copier = DeviceCopier(given.device)
    source, target = EngineKv(given.device, chunks, seed=1), EngineKv(given.device, chunks, seed=2)
    source.fill(1)
    seconds: dict[str, list[float]] = {"ssd": [], "dram": []}
    with tempfile.TemporaryDirectory() as folder:
        more = ("--ssd", f"{folder}/ssd:{mib * prompts * 2 + 256}MiB")
        with Node(dram=f"{mib * DRAM_PROMPTS + 64}MiB", slots=4096, more=more) as node:
            node.wait_populated()
            with kvstore.connect(node.control_address, transport="shm") as client:
                session = client.host()
                if given.device.type == "cuda" and session is not None:
                    pin_host(session, [copier], deadline_s=60.0)
                cache = client.bind(kvstore.Namespace("bench", "gpu-ssd", LAYOUT))
                for number in range(prompts):
                    saved = cache.write(
                        keys_of(cache, number, chunks),
                        source.kv(copier),
                        deadline_s=60.0,
                        durability=Durability.SSD,
                    )
                    if saved.durable != chunks:
                        sys.exit(f"only {saved.durable} of {chunks} chunks reached the SSD: {saved.not_durable}")
                for number in range(prompts):
                    keys = keys_of(cache, number, chunks)
                    took, ssd_tokens = read(cache, keys, target, copier)
                    if ssd_tokens == keys.token_count:
                        seconds["ssd"].append(took)
                        seconds["dram"].append(read(cache, keys, target, copier)[0])
                if not target.holds_what(source):
                    sys.exit("wrong bytes")
    if not seconds["ssd"]:
        sys.exit("no prompt was on the SSD only; nothing was measured")
    report(
        bench="gpu_ssd",
        op="load",
        transport="ssd",
        chunk_bytes=LAYOUT.chunk_bytes,
        count=len(seconds["ssd"]),
        keys=chunks,
        checksum=True,
        condition="cold",
        against="dram",
        bytes_per_second=chunks * LAYOUT.chunk_bytes / statistics.median(seconds["ssd"]),
        against_bytes_per_second=chunks * LAYOUT.chunk_bytes / statistics.median(seconds["dram"]),
        ratio=statistics.median(d / s for d, s in zip(seconds["dram"], seconds["ssd"], strict=True)),
        **facts(given.device),
    )


if __name__ == "__main__":
    main()
