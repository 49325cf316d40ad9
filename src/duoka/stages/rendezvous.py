"""The meeting point of processes for `torch.distributed`."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist


class Rendezvous:
    """A store for worker processes of this machine, held by their parent.

    The store binds its port before any worker starts: a port that is merely free could be taken by
    another program meanwhile. `environment` has the variables for the workers, as torchrun sets
    them. The store lives as long as this object.
    """

    def __init__(self) -> None:
        store = dist.TCPStore  # type: ignore[attr-defined]  # public, though not in its types
        self._store = store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            # All workers are on this machine, whatever its host name resolves to.
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", _loopback_interface()),
        }


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])
