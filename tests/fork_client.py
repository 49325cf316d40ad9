"""What stands in for `python`: the program runs in a fork of `fork_server`, this is its proxy.

It imports little, to start in moments. Standard streams, environment and working directory are the
program's; signals are handed on, and the program doesn't outlive its proxy.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import sys
from types import FrameType

NUMBER_BYTES = 4
_HANDED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def main(address: str) -> None:
    """Have a program run that the arguments name as they do for Python, and end as it does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDED_ON)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        request = marshal.dumps((sys.argv[1:], dict(os.environ), os.getcwd()))  # noqa: PTH109
        socket.send_fds(server, [len(request).to_bytes(NUMBER_BYTES, "big")], [0, 1, 2])
        server.sendall(request)
        program = _receive_number(server)

        def hand_on(signum: int, frame: FrameType | None) -> None:
            os.kill(program, signum)

        for signum in _HANDED_ON:
            signal.signal(signum, hand_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDED_ON)
        code = _receive_number(server)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def receive(stream: socket.socket, size: int) -> bytes:
    """So many bytes of a stream, which mustn't end before."""
    data = bytearray()
    while len(data) < size:
        part = stream.recv(size - len(data))
        if not part:
            sys.exit("the server of forks is gone; its log lies beside the program")
        data += part
    return bytes(data)


def _receive_number(server: socket.socket) -> int:
    return int.from_bytes(receive(server, NUMBER_BYTES), "big", signed=True)
