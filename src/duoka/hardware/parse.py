"""Parser of fleets: the forms of `--gpus`.

Entries of four kinds are joined by commas or "+": a GPU of this machine ("2", "GPU-8932f937"), a
budget ("24GiB"), a card of the catalogue ("RTX4090", "4090") and a declared card with its figures
("MyCard:24GiB,936GB/s"). The text of an entry determines its kind. An entry may have a count before
or after it: "2xRTX4090", "4090*2".

Memory sizes follow the usage of GPU makers: 24G, 24GB and 24GiB are 24 x 1024³ bytes. In speeds, a
GB is 1000³ bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from duoka.base.units import exact_bytes, format_bytes, parse_bytes, parse_memory
from duoka.errors import FleetError, UsageError

from . import catalogue, gpu_generation
from .detect import detect, is_detected
from .device import MAX_DEVICES, RESERVE_BYTES, Device, FleetParts
from .host import host_device
from .links import Way, by_nvlink, from_host, links_of, through_host, ways_between

FORMS = (
    'use GPUs of this machine ("2,3", "all"), cards ("2xRTX4090+1xRTX3090"), a budget for each '
    'GPU ("24GiB,12GiB" or "2x24GiB,12GiB"), virtual GPUs ("virtual:2x24GiB")'
)
HOST_FORM = "host memory is a size and optionally a bandwidth: 64GiB or 64GiB,60GB/s"
# fleet  = ["virtual:"] ("all" | entry (("," | "+") entry)*)
# entry  = [count "x"] device | device "x" count
# device = index | UUID | size | card | name ":" figure ("," figure)*
# figure = size | size "/s" | number "TFLOPs"
#
# A card's figures end at "+", because commas separate them. A bare number is an index, unless it is
# the name of a card ("3090"); a size has a unit.
_MOST_BYTES = 2**50
_SHOWN = 60
_ALL = "all"
_BEFORE = re.compile(r"(?P<count>\d+)\s*[xX×*]\s*(?P<name>.+)", re.ASCII | re.DOTALL)
_AFTER = re.compile(r"(?P<name>[^\d:]*\d[^:]*?)\s*[xX×*]\s*(?P<count>\d+)", re.ASCII)
_SIZE = re.compile(r"[\d.]+\s*(?:[kmgtp]i?b?|b)?", re.ASCII | re.IGNORECASE)

_FEW_BYTES = re.compile(r"\d{1,6}\s*b", re.ASCII | re.IGNORECASE)
_SPEED = re.compile(r"([\d.]+\s*[kmgt]?i?b)\s*(?:/\s*s|ps)", re.ASCII | re.IGNORECASE)
_RATE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([gtp])flop(?:s|/s|ps)?", re.ASCII | re.IGNORECASE)
_RATE_UNITS = {"g": 1e9, "t": 1e12, "p": 1e15}
_RESERVED = frozenset({"virtual", "cuda", "vgpu", "cpu", "gpu"})
_CARD_NAME = re.compile(r"[\w .()/-]{1,40}")


# A device before it gets its final name, and its card; None if it isn't of the catalogue.
_Entry = tuple[Device, catalogue.Card | None]


def read(text: str) -> FleetParts:
    """Parse a fleet in the form of ``--gpus``; `Fleet.parse` describes the forms."""
    body, is_virtual = _split_prefix(text)
    if not body.strip():
        raise FleetError(f"{_quote(text)} lists no device", hint=FORMS)
    entries = [entry.strip() for entry in _split_entries(body)]
    if "" in entries:
        raise UsageError(f"{_quote(text)} has an empty entry", hint=FORMS)
    detected = [entry for entry in entries if _is_detected_entry(entry) or entry.lower() == _ALL]
    if not detected:
        return _declared(entries, "vgpu" if is_virtual else "cuda", text)
    everything = [entry.lower() for entry in entries] == [_ALL]
    if is_virtual or not (everything or all(map(_is_detected_entry, entries))):
        raise UsageError(
            f"{_quote(text)} names a GPU of this machine ({detected[0][:_SHOWN]!r}) beside "
            f"{'virtual' if is_virtual else 'other'} ones",
            hint="use either GPUs of this machine, by index or UUID, or declared ones only; a "
            'budget needs a unit, as in 24GiB, and "all" stands alone',
        )
    return detect(None if everything else ",".join(entries))


def devices_in(text: str) -> tuple[str, list[str]] | None:
    """Split a text of declared devices into its prefix "virtual:" (or "") and one entry per device.

    Return None if the text names GPUs of this machine, or has an empty entry.
    """
    body, is_virtual = _split_prefix(text)
    names: list[str] = []
    for entry in _split_entries(body):
        entry = entry.strip()
        if not entry or _is_detected_entry(entry) or entry.lower() == _ALL:
            return None
        name, count = _split_count(entry)
        # "3090" alone could be the index of a GPU of this machine.
        name = catalogue.find_card(name).name if is_detected(name) else name
        names += [name] * count
    return ("virtual:" if is_virtual else "", names)


def read_host(text: str) -> Device:
    """Parse host memory in the form of ``--host-memory``: "64GiB" or "64GiB,60GB/s"."""
    size, comma, rate = (part.strip() for part in text.partition(","))
    speed = _SPEED.fullmatch(rate)
    if comma and speed is None:
        problem = f"{_quote(rate)} is not a memory bandwidth"
        raise UsageError(f"{_quote(text)} is not host memory: {problem}", hint=HOST_FORM)
    budget = _parse_size(size, text, forms=HOST_FORM)
    rate_bytes = _parse_size(speed[1], text, parse_bytes, HOST_FORM) if speed else None
    return host_device(budget, None if rate_bytes is None else float(rate_bytes))


def format_host(host: Device) -> str:
    """Format host memory so that `read_host` returns the same budget and bandwidth."""
    rate = host.memory_bytes_per_second
    return exact_bytes(host.budget_bytes) + ("" if rate is None else f",{rate / 1e9:.9g}GB/s")


def _split_prefix(text: str) -> tuple[str, bool]:
    """Split off the prefix "virtual:"; return the rest, and True if the prefix was present."""
    head, colon, rest = text.partition(":")
    is_virtual = bool(colon) and head.strip().lower() == "virtual"
    return (rest if is_virtual else text), is_virtual


def _is_detected_entry(entry: str) -> bool:
    """Return True if an entry names a GPU of this machine: "2", but not "3090", which is a card."""
    return is_detected(entry) and not catalogue.is_card(entry)


def _split_count(entry: str) -> tuple[str, int]:
    """Split an entry into name and count: "2xRTX4090", "4090*2"."""
    matches = [m for pattern in (_BEFORE, _AFTER) if (m := pattern.fullmatch(entry))]
    if not matches or catalogue.is_card(entry):  # "GTX 1060" is no multiple of "GT"
        return entry, 1
    # "4090*2" matches both patterns; the smaller number is the count.
    match = min(matches, key=lambda match: (len(match["count"]), match["count"]))
    return match["name"], _parse_count(match["count"], entry)


def _split_entries(body: str) -> Iterator[str]:
    """Split at "+" and commas; commas between a colon and the next "+" belong to a card."""
    # "24GiB,MyCard:12GiB,936GB/s+RTX4090" has two terms. In the first one the text up to the colon
    # is "24GiB,MyCard", of which only the last name takes the figures after the colon:
    # "24GiB", "MyCard:12GiB,936GB/s", "RTX4090".
    for term in body.split("+"):
        head, colon, figures = term.partition(":")
        *entries, card = head.split(",")
        yield from entries
        yield f"{card}:{figures}" if colon else card


def _declared(entries: list[str], kind: str, text: str) -> FleetParts:
    """Make the devices of declared entries, named by `kind` ("cuda" or "vgpu"), and their links."""
    declared: list[_Entry] = []
    for entry in entries:
        name, count = _split_count(entry)
        if count > MAX_DEVICES - len(declared):
            raise FleetError(
                f"{_quote(text)} is more than {MAX_DEVICES} devices", hint="list fewer devices"
            )
        declared += [_parse_entry(name, text)] * count
    devices = [replace(device, name=f"{kind}:{i}") for i, (device, _) in enumerate(declared)]
    cards = [(device.name, card) for device, (_, card) in zip(devices, declared, strict=True)]
    return tuple(devices), tuple(links_of(ways_between(cards, _way)))


def _parse_count(digits: str, entry: str) -> int:
    # Long texts of digits are refused before int(), which takes long for a million digits.
    count = int(digits) if len(digits) < 10 else MAX_DEVICES + 1
    if count == 0:
        raise FleetError(f"{_quote(entry)} is no device", hint=FORMS)
    return count


def _parse_entry(entry: str, text: str) -> _Entry:
    """Parse a budget, a card of the catalogue or a declared card; `text` is the whole fleet."""
    if ":" in entry:
        return _parse_declared_card(entry), None
    # "3090 Ti" is a card's name, although "Ti" could mean tebibytes. "910B" is more likely a card's
    # name than a size in bytes.
    if _SIZE.fullmatch(entry) and not (catalogue.is_card(entry) or _FEW_BYTES.fullmatch(entry)):
        return Device(name="cuda", budget_bytes=_parse_size(entry, text)), None
    card = catalogue.find_card(entry)
    device = replace(
        _card(card.name, card.usable_bytes),
        **card.speeds,
        workspace_bytes=gpu_generation.workspace_bytes(card.compute_capability),
        host_bytes_per_second=from_host(*_connector(card)),
    )
    return device, card


def _connector(card: catalogue.Card) -> tuple[int | None, int | None]:
    """Return the PCIe generation and lanes of a card; (None, None) if unknown."""
    return (None, None) if card.pcie is None else (card.pcie.generation, card.pcie.lanes)


def _parse_declared_card(entry: str) -> Device:
    """Parse "MyCard:24GiB,936GB/s,71TFLOPs"; the figures may come in any order."""
    name, _, figures = entry.partition(":")
    name = name.strip()
    if name.lower() in ("cuda", "vgpu"):
        hint = f"use the indices that nvidia-smi shows, such as 0,1; {FORMS}"
        raise UsageError(f"{_quote(entry)} is a PyTorch device name", hint=hint)
    if not _CARD_NAME.fullmatch(name) or name.lower() in _RESERVED:
        raise UsageError(
            f"{_quote(name)} is not a valid card name", hint=f"{catalogue.DECLARING}; {FORMS}"
        )
    figures_of: dict[str, float] = {}
    for part in figures.split(","):
        what, value = _parse_figure(part.strip(), entry)
        if what in figures_of:
            raise UsageError(
                f"{_quote(entry)} has two figures for its {what.replace('_', ' ')}",
                hint='join cards with "+": "MyCard:24GiB+OtherCard:12GiB"',
            )
        figures_of[what] = value
    if "memory" not in figures_of:
        raise UsageError(f"{_quote(entry)} has no memory size", hint=catalogue.DECLARING)
    return replace(
        _card(name, int(figures_of["memory"])),
        memory_bytes_per_second=figures_of.get("memory_speed"),
        flops_per_second=figures_of.get("rate"),
    )


def _parse_figure(part: str, entry: str) -> tuple[str, float]:
    """Return ("rate", FLOPs/s), ("memory_speed", bytes/s) or ("memory", bytes) of a figure."""
    if match := _RATE.fullmatch(part):
        if rate := float(match[1]) * _RATE_UNITS[match[2].lower()]:
            return "rate", rate
    elif match := _SPEED.fullmatch(part):
        return "memory_speed", float(_parse_size(match[1], entry, parse_bytes))
    elif _SIZE.fullmatch(part):
        return "memory", _parse_size(part, entry)
    raise UsageError(
        f"{_quote(entry)} has {_quote(part)}, which is not a memory size (24GiB), memory "
        "bandwidth (936GB/s) or compute rate (71TFLOPs)",
        hint=f'{catalogue.DECLARING}; join several cards with "+"',
    )


def _card(product: str, memory_bytes: int) -> Device:
    """Return the device of a card, its budget being the memory minus `RESERVE_BYTES`."""
    if memory_bytes <= RESERVE_BYTES:
        raise FleetError(
            f"{product} has {format_bytes(memory_bytes)}, of which CUDA reserves "
            f"{format_bytes(RESERVE_BYTES)}",
            hint='use a budget without a card name: "512MiB"',
        )
    return Device(
        name="cuda",
        budget_bytes=memory_bytes - RESERVE_BYTES,
        product=product,
        memory_bytes=memory_bytes,
        reserve_bytes=RESERVE_BYTES,
    )


def _parse_size(
    size: str, text: str, parse: Callable[[str], int] = parse_memory, forms: str = FORMS
) -> int:
    """Parse a size of at most `_MOST_BYTES`; errors name the whole text and what it should be."""
    try:
        num_bytes = parse(size)
    except UsageError as error:
        kind = "a fleet" if forms == FORMS else "host memory"
        raise UsageError(
            f"{_quote(text)} is not {kind}: {error}", hint=f"{error.hint}; {forms}"
        ) from None
    if num_bytes > _MOST_BYTES:
        raise UsageError(
            f"{_quote(text)}: {_quote(size)} is more than {format_bytes(_MOST_BYTES)}", hint=forms
        )
    return num_bytes


def _way(source: catalogue.Card | None, target: catalogue.Card | None) -> Way | None:
    """Return the connection between two cards in one machine; None unless both are known cards.

    Equal cards with built-in NVLink are assumed to be connected: by all their links through a
    switch, by one link in a mesh. An NVLink bridge is an optional part, assumed to be absent.
    """
    if source is None or target is None:
        return None
    link = source.nvlink
    if link is not None and source is target and link.form != "bridge":
        share = 1 if link.form == "switch" else link.num_links
        return by_nvlink(link.gb_per_second * 1e9 / share)
    return through_host(_connector(source), _connector(target))


def _quote(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def with_more(text: str, devices: Sequence[Device], entry: str, count: int = 1) -> str:
    """Return the text of a fleet with `count` more devices of an entry at its end.

    `devices` are those of the fleet; a text that names GPUs of this machine becomes their budgets.
    """
    prefix, entries = _entries_of(text, devices)
    return prefix + _join_entries([*entries, *[entry] * count])


def with_replaced(text: str, devices: Sequence[Device], index: int, entry: str) -> str:
    """Return the text of a fleet with another entry instead of the device at `index`."""
    prefix, entries = _entries_of(text, devices)
    entries[index] = entry
    return prefix + _join_entries(entries)


def _entries_of(text: str, devices: Sequence[Device]) -> tuple[str, list[str]]:
    """Split a fleet's text into its prefix and an entry for each device.

    GPUs of this machine become entries with their exact budgets.
    """
    declared = devices_in(text)
    if declared is not None:
        return declared
    virtual = any(device.name.startswith("vgpu") for device in devices)
    return "virtual:" if virtual else "", [exact_bytes(device.budget_bytes) for device in devices]


def _join_entries(entries: Sequence[str]) -> str:
    groups = [(entry, len(list(group))) for entry, group in groupby(entries)]
    texts = [entry if count == 1 else f"{count}x{entry}" for entry, count in groups]
    # After a card with figures, a comma would continue the figures, so "+" joins the entries.
    return ("+" if any(":" in entry for entry in entries) else ",").join(texts)
