"""The address of a server, and the API key for its clients."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

from duoka.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of a server, and the API key for its clients.

    Parameters
    ----------
    host : str
    port : int
        0 selects a free port.
    key : str, optional
        The API key that clients must send; None if no key is required.
    origins : tuple of str
        Origins whose web pages may read responses, such as "https://example.org"; "*" for all.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = None
    origins: tuple[str, ...] = ()

    @property
    def is_local(self) -> bool:
        """True if the address can be reached only from this machine."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def access(self) -> dict[str, Any]:
        """The arguments of `make_app` that restrict the access to the server."""
        is_local = self.is_local and self.key is None
        return {"key": self.key, "is_local": is_local, "origins": self.origins}

    def bind(self) -> socket.socket:
        """Bind a TCP socket to the address, without listening yet.

        Raises
        ------
        UsageError
            If the address is in use or can't be bound.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # asyncio disables Nagle's algorithm only if the protocol is set explicitly.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((self.host, self.port))
        except (OSError, OverflowError) as error:
            bound.close()
            why = getattr(error, "strerror", None) or error
            hint = "use another --port, or --port 0 for any free port"
            text = f"{self.host}:{self.port} is not available: {why}"
            raise UsageError(text, hint=hint) from error
        return bound


def format_url(host: str, port: int) -> str:
    """Return the URL of a server; an IPv6 address is put in brackets."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
