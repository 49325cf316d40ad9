"""What must not be shown: tokens and passwords, wherever they got into a text.

Whoever reports an error copies it into a public place.
"""

from __future__ import annotations

import os
import re

_SHOWN = "***"
_ENVIRONMENT = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_SHORTEST = 8  # a shorter value, such as "0", would be found everywhere

_PATTERNS = (
    # Tokens of the Hub, and of the services that commonly lie in the same environment.
    re.compile(r"\b(hf_|api_org_|ghp_)[A-Za-z0-9]{12,}"),
    re.compile(r"\b(github_pat_|glpat-|sk-)[A-Za-z0-9_-]{16,}"),
    # Headers, as they are written into logs and as Python prints them: 'Authorization': 'Bearer x'
    re.compile(
        r"((?:proxy-)?authorization['\"]?\s*[:=]\s*b?['\"]?(?:(?:bearer|basic|token)\s+)?)"
        r"[^\s'\",}]+",
        re.IGNORECASE,
    ),
    re.compile(r"(\bbearer\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE),
    re.compile(r"((?:set-)?cookie['\"]?\s*[:=]\s*b?['\"]?)[^\r\n'\"]+", re.IGNORECASE),
    # Addresses: https://user:password@host, and signed ones.
    re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]+@", re.IGNORECASE),
    re.compile(
        r"([?&;](?:[\w.-]*(?:token|signature|credential|secret|password|api_?key)|policy|sig|key)=)"
        r"[^\s&;'\"<>]+",
        re.IGNORECASE,
    ),
    # What a person or a library writes: token=…, "password": "…"
    re.compile(
        r"(\b(?:\w*_)?(?:token|secret|password|api_?key)['\"]?\s*[:=]\s*b?['\"])[^'\"\s]+",
        re.IGNORECASE,
    ),
)


def redact(text: str) -> str:
    """Return a text without tokens and passwords.

    Examples
    --------
    >>> redact("401 for https://me:secret@hub/x?token=abc with hf_abcdefghijkl")
    '401 for https://***@hub/x?token=*** with hf_***'
    """
    for name in _ENVIRONMENT:
        value = os.environ.get(name, "").strip()
        if len(value) >= _SHORTEST:
            text = text.replace(value, _SHOWN)
    for pattern in _PATTERNS:
        text = pattern.sub(_replacement, text)
    return text


def _replacement(match: re.Match[str]) -> str:
    return match[1] + _SHOWN + ("@" if match[0].endswith("@") else "")
