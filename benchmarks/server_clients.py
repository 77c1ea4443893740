"""Clients of a server, in a process of their own, so that they take nothing of its interpreter.

Each line that comes in has requests, and is answered by a line: what the clients have seen.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_HEAD = (
    "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {}\r\n\r\n"
)
_AHEAD = 0.05  # seconds between the last connection and the first request


class Seen(NamedTuple):
    """What was seen of some requests.

    Args:
        firsts: seconds from each request to its first token.
        seconds: from the first request to the last token of all.
    """

    firsts: list[float]
    seconds: float


class Clients:
    """Requests of a server by another process, connected before they begin.

    Args:
        port: of the server.
    """

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-m", "benchmarks.server_clients", str(port)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, bodies: Sequence[Mapping[str, Any]], begins: Sequence[float]) -> Seen:
        """Return what becomes of requests.

        Args:
            bodies: of each; it streams, and has its usage told.
            begins: when each is sent, in seconds.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([list(bodies), list(begins)]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("server: its clients have failed, expected an answer of theirs")
        return Seen(*json.loads(line))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


class _Client:
    """One request; see `Clients.ask`."""

    def __init__(self, body: Mapping[str, Any], begin: float) -> None:
        self._tokens, self._begin = body["max_tokens"], begin
        data = json.dumps(body).encode()
        self._request = _HEAD.format(len(data)).encode() + data
        self.sent = self.first = self.end = 0.0

    async def connect(self, port: int) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)

    async def ask(self, origin: float) -> None:
        await asyncio.sleep(origin + self._begin - time.perf_counter())
        self.sent = time.perf_counter()
        self._writer.write(self._request)
        found = bytearray()
        while some := await self._reader.read(1 << 16):
            found += some
            if not self.first and b"data: " in found:
                self.first = time.perf_counter()
        self.end = time.perf_counter()
        self._writer.close()
        if f'"completion_tokens":{self._tokens},'.encode() not in found.replace(b'": ', b'":'):
            raise RuntimeError(
                f"server: the answer ends with {bytes(found[-200:])!r}, expected {self._tokens}"
                " tokens"
            )


async def _seen(port: int, bodies: Sequence[Mapping[str, Any]], begins: Sequence[float]) -> Seen:
    clients = [_Client(body, begin) for body, begin in zip(bodies, begins, strict=True)]
    await asyncio.gather(*(each.connect(port) for each in clients))
    origin = time.perf_counter() + _AHEAD
    await asyncio.gather(*(each.ask(origin) for each in clients))
    begin = min(each.sent for each in clients)
    firsts = [each.first - each.sent for each in clients]
    return Seen(firsts, max(each.end for each in clients) - begin)


def main(port: int) -> None:
    """Answer lines until there are no more."""
    for line in sys.stdin:
        print(json.dumps(asyncio.run(_seen(port, *json.loads(line)))), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
