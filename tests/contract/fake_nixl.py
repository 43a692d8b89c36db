"""What `NixlIo` uses of NIXL, made of system calls: it refuses queues, fails, holds and counts as a test tells it."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from kvstore.nixl_library import NixlLibrary


class Refused(Exception):
    """As NIXL's errors it has no base of its own."""


@dataclass
class Handle:
    operation: str
    memory: Any
    file: Any
    state: str = "new"
    is_released: bool = False

    def release(self) -> None:
        assert self.state != "PROC", "NIXL forgets an operation that goes on"
        self.is_released = True


@dataclass
class FakeNixl:
    """Stands for the module. `refused`: parameters of queues. `fails`: "post" or "look". `held`: operations.
    `breaks`: posting waits for it and then fails as nobody expects; `breaks_looks`: looks do so too."""

    refused: Container[str] = ()
    fails: str = ""
    breaks: threading.Event | None = None
    breaks_looks: bool = False
    held: Container[str] = ()
    reached: threading.Event = field(default_factory=threading.Event)
    handles: list[Handle] = field(default_factory=list)
    looks: int = 0
    registered: int = 0

    def nixl_agent_config(self, *, enable_prog_thread: bool, backends: list[str]) -> None:
        assert not enable_prog_thread and not backends

    def nixl_agent(self, name: str, config: None) -> Agent:
        return Agent(self, name)

    @property
    def loaded(self) -> NixlLibrary:
        return NixlLibrary(self, (Refused,), "1.5.1")


class Agent:
    def __init__(self, nixl: FakeNixl, name: str) -> None:
        self.nixl, self.name = nixl, name

    def create_backend(self, plugin: str, parameters: dict[str, str]) -> None:
        assert plugin == "POSIX" and list(parameters.values()) == ["true"]
        if any(each in self.nixl.refused for each in parameters):
            raise Refused("NIXL_ERR_BACKEND")

    def register_memory(self, places: Any, kind: str, plugins: list[str]) -> str:
        assert plugins == ["POSIX"]
        self.nixl.registered += 1
        return kind

    def deregister_memory(self, registered: str, plugins: list[str]) -> None:
        self.nixl.registered -= 1

    def get_xfer_descs(self, places: Any, kind: str) -> Any:
        return places.tolist()

    def initialize_xfer(self, operation: str, memory: Any, file: Any, name: str, *_: Any) -> Handle:
        assert name == self.name and len(memory) == len(file)
        self.nixl.handles.append(Handle(operation, memory, file))
        return self.nixl.handles[-1]

    def transfer(self, handle: Handle) -> str:
        if self.nixl.breaks is not None:
            handle.state = "PROC"
            self.nixl.reached.set()
            assert self.nixl.breaks.wait(10)
            raise ZeroDivisionError("a bug")
        if self.nixl.fails == "post":
            raise Refused("NIXL_ERR_BACKEND")
        handle.state = "PROC"
        return "PROC"

    def check_xfer_state(self, handle: Handle) -> str:
        self.nixl.looks += 1
        if self.nixl.breaks_looks:
            raise ZeroDivisionError("another bug")
        if handle.operation in self.nixl.held:
            self.nixl.reached.set()
            return "PROC"
        if self.nixl.fails == "look":
            handle.state = "ERR"
            raise Refused("NIXL_ERR_BACKEND")
        handle.state = "DONE"
        for (address, size, _), (offset, _, fd) in zip(handle.memory, handle.file, strict=True):
            call = os.preadv if handle.operation == "READ" else os.pwritev
            try:
                moved = call(fd, [(ctypes.c_char * size).from_address(address)], offset)
            except OSError:
                moved = -1
            if moved != size:
                handle.state = "ERR"
        if handle.state == "ERR":
            raise Refused("NIXL_ERR_BACKEND")
        return "DONE"
