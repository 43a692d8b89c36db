"""A prefill/decode proxy: one address for clients, a prefill server and a decode server behind it.

Each request goes to the prefill server first, for one token, and then to the decode server together with what the
prefill server said of its KV (`kv_transfer_params`), under one request id. That is the exchange of vLLM's proxies.
"""

from __future__ import annotations

import http.server
import json
import threading
import urllib.request
import uuid
from types import TracebackType
from typing import Any

LEG_DEADLINE_S = 240.0
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class PdProxy:
    """The proxy at `url` while the `with` block lasts. `handed_on`: what the prefill server said, a request each."""

    def __init__(self, prefill_url: str, decode_url: str) -> None:
        self.handed_on: list[dict[str, Any] | None] = []
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = json.dumps(proxy._both_legs(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._prefill_url, self._decode_url = prefill_url, decode_url
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="pd-proxy")
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> PdProxy:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _both_legs(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request_id = str(uuid.uuid4())
        short = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
        handed_on = _post(self._prefill_url + path, short, request_id).get("kv_transfer_params")
        self.handed_on.append(handed_on)
        whole = body if handed_on is None else {**body, "kv_transfer_params": handed_on}
        return _post(self._decode_url + path, whole, request_id)


def _post(url: str, body: dict[str, Any], request_id: str) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=LEG_DEADLINE_S) as answer:
        said: dict[str, Any] = json.load(answer)
    return said
