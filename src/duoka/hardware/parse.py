"""Parser of fleets: the forms of `--gpus`, and transformers' ``max_memory``.

Entries of four kinds are joined by commas or "+": a GPU of this machine ("2", "GPU-8932f937"), a
budget ("24GiB"), a card of the catalogue ("RTX4090", "4090") and a card with its figures
("MyCard:24GiB,936GB/s"). The kind follows from the entry alone. A count stands in front or behind:
"2xRTX4090", "4090*2".

Memory is written as by its makers: 24G, 24GB and 24GiB are 24 x 1024³ bytes. In speeds, and in
sizes of ``max_memory``, a GB is 1000³ bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from duoka.base.units import exact_bytes, format_bytes, parse_bytes, parse_memory
from duoka.errors import FleetError, UsageError

from . import catalogue, gpu_generation
from .detect import detect, is_detected
from .device import MAX_DEVICES, RESERVE_BYTES, Device, FleetParts
from .links import Way, by_nvlink, from_host, links_of, through_host, ways_between

FORMS = (
    'use GPUs of this machine ("2,3", "all"), cards ("2xRTX4090+1xRTX3090"), a budget for each '
    'GPU ("24GiB,12GiB" or "2x24GiB,12GiB"), virtual GPUs ("virtual:2x24GiB")'
)
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
_BEHIND = re.compile(r"(?P<name>[^\d:]*\d[^:]*?)\s*[xX×*]\s*(?P<count>\d+)", re.ASCII)
_SIZE = re.compile(r"[\d.]+\s*(?:[kmgtp]i?b?|b)?", re.ASCII | re.IGNORECASE)

_FEW_BYTES = re.compile(r"\d{1,6}\s*b", re.ASCII | re.IGNORECASE)
_SPEED = re.compile(r"([\d.]+\s*[kmgt]?i?b)\s*(?:/\s*s|ps)", re.ASCII | re.IGNORECASE)
_RATE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([gtp])flop(?:s|/s|ps)?", re.ASCII | re.IGNORECASE)
_RATE_UNITS = {"g": 1e9, "t": 1e12, "p": 1e15}
_RESERVED = frozenset({"virtual", "cuda", "vgpu", "cpu", "gpu"})
_CARD_NAME = re.compile(r"[\w .()/-]{1,40}")
_MAX_MEMORY_GPU = re.compile(r"(?:(?:cuda:)?|(?P<virtual>vgpu:))(?P<number>[0-9]{1,4})", re.ASCII)
_ZERO_SIZE = re.compile(r"0+(\.0+)?\s*[A-Za-z]*", re.ASCII)
_MAX_MEMORY_FORM = '{0: "10GiB", 1: "20GiB", "cpu": "30GiB"} is one'


# A device without its final name, and its card if it is one of the catalogue.
_Entry = tuple[Device, catalogue.Card | None]


def read(text: str) -> FleetParts:
    """Parse a fleet; `Fleet.parse` describes the forms."""
    body, is_virtual = _body(text)
    if not body.strip():
        raise FleetError(f"{_short(text)} lists no device", hint=FORMS)
    entries = [entry.strip() for entry in _entries(body)]
    if "" in entries:
        raise UsageError(f"{_short(text)} has an empty entry", hint=FORMS)
    detected = [entry for entry in entries if _is_here(entry) or entry.lower() == _ALL]
    if not detected:
        return _declared(entries, "vgpu" if is_virtual else "cuda", text)
    everything = [entry.lower() for entry in entries] == [_ALL]
    if is_virtual or not (everything or all(map(_is_here, entries))):
        raise UsageError(
            f"{_short(text)} names a GPU of this machine ({detected[0][:_SHOWN]!r}) beside "
            f"{'virtual' if is_virtual else 'other'} ones",
            hint="use either GPUs of this machine, by index or UUID, or declared ones only; a "
            'budget needs a unit, as in 24GiB, and "all" stands alone',
        )
    return detect(None if everything else ",".join(entries))


def devices_in(text: str) -> tuple[str, list[str]] | None:
    """Split a text of declared devices into its prefix and an entry for each device.

    Return None for GPUs of this machine, and for an invalid text.
    """
    body, is_virtual = _body(text)
    names: list[str] = []
    for entry in _entries(body):
        entry = entry.strip()
        if not entry or _is_here(entry) or entry.lower() == _ALL:
            return None
        name, count = _counted(entry)
        # "3090" alone could be the index of a GPU of this machine.
        name = catalogue.find_card(name).name if is_detected(name) else name
        names += [name] * count
    return ("virtual:" if is_virtual else "", names)


def _body(text: str) -> tuple[str, bool]:
    """Split off the prefix "virtual:"; return the entries' text, and True for virtual GPUs."""
    head, colon, rest = text.partition(":")
    is_virtual = bool(colon) and head.strip().lower() == "virtual"
    return (rest if is_virtual else text), is_virtual


