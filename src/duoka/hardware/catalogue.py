"""Catalogue: published figures of common GPUs, from `gpus.toml`; independent of this machine."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from duoka.base.serialization import from_dict
from duoka.base.units import GIB
from duoka.errors import UsageError

_MOST_SHOWN = 6
_CUTOFF = 0.5  # below this, difflib's nearest name is unrelated
_NOISE = re.compile(r"[\s_-]+")
_MEMORY = re.compile(r"\b(\d{1,4})\s*gi?b?\b", re.ASCII | re.IGNORECASE)
_MAKERS = re.compile(r"^(?:nvidia|geforce|tesla)+")
DECLARING = (
    'declare a card with its figures: --gpus "MyCard:24GiB,936GB/s,71TFLOPs" (speeds are '
    'optional), or only a budget: "24GiB"'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pcie:
    """A card's connector."""

    generation: int
    lanes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvlink:
    """A card's NVLinks: their topology, and total GB/s in one direction."""

    form: Literal["switch", "mesh", "bridge"]
    gb_per_second: float
    num_links: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU model; `gpus.toml` explains the fields."""

    name: str
    aliases: tuple[str, ...] = ()
    products: tuple[str, ...]
    memory_gib: float
    usable_gib: float
    usable_seen: str | None = None
    bandwidth_gb_per_second: float
    pcie: Pcie | None = None
    nvlink: Nvlink | None = None
    compute_capability: tuple[int, int] | None = None
    tflops: dict[str, float]
    sources: tuple[str, ...]

    @property
    def usable_bytes(self) -> int:
        """Memory offered by CUDA on an empty card."""
        return int(self.usable_gib * GIB)

    @property
    def speeds(self) -> dict[str, Any]:
        """Fields of `Device`: dense FLOPs in 16 and 32 bit, and the memory's bytes per second."""
        rates = self.tflops
        return {
            "memory_bytes_per_second": self.bandwidth_gb_per_second * 1e9,
            "flops_per_second": 1e12 * rates.get("bf16", rates.get("fp16", rates["fp32"])),
            "float32_flops_per_second": 1e12 * rates["fp32"],
            "has_bfloat16": "bf16" in rates,
        }


@cache
def cards() -> tuple[Card, ...]:
    """Return all cards, in the file's order."""
    # `from_dict` needs every field; these are absent for most cards.
    absent = dict.fromkeys(("usable_seen", "pcie", "nvlink", "compute_capability"))
    text = files(__package__).joinpath("gpus.toml").read_text(encoding="utf-8")
    return tuple(
        from_dict(Card, {"aliases": [], **absent, **entry}) for entry in tomllib.loads(text)["gpu"]
    )


def is_card(text: str) -> bool:
    """Return True if the text is the name of a card, perhaps with its memory."""
    return _find_known_card(text) is not None


def find_card(text: str) -> Card:
    """Find a card by name; for an unknown one raise UsageError with the nearest names."""
    name = text.strip()
    card = _find_known_card(name)
    if card is not None:
        return card
    words = _split_words(name)
    matches = [
        card.name
        for card in cards()
        if any(_split_words(alias)[: len(words)] == words for alias in (card.name, *card.aliases))
    ]
    if words and matches:
        num_hidden = len(matches) - _MOST_SHOWN
        listed = ", ".join(matches[:_MOST_SHOWN])
        listed += f" and {num_hidden} more" if num_hidden > 0 else ""
        raise UsageError(
            f"{name[:60]!r} matches several GPUs: {listed}", hint="use one of these names"
        )
    near = difflib.get_close_matches(_key(name)[:60], _by_name(), n=_MOST_SHOWN, cutoff=_CUTOFF)
    names = list(dict.fromkeys(_by_name()[match].name for match in near))[:3]
    nearest = f"; similar names: {', '.join(names)}" if names else ""
    hint = f'a memory size needs a unit: "{name}GiB"' if name.isdecimal() else DECLARING
    raise UsageError(f"no GPU {name[:60]!r} is in the catalogue{nearest}", hint=hint)


# Names are compared by a key, and then word by word:
#
#   "NVIDIA GeForce RTX 4090", "rtx-4090"   key "rtx4090"
#   "A100 80G"                              key of "A100" + "80GB", as "A100" is several cards
#   "RTX 6000"                              words "rtx 6000" begin two cards: refused with both
def _find_known_card(text: str) -> Card | None:
    """Find a card by name, perhaps with its memory: "A100 80G", "24GB RTX 3090"."""
    cards_by_name = _by_name()
    card = cards_by_name.get(_key(text))
    match = _MEMORY.search(text) if card is None else None
    if match is None:
        return card
    name, size = text[: match.start()] + text[match.end() :], match[1]
    plain = cards_by_name.get(_key(name))
    holds = plain is not None and plain.memory_gib == int(size)
    return plain if holds else cards_by_name.get(_key(f"{name}{size}GB"))


def of_product(product: str, total_bytes: int | None) -> Card | None:
    """Find a card by NVML's name, the nearest in memory of several; None if it isn't listed."""
    key = _key(product)
    matches = [card for card in cards() if any(_key(name) == key for name in card.products)]
    if total_bytes is None or len(matches) < 2:
        return matches[0] if matches else None
    return min(matches, key=lambda card: abs(card.memory_gib * GIB - total_bytes))


def _key(name: str) -> str:
    """Convert a name to lower case, without spaces, hyphens and the maker's name."""
    bare = _NOISE.sub("", name.strip().lower())
    return _MAKERS.sub("", bare) or bare


def _split_words(name: str) -> list[str]:
    """Split a name into words; letters after a number start a new word: "4060Ti" is "4060 Ti"."""
    words = re.findall(r"[a-z]*\d+(?:gb)?|[a-z]+", name.lower())
    return [word for word in words if word not in ("nvidia", "geforce", "tesla")]


@cache
def _by_name() -> dict[str, Card]:
    return {_key(name): card for card in cards() for name in (card.name, *card.aliases)}
