"""Many clients at once, of whom a fifth leaves: none is lost, and nothing is left."""

import gc
import http.client
import json
import os
import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tiny
import torch

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
from serving_here import Chatty, Client, events_of, served
from test_service import metric, wait_until

from deepspeed_ext.inference import SamplingOptions
from deepspeed_ext.server.body import Limits

pytestmark = pytest.mark.long
CLIENTS = 256
_NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Load:
    """Requests, each with a seed of its own, and what became of them.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        drawn = random.Random(0)
        self.prompts = [
            [drawn.randrange(97) for _ in range(drawn.randint(1, 40))] for _ in range(count)
        ]
        self.counts = [drawn.randint(1, 30) for _ in range(count)]
        self.ways = [drawn.choice(("whole", "stream")) for _ in range(count)]
        for i in range(count):  # a fifth leaves, some of them within the body
            if drawn.random() < 0.2:
                self.ways[i] = drawn.choice(("killed", "killed", "closed", "half a body"))

    def fields(self, i: int) -> dict[str, Any]:
        asked = dict(model="m", prompt=self.prompts[i], max_tokens=self.counts[i], seed=i)
        return asked | dict(stream=self.ways[i] == "stream" or i % 2 == 0)

    def expected(self, engine: Any) -> list[str]:
        """Return the text of each, which company does not change."""
        some = [
            SamplingOptions(max_new_tokens=count, temperature=1.0, seed=i)
            for i, count in enumerate(self.counts)
        ]
        return [one.text for one in engine.generate(self.prompts, some)]

    def ask(self, client: Client, i: int) -> str | None:
        """Return the text that a client gets, None if it leaves."""
        fields = self.fields(i)
        if self.ways[i] not in ("whole", "stream"):
            self._leave(client, i, json.dumps(fields).encode())
            return None
        response = client.send("/v1/completions", fields)
        assert response.status == 200, response.read()
        text = response.read().decode()
        if not fields["stream"]:
            return str(json.loads(text)["choices"][0]["text"])
        *events, last = events_of(text)
        assert last == "[DONE]"
        return "".join(event["choices"][0]["text"] for event in events)

    def _leave(self, client: Client, i: int, body: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", client.port)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-length", str(len(body)))
        connection.endheaders(body[: len(body) // 2] if self.ways[i] == "half a body" else body)
        time.sleep(random.Random(i).random() * 0.3)
        if self.ways[i] == "killed":  # it is reset, not closed
            assert connection.sock is not None
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


@pytest.mark.parametrize(
    "device, count", [("cpu", 2000), pytest.param("cuda", 10000, marks=_NEEDS_GPU)]
)
def test_none_is_lost_and_nothing_is_left(device: str, count: int) -> None:
    load = Load(count)
    made = tiny.engine(device, tokenizer=Chatty(), max_batch=16 if device == "cpu" else 64)
    expected = load.expected(made)
    for i in range(0, count, count // 8):
        options = dict(max_new_tokens=load.counts[i], temperature=1.0, seed=i)
        assert made.generate([load.prompts[i]], **options)[0].text == expected[i]
    seen: list[tuple[int, int]] = []  # memory and files, when a quarter, a half ... is done
    done, lock = 0, threading.Lock()

    def one(client: Client, i: int) -> str | None:
        nonlocal done
        text = load.ask(client, i)
        with lock:
            done += 1
            if done % (count // 4) == 0:
                seen.append((resident(), len(os.listdir("/proc/self/fd"))))
        return text

    with served(lambda: made, limits=Limits(waiting=4 * CLIENTS)) as client:
        before = len(os.listdir("/proc/self/fd"))
        with ThreadPoolExecutor(CLIENTS) as pool:
            texts = list(pool.map(lambda i: one(client, i), range(count)))
        stays = [way in ("whole", "stream") for way in load.ways]
        wanted = zip(expected, stays, strict=True)
        assert texts == [text if is_there else None for text, is_there in wanted]
        assert 0.15 < 1 - sum(stays) / count < 0.25
        wait_until(lambda: metric(client, "running") == metric(client, "waiting") == 0)
        tiny.check_all_is_free(made)
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)
        (middle, files), (last, last_files) = seen[1], seen[3]
        assert last <= middle + (16 << 20) and last_files <= files + 16
