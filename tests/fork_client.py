"""What stands in for `python`: the program runs in a fork of `fork_server`, this is its proxy.

It imports little, to start in moments. Open files, environment and working directory are the
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
    files = _open_files()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        directory = os.getcwd()  # noqa: PTH109
        request = marshal.dumps((files, sys.argv[1:], dict(os.environ), directory))
        socket.send_fds(server, [len(request).to_bytes(NUMBER_BYTES, "big")], files)
        server.sendall(request)
        for file in files[3:]:
            os.close(file)
        program = _receive_number(server)

        def hand_on(signum: int, frame: FrameType | None) -> None:
            os.kill(program, signum)

        for signum in _HANDED_ON:
            signal.signal(signum, hand_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDED_ON)
        code = _receive_number(server)
    if code < 0:
        if -code in _HANDED_ON:  # of SIGKILL there is no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _open_files() -> list[int]:
    """The numbers of those that this process was given: standard streams come first."""
    numbers = sorted(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208
    return [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")]  # noqa: PTH110


def receive(stream: socket.socket, size: int) -> bytes:
    """So many bytes of a stream, which mustn't end before."""
    data = bytearray()
    while len(data) < size:
        part = stream.recv(size - len(data))
        if not part:
            sys.exit("the server of forks is missing; its log lies beside the program")
        data += part
    return bytes(data)


def _receive_number(server: socket.socket) -> int:
    return int.from_bytes(receive(server, NUMBER_BYTES), "big", signed=True)
