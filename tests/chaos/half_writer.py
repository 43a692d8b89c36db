"""A client that reserves chunks and writes into their slots when told to, whatever has become of its session.

python half_writer.py SOCKET_PATH PROMPT CHUNKS      then a line on stdin: scribble; it answers a line each time
"""

from __future__ import annotations

import sys

import kvstore

LAYOUT = kvstore.PageLayout(4, 2, 32, kvstore.Dtype.FP32, 16, 1)
NAMESPACE = kvstore.Namespace("chaos", "r1", LAYOUT)


def main() -> None:
    path, prompt, chunks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    client = kvstore.connect(path)
    cache = client.bind(NAMESPACE)
    pending = cache.begin_write(cache.keys([prompt] * (chunks * LAYOUT.chunk_tokens)))
    starts = [pending.answer.slots[index] * 4096 for index in pending.granted]
    views = [pending.host.arena[start : start + LAYOUT.chunk_bytes] for start in starts]
    print(len(views), flush=True)
    for _ in sys.stdin:
        for view in views:
            view[:] = 0xEE
        print("scribbled", flush=True)


if __name__ == "__main__":
    main()
