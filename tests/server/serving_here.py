"""A server in a thread of the test, and the plainest client."""

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tiny

from deepspeed_ext.server.run import Settings, _run


class Chatty(tiny.Bytes):
    """A tokenizer of bytes with a template."""

    chat_template = (
        "{% if messages[0].role == 'nobody' %}{{ raise_exception('no such role') }}{% endif %}"
        "{% for each in messages %}{{ each.role[0] }}: {{ each.content }} {% endfor %}a:"
    )


class Client:
    """Asks one server.

    Args:
        port: of it.
        key: that it wants, or None.
    """

    def __init__(self, port: int, key: str | None = None) -> None:
        self.port, self.headers = port, {"authorization": f"Bearer {key}"} if key else {}

    def send(self, path: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        connection.request(method, path, data, self.headers | headers)
        response = connection.getresponse()
        response.connection = connection  # type: ignore[attr-defined]
        return response

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return the status and the answer."""
        response = self.send(path, body, **headers)
        text = response.read().decode()
        is_json = response.getheader("content-type", "").startswith("application/json")
        return response.status, json.loads(text) if is_json else text

    def complete(self, **fields: Any) -> Any:
        """Return the answer to a request of completions that is right."""
        status, found = self.ask("/v1/completions", {"model": "m"} | fields)
        assert status == 200, found
        return found

    def refused(self, path: str, body: Any) -> tuple[int, str, str | None]:
        """Return status, message and param of an error."""
        status, found = self.ask(path, body)
        assert set(found["error"]) == {"message", "type", "param", "code"}, found
        return status, found["error"]["message"], found["error"]["param"]

    def events(self, path: str = "/v1/completions", **fields: Any) -> list[Any]:
        """Return the events of a stream."""
        response = self.send(path, {"model": "m", "stream": True} | fields)
        assert response.status == 200, response.read()
        assert response.getheader("content-type", "").startswith("text/event-stream")
        return events_of(response.read().decode())


def events_of(text: str) -> list[Any]:
    *parts, rest = text.split("\n\n")
    assert rest == "" and all(part.startswith("data: ") for part in parts)
    datas = [part.removeprefix("data: ") for part in parts]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


@contextmanager
def served(load: Any, **settings: Any) -> Iterator[Client]:
    """Serve what load returns, an engine; the client may ask from when the port is there."""
    said: list[str] = []
    loop = asyncio.new_event_loop()
    task = loop.create_task(_run(load, Settings("m", **(dict(port=0) | settings)), said.append))
    failed: list[BaseException] = []

    def work() -> None:
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while not said and not failed:
            thread.join(0.01)
        assert not failed, failed
        port = int(said[0].rsplit(":", 1)[1].removesuffix("/v1"))
        yield Client(port, settings.get("api_key"))
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
        assert not failed, failed
