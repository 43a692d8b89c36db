"""Every error of the project, as one tree.

    KvStoreError
    ├── ConfigurationError     a setting is wrong; nothing was started
    ├── InvalidRequest         the caller's arguments cannot be right
    │   ├── LayoutMismatch     bytes, shapes or geometries that do not fit the namespace
    │   └── LimitExceeded      a documented bound would be passed; the message names it
    ├── NotFound               an unknown namespace, node, worker or ticket
    ├── StaleReference         a reservation, lease, session or epoch that has ended
    │   └── SessionLost        the node closed the session or restarted
    ├── CapacityExhausted      no room now; trying again later may work
    ├── StorageFailed          a disk or file system refused; what lay there counts as lost
    ├── DeadlineExceeded       the deadline passed before the answer was there
    ├── Unreachable            the peer did not answer
    ├── Unauthorized           the peer may not do this
    └── ForkedProcess          a client object was used in a forked child

A miss is a value (`kvstore.model.values.MissReason`), never one of these. `kvstore/rpc/wire.py` maps the
tree to and from gRPC status codes; foreign errors are mapped once, where they are met, with `from exc`.
"""

from __future__ import annotations


class KvStoreError(Exception):
    """Base of all errors raised by this project."""


class ConfigurationError(KvStoreError):
    """A setting is wrong; the message says which one and what to do."""


class InvalidRequest(KvStoreError):
    """The arguments of a call cannot be right."""


class LayoutMismatch(InvalidRequest):
    """Bytes, shapes, page sizes or geometries that do not fit the namespace."""


class LimitExceeded(InvalidRequest):
    """A documented bound would be passed; the message names bound and value."""


class NotFound(KvStoreError):
    """An unknown namespace, node, worker or ticket."""


class StaleReference(KvStoreError):
    """A reservation, lease, session or epoch that has ended."""


class SessionLost(StaleReference):
    """The session with a node ended: the socket closed or the node restarted."""


class CapacityExhausted(KvStoreError):
    """No room now; the same call may work later."""


class StorageFailed(KvStoreError):
    """A disk or its file system failed; the message names file, operation, the system's reason and what to do."""


class DeadlineExceeded(KvStoreError):
    """The deadline passed before the answer was there."""


class Unreachable(KvStoreError):
    """A peer did not answer or refused the connection."""


class Unauthorized(KvStoreError):
    """The peer may not make this call."""


class ForkedProcess(KvStoreError):
    """A client object was used in a child made by fork; open a new one there, or use spawn."""
