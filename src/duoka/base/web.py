"""Fetch images from the web within limits of size and time, also from untrusted URLs."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

from huggingface_hub.errors import HfHubHTTPError

from duoka.errors import UsageError

from .units import format_bytes

# httpx or its successor, whichever this version of huggingface_hub is built on.
http: Any = sys.modules[HfHubHTTPError.__mro__[1].__module__.partition(".")[0]]
_SILENT_SECONDS = 15
_MOST_REDIRECTS = 3
# IPv6: the addresses that are assigned on the internet, and those that embed an IPv4 address.
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Azure's platform services for virtual machines: formally a public address, but not a public host.
_AZURE = ipaddress.IPv4Address("168.63.129.16")


async def fetch(
    address: str, *, most_bytes: int, public_only: bool = False, most_seconds: float | None = None
) -> bytes:
    """Fetch the content of an http or https address.

    Parameters
    ----------
    address : str
    most_bytes : int
    public_only : bool
        True for an untrusted address. Then only hosts of the public internet are reached: all IP
        addresses of the host are checked, and the connection uses a checked address, so that a
        second lookup can't return another one. Redirects are checked in the same way. Proxies of
        the environment are not used, because they look names up themselves. Two cases are not
        recognized: a network's own NAT64 prefixes, and public addresses of this machine.
    most_seconds : float, optional
        Limit for the whole transfer. In any case, 15 seconds without data end it.

    Raises
    ------
    UsageError
        If the content can't be fetched within the limits.
    """
    try:
        async with asyncio.timeout(most_seconds):
            return await _follow(address, most_bytes, public_only)
    except http.TimeoutException as error:
        reason = f"the server sent nothing for {_SILENT_SECONDS} seconds"
        raise _fetch_error(address, reason) from error
    except TimeoutError as error:
        raise _fetch_error(
            address, f"the transfer takes more than {most_seconds:g} seconds"
        ) from error
    except (http.HTTPError, http.InvalidURL, ValueError, OSError) as error:
        raise _fetch_error(address, str(error) or type(error).__name__) from error


def is_public(text: str) -> bool:
    """Return True if an IP address belongs to the public internet."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_public(str(ipaddress.IPv4Address(address.packed[-4:])))
        if address.ipv4_mapped is not None:
            return is_public(str(address.ipv4_mapped))
        if address not in _GLOBAL_UNICAST or address.sixtofour is not None:
            return False
    return (
        address.is_global
        and address != _AZURE
        and not (address.is_multicast or address.is_reserved)
    )


async def _follow(address: str, most_bytes: int, public_only: bool) -> bytes:
    """Fetch an address, following up to `_MOST_REDIRECTS` redirects."""
    url = http.URL(address)
    options = {"timeout": _SILENT_SECONDS, "trust_env": not public_only, "verify": _tls_context()}
    async with http.AsyncClient(**options) as client:
        for _ in range(_MOST_REDIRECTS + 1):
            response = await _open(client, url, public_only)
            try:
                if not response.has_redirect_location:
                    return await _read_content(response, most_bytes)
                url = url.join(response.headers["Location"])
            finally:
                await response.aclose()
    raise ValueError(f"the server redirects more than {_MOST_REDIRECTS} times")


async def _open(client: Any, url: Any, public_only: bool) -> Any:
    """Send a request, and return the response without its content."""
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{str(url)[:80]!r} is not an http or https URL")
    headers = {"Host": url.netloc.decode("ascii"), "Accept-Encoding": "identity"}
    if not public_only:
        return await client.send(client.build_request("GET", url, headers=headers), stream=True)
    name = url.raw_host.decode("ascii")
    addresses = await _public_addresses(name)
    for place in addresses:
        request = client.build_request(
            "GET", url.copy_with(host=place), headers=headers, extensions={"sni_hostname": name}
        )
        try:
            return await client.send(request, stream=True)
        except (http.ConnectError, http.ConnectTimeout):
            if place == addresses[-1]:
                raise
    raise AssertionError("a name that is known has an address")


@cache  # reading all certificates takes tens of milliseconds
def _tls_context() -> ssl.SSLContext:
    context: ssl.SSLContext = http.create_ssl_context()
    return context


@cache
def _lookup_threads() -> ThreadPoolExecutor:
    """Return threads for name lookups, which block: a timeout can't interrupt them."""
    return ThreadPoolExecutor(4, "duoka-lookup")


async def _public_addresses(name: str) -> list[str]:
    """Look up the IP addresses of a host; raise ValueError unless all are public."""
    look_up = partial(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM)
    infos = await asyncio.get_running_loop().run_in_executor(_lookup_threads(), look_up)
    addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
    if not all(map(is_public, addresses)):
        raise ValueError(f"{name[:80]} has an address outside the public internet")
    return addresses


async def _read_content(response: Any, most_bytes: int) -> bytes:
    if not response.is_success:
        raise ValueError(f"the server answers with status {response.status_code}")
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > most_bytes:
            raise ValueError(
                f"it has more than {format_bytes(most_bytes)}; larger files are not read"
            )
    return bytes(content)


def _fetch_error(address: str, reason: str) -> UsageError:
    return UsageError(
        f"the image {address[:200]!r} can't be fetched: {reason}",
        hint="check the URL, or download the image and give the file",
    )
