"""The meeting point of processes for `torch.distributed`."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist


class Rendezvous:
    """A store for worker processes of this machine, held by their parent.

    The port is taken before any worker begins: a free one that a worker was told of could be taken
    by then. `environment` has the variables that torchrun sets as well; the store lives as long as
    this object.
    """

    def __init__(self) -> None:
        store = dist.TCPStore  # type: ignore[attr-defined]  # public, though not in its types
        self._store = store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            # All are on this machine, whatever its name resolves to.
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", _loopback_interface()),
        }


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])