def _is_here(entry: str) -> bool:
    """Return True for a GPU of this machine: "2", but not "3090", a card."""
    return is_detected(entry) and not catalogue.is_card(entry)


def _counted(entry: str) -> tuple[str, int]:
    """Split an entry into name and count: "2xRTX4090", "4090*2"."""
    matches = [m for pattern in (_BEFORE, _BEHIND) if (m := pattern.fullmatch(entry))]
    if not matches or catalogue.is_card(entry):  # "GTX 1060" is no multiple of "GT"
        return entry, 1
    # "4090*2" matches both patterns; the smaller count is meant.
    match = min(matches, key=lambda match: (len(match["count"]), match["count"]))
    return match["name"], _count(match["count"], entry)


def _entries(body: str) -> Iterator[str]:
    """Split at "+" and commas; commas between a colon and the next "+" belong to a card."""
    # "24GiB,MyCard:12GiB,936GB/s+RTX4090" has two terms. In the first one the text up to the colon
    # is "24GiB,MyCard", of which only the last name takes the figures behind the colon:
    # "24GiB", "MyCard:12GiB,936GB/s", "RTX4090".
    for term in body.split("+"):
        head, colon, figures = term.partition(":")
        *entries, card = head.split(",")
        yield from entries
        yield f"{card}:{figures}" if colon else card


def _declared(entries: list[str], kind: str, text: str) -> FleetParts:
    declared: list[_Entry] = []
    for entry in entries:
        name, count = _counted(entry)
        if count > MAX_DEVICES - len(declared):
            raise FleetError(
                f"{_short(text)} is more than {MAX_DEVICES} devices", hint="list fewer devices"
            )
        declared += [_entry(name, text)] * count
    devices = [replace(device, name=f"{kind}:{i}") for i, (device, _) in enumerate(declared)]
    cards = [(device.name, card) for device, (_, card) in zip(devices, declared, strict=True)]
    return tuple(devices), tuple(links_of(ways_between(cards, _way)))


def _count(digits: str, entry: str) -> int:
    # Digits are limited first: int() of a million digits takes long.
    count = int(digits) if len(digits) < 10 else MAX_DEVICES + 1
    if count == 0:
        raise FleetError(f"{_short(entry)} is no device", hint=FORMS)
    return count


def _entry(entry: str, text: str) -> _Entry:
    if ":" in entry:
        return _own_card(entry), None
    # "3090 Ti" is a name, too: "Ti" could be tebibytes.
    # "910B" is rather a card's name than a size.
    if _SIZE.fullmatch(entry) and not (catalogue.is_card(entry) or _FEW_BYTES.fullmatch(entry)):
        return Device(name="cuda", budget_bytes=_size(entry, text)), None
    card = catalogue.find_card(entry)
    device = replace(
        _card(card.name, card.usable_bytes),
        **card.speeds,
        workspace_bytes=gpu_generation.workspace_bytes(card.compute_capability),
        host_bytes_per_second=from_host(*_connector(card)),
    )
    return device, card


def _connector(card: catalogue.Card) -> tuple[int | None, int | None]:
    """Return PCIe generation and lanes."""
    return (None, None) if card.pcie is None else (card.pcie.generation, card.pcie.lanes)


def _own_card(entry: str) -> Device:
    """Read "MyCard:24GiB,936GB/s,71TFLOPs"; the parts may come in any order."""
    name, _, figures = entry.partition(":")
    name = name.strip()
    if name.lower() in ("cuda", "vgpu"):
        raise UsageError(
            f"{_short(entry)} is a PyTorch device name",
            hint=f"use the indices that nvidia-smi shows, such as 0,1; {FORMS}",
        )
    if not _CARD_NAME.fullmatch(name) or name.lower() in _RESERVED:
        raise UsageError(
            f"{_short(name)} is not a valid card name", hint=f"{catalogue.DECLARING}; {FORMS}"
        )
    figures_of: dict[str, float] = {}
    for part in figures.split(","):
        what, value = _figure(part.strip(), entry)
        if what in figures_of:
            raise UsageError(
                f"{_short(entry)} has two figures for its {what.replace('_', ' ')}",
                hint='join cards with "+": "MyCard:24GiB+OtherCard:12GiB"',
            )
        figures_of[what] = value
    if "memory" not in figures_of:
        raise UsageError(f"{_short(entry)} has no memory size", hint=catalogue.DECLARING)
    return replace(
        _card(name, int(figures_of["memory"])),
        memory_bytes_per_second=figures_of.get("memory_speed"),
        flops_per_second=figures_of.get("rate"),
    )


