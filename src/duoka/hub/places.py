"""Places: where the Hub is, and who may see the token."""

from __future__ import annotations

from urllib.parse import urlsplit

from huggingface_hub import HfApi

HOME = "https://huggingface.co"


def endpoint() -> str:
    """Where the Hub is, without a name and password that HF_ENDPOINT may hold."""
    return plain(raw_endpoint())


def raw_endpoint() -> str:
    """Where the Hub is, to be asked and never to be shown."""
    return HfApi().endpoint


def api_url(path: str) -> str:
    """The address of something that the Hub's API tells."""
    return f"{raw_endpoint()}/api/{path}"


def plain(url: str) -> str:
    """An address as it may be shown: without password and signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def is_trusted(url: str) -> bool:
    """Whether the token may go there: to the Hub alone."""
    return origin(url) in (origin(raw_endpoint()), origin(HOME))


def origin(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port of an address.

    Raises
    ------
    ValueError
        If the port is none.
    """
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, (parts.hostname or "").lower(), port
