"""A gateway: for each prompt, asks the scheduler who takes it. Run as a script: `gateway.py SCHEDULER NAMESPACE`.

Reads `{"request_id", "tokens"}` a line and writes what the scheduler picked, with the ticket that travels with the
request. NAMESPACE is the canonical description that the workers announce.
"""

from __future__ import annotations

import json
import sys

from kvstore.model.namespace import Namespace
from kvstore.model.prefix import KeyChain
from kvstore.scheduler.client import SchedulerClient

PICK_DEADLINE_S = 5.0


def main(address: str, description: str) -> None:
    chain = KeyChain(Namespace.from_canonical(description.encode()))
    with SchedulerClient(address) as scheduler:
        for line in sys.stdin:
            request = json.loads(line)
            tokens = request["tokens"]
            keys = chain.keys(tokens)
            pick = scheduler.pick(request["request_id"], keys, len(tokens), deadline_s=PICK_DEADLINE_S)
            answer = {
                "prefill": pick.prefill_worker_id,
                "decode": pick.decode_worker_id,
                "local_run": pick.local_run,
                "pool_run": pick.pool_run,
                "ticket": pick.ticket.to_json(),
            }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