def _figure(part: str, entry: str) -> tuple[str, float]:
    if match := _RATE.fullmatch(part):
        if rate := float(match[1]) * _RATE_UNITS[match[2].lower()]:
            return "rate", rate
    elif match := _SPEED.fullmatch(part):
        return "memory_speed", float(_size(match[1], entry, parse_bytes))
    elif _SIZE.fullmatch(part):
        return "memory", _size(part, entry)
    raise UsageError(
        f"{_short(entry)} has {_short(part)}, which is not a memory size (24GiB), memory "
        "bandwidth (936GB/s) or compute rate (71TFLOPs)",
        hint=f'{catalogue.DECLARING}; join several cards with "+"',
    )


def _card(product: str, memory_bytes: int) -> Device:
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


def _size(size: str, text: str, parse: Callable[[str], int] = parse_memory) -> int:
    try:
        num_bytes = parse(size)
    except UsageError as error:
        raise UsageError(
            f"{_short(text)} is not a fleet: {error}", hint=f"{error.hint}; {FORMS}"
        ) from None
    if num_bytes > _MOST_BYTES:
        raise UsageError(
            f"{_short(text)}: {_short(size)} is more than {format_bytes(_MOST_BYTES)}", hint=FORMS
        )
    return num_bytes


def _way(source: catalogue.Card | None, target: catalogue.Card | None) -> Way | None:
    """Return the way between two cards of the catalogue in one machine.

    Equal cards with built-in NVLinks are assumed to be joined: by all links over a switch, by one
    link in a mesh. A bridge is an extra part, and assumed to be absent.
    """
    if source is None or target is None:
        return None
    link = source.nvlink
    if link is not None and source is target and link.form != "bridge":
        share = 1 if link.form == "switch" else link.num_links
        return by_nvlink(link.gb_per_second * 1e9 / share)
    return through_host(_connector(source), _connector(target))


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def with_more(text: str, devices: Sequence[Device], entry: str, count: int = 1) -> str:
    """Write a fleet with more devices at its end."""
    prefix, entries = _entries_of(text, devices)
    return prefix + _joined([*entries, *[entry] * count])


def with_replaced(text: str, devices: Sequence[Device], index: int, entry: str) -> str:
    """Write a fleet with an entry in the place of a device."""
    prefix, entries = _entries_of(text, devices)
    entries[index] = entry
    return prefix + _joined(entries)


def _entries_of(text: str, devices: Sequence[Device]) -> tuple[str, list[str]]:
    """Split a fleet's text into its prefix and an entry for each device."""
    declared = devices_in(text)
    if declared is not None:
        return declared
    virtual = any(device.name.startswith("vgpu") for device in devices)
    return "virtual:" if virtual else "", [exact_bytes(device.budget_bytes) for device in devices]


def _joined(entries: Sequence[str]) -> str:
    groups = [(entry, len(list(group))) for entry, group in groupby(entries)]
    texts = [entry if count == 1 else f"{count}x{entry}" for entry, count in groups]
    # Commas behind a card with figures would belong to the card.
    return ("+" if any(":" in entry for entry in entries) else ",").join(texts)


def read_max_memory(max_memory: object) -> tuple[Device, ...]:
    """Parse ``max_memory``; devices with 0 are left out."""
    if not isinstance(max_memory, Mapping):
        raise UsageError(
            f"max_memory must map devices to sizes, not be of type {type(max_memory).__name__}",
            hint=_MAX_MEMORY_FORM,
        )
    sizes = ((key, _max_memory_size(key, value)) for key, value in max_memory.items())
    return tuple(Device(name=_max_memory_name(k), budget_bytes=size) for k, size in sizes if size)


def _max_memory_name(key: object) -> str:
    text = str(key) if isinstance(key, str) or type(key) is int else repr(key)
    if match := _MAX_MEMORY_GPU.fullmatch(text):
        return f"{'vgpu' if match['virtual'] else 'cuda'}:{int(match['number'])}"
    if text == "cpu":
        return text
    if text == "disk":
        raise FleetError(
            "max_memory contains disk, and duoka doesn't offload to disk", hint="omit it"
        )
    raise FleetError(
        f"max_memory names {text[:60]!r}, which is not a device", hint=_MAX_MEMORY_FORM
    )


def _max_memory_size(key: object, value: object) -> int:
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, str):
        return 0 if _ZERO_SIZE.fullmatch(value.strip()) else parse_bytes(value)
    raise UsageError(
        f"max_memory of {str(key)[:60]!r} is {str(value)[:60]}, which is not a size",
        hint="give bytes as a number, or a string such as 10GiB or 10GB",
    )
