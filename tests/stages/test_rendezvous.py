from __future__ import annotations

import socket

import pytest

from duoka.stages.rendezvous import Rendezvous


def test_the_port_is_taken_before_any_worker_begins() -> None:
    rendezvous = Rendezvous()
    port = int(rendezvous.environment["MASTER_PORT"])
    with socket.socket(socket.AF_INET6) as other, pytest.raises(OSError, match="in use"):
        other.bind(("::", port))
