"""The address of a server, and the key of its clients."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from duoka.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of a server, and the key of its clients.

    Parameters
    ----------
    host : str
    port : int
        0 for any that is free.
    key : str, optional
        The key that clients have to send.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = None

    @property
    def is_local(self) -> bool:
        """Return True if only this machine reaches the address."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def bind(self) -> socket.socket:
        """Take the address.

        Raises
        ------
        UsageError
            If it can't be had.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # asyncio turns Nagle's algorithm off where the protocol is named.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((self.host, self.port))
        except (OSError, OverflowError) as error:
            bound.close()
            why = getattr(error, "strerror", None) or error
            raise UsageError(
                f"{self.host}:{self.port} is not available: {why}",
                hint="use another --port, or --port 0 for any free port",
            ) from error
        return bound


def format_url(host: str, port: int) -> str:
    """Return the URL of a server; the address of IPv6 is in brackets."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
