"""The server around completions: keys, limits, clients that leave, metrics, and the end."""

import asyncio
import http.client
import json
import math
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_folder

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
from serving_here import Chatty, Client, events_of, served
from test_command_line import write_tokenizer

from deepspeed_ext.inference.requests.stream import Piece
from deepspeed_ext.server.body import Limits
from deepspeed_ext.server.metrics import Histogram
from deepspeed_ext.server.run import Settings, run
from deepspeed_ext.server.service import Running, Service

LONG: dict[str, Any] = dict(prompt="a", max_tokens=3000, temperature=0)


def engine(**options: Any) -> Any:
    return tiny.engine(tokenizer=Chatty(), **(dict(max_tokens=4000) | options))


def metric(client: Client, name: str) -> float:
    found = re.search(rf"^deepspeed_ext_{re.escape(name)} (\S+)$", client.ask("/metrics")[1], re.M)
    return float(found.group(1)) if found else 0


def wait_until(is_so: Any) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_keys_and_origins() -> None:
    with served(engine, api_key="secret", allow_origins=["https://a.b"]) as client:
        assert client.complete(prompt="a", max_tokens=1)["choices"]
        for wrong in ("Bearer other", "secret", "Basic secret", "Bearer ", "Bearer s\xe9cret"):
            for path, body in (("/v1/models", None), ("/v1/completions", dict(model="m"))):
                status, found = client.ask(path, body, authorization=wrong)
                assert status == 401 and found["error"]["code"] == "invalid_api_key"
        assert client.ask("/health", authorization="")[0] == 200
        response = client.send("/health", origin="https://a.b")
        assert response.getheader("access-control-allow-origin") == "https://a.b"
        response = client.send("/health", origin="https://c.d")
        assert response.getheader("access-control-allow-origin") is None
    with served(engine) as client:
        assert client.send("/health", origin="https://a.b").getheader("vary") is None


def test_bodies_that_are_too_long_or_stop_half_way() -> None:
    limits = Limits(body_bytes=1000, body_seconds=0.2)
    with served(engine, limits=limits) as client:
        body = dict(model="m", prompt="a" * 1000)
        assert client.refused("/v1/completions", body)[0] == 413
        with socket.create_connection(("127.0.0.1", client.port)) as chunked:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
            chunked.sendall(head + b"400\r\n" + b"a" * 1024 + b"\r\n")
            assert chunked.recv(100).startswith(b"HTTP/1.1 413")
        with socket.create_connection(("127.0.0.1", client.port)) as half:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n"
            half.sendall(head + b'{"model')
            assert half.recv(100).startswith(b"HTTP/1.1 408")
        assert client.complete(prompt="a", max_tokens=1)["choices"]


def test_too_many_others() -> None:
    """Those that wait are bounded; a request alone is answered whatever the bound is."""
    with served(lambda: engine(max_batch=2), limits=Limits(waiting=3)) as client:
        with ThreadPoolExecutor(5) as pool:
            rest = [pool.submit(client.complete, **LONG | dict(max_tokens=300)) for _ in range(5)]
            wait_until(lambda: metric(client, "running") + metric(client, "waiting") == 5)
            response = client.send("/v1/completions", dict(model="m", prompt="a"))
            assert response.status == 429 and response.getheader("retry-after") == "1"
            assert json.loads(response.read())["error"]["code"] == "too_many_requests"
            texts = {each.result()["choices"][0]["text"] for each in rest}
        assert len(texts) == 1
        assert len(client.complete(prompt=["a"] * 20, max_tokens=1)["choices"]) == 20


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 0.05, 0.3])
def test_who_leaves_is_cancelled(stream: bool, after: float) -> None:
    made = engine(max_batch=2)
    with served(lambda: made) as client:
        for _ in range(3):
            connection = http.client.HTTPConnection("127.0.0.1", client.port)
            body = json.dumps(dict(model="m", stream=stream) | LONG)
            connection.request("POST", "/v1/completions", body)
            if stream and after:
                connection.getresponse().read(10)
            time.sleep(after)
            connection.close()
        wait_until(lambda: metric(client, 'requests_total{end="left"}') == 3)  # no end of its own
        wait_until(lambda: metric(client, "running") == metric(client, "waiting") == 0)
        tiny.check_all_is_free(made)


def test_a_reader_that_never_reads() -> None:
    """It holds its slot no longer than its completion takes, and is dropped."""
    body = json.dumps(dict(model="m", stream=True, logprobs=20) | LONG | dict(max_tokens=3900))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
    limits = Limits(send_seconds=1)
    with served(lambda: engine(max_batch=1), limits=limits) as client, socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        idle.connect(("127.0.0.1", client.port))
        idle.sendall((head + body).encode())
        wait_until(lambda: metric(client, "running") == 1)
        assert client.complete(prompt="b", max_tokens=2)["choices"]
        wait_until(lambda: metric(client, 'requests_total{end="left"}') == 1)
        with pytest.raises(ConnectionError):
            while idle.recv(1 << 16):  # what was sent before
                pass
            raise ConnectionError  # closed, without being reset


def test_a_template_that_does_not_end_holds_nobody_up() -> None:
    rounds = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3

    class Endless(Chatty):
        chat_template = rounds

    message = {"role": "user", "content": "a"}
    with served(lambda: tiny.engine(tokenizer=Endless())) as client, ThreadPoolExecutor(1) as pool:
        body = dict(model="m", messages=[message])
        asked = pool.submit(client.refused, "/v1/chat/completions", body)
        answered = 0
        while not asked.done():
            assert client.complete(prompt="a", max_tokens=1)["choices"]
            answered += not asked.done()
        status, told, param = asked.result()
        assert status == 400 and param == "messages" and "takes over 1 s" in told
        assert answered > 0


def test_a_request_that_fails_does_so_alone() -> None:
    """Before its first piece as an answer, later as an event."""
    made = tiny.engine(of=tiny.decoder(poisoned=9), tokenizer=Chatty())
    with served(lambda: made) as client:
        status, message, _ = client.refused("/v1/completions", dict(model="m", prompt=[9, 9]))
        assert status == 500 and "expected finite ones" in message
        forbidden = dict(model="m", prompt=[9], stream=True)
        assert client.refused("/v1/completions", forbidden)[0] == 500
        # Its turn comes many steps after the first piece.
        events = client.events(prompt=[*[[1, 2]] * 20, [1, 2, 9]], max_tokens=20)
        assert "expected finite ones" in events[-1]["error"]["message"]
        assert client.complete(prompt=[1, 2], max_tokens=3)["choices"][0]["text"]


def test_a_request_that_has_more_than_it_can_send_lets_others_be() -> None:
    """Its engine may be as fast as it is; nothing of it would ever wait."""

    class Busy:
        async def some(self, most: int) -> list[Piece]:
            return [Piece(0, 0, [1], "a")] * most

        def close(self) -> None:
            pass

    async def ask() -> int:
        turns, stop = 0, asyncio.Event()

        async def other() -> None:
            nonlocal turns
            while not stop.is_set():
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        running = Running(Service("m", Limits()), Busy(), 1)  # type: ignore[arg-type]
        for _ in range(20):
            await running.some()
        stop.set()
        await task
        return turns

    assert asyncio.run(ask()) >= 20


def test_metrics() -> None:
    with served(engine) as client:
        client.complete(prompt=["ab", "c"], max_tokens=5)
        client.refused("/v1/completions", dict(model="m"))
        assert metric(client, 'tokens_total{of="prompt"}') == 3
        assert metric(client, 'tokens_total{of="completion"}') == 10
        assert metric(client, 'requests_total{end="length"}') == 1
        assert metric(client, 'requests_total{end="refused"}') == 1
        assert metric(client, "first_token_seconds_count") == 2
        assert metric(client, "next_token_seconds_count") == 8
        assert metric(client, 'next_token_seconds_bucket{le="+Inf"}') == 8
        lines = client.ask("/metrics")[1].splitlines()
        form = r'# (HELP|TYPE) deepspeed_ext_\w+ .+|deepspeed_ext_\w+({\w+="[^"]+"})? [0-9.e+-]+'
        assert all(re.fullmatch(form, line) for line in lines)
    histogram = Histogram()
    for value in (0.0, 0.001, 0.0011, 31.0):
        histogram.add(value)
    lines = list(histogram.lines("a"))
    assert lines[0] == 'a_bucket{le="0.001"} 2' and lines[1] == 'a_bucket{le="0.0025"} 3'
    assert lines[-3:] == ['a_bucket{le="+Inf"} 4', "a_sum 31.0021", "a_count 4"]


def test_while_it_loads() -> None:
    """It listens, and says 503."""
    go_on = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as some:
        port = some.getsockname()[1]
    found: list[Any] = []

    def look() -> None:
        client = Client(port)
        while not found:
            try:
                found.append(client.ask("/health"))
                found.append(client.ask("/v1/completions", dict(model="m", prompt="a")))
            except ConnectionError:
                time.sleep(0.01)
        go_on.set()

    def load() -> Any:
        go_on.wait(30)
        return engine()

    threading.Thread(target=look).start()
    with served(load, port=port) as client:
        assert client.ask("/health") == (200, {"status": "ok"})
    assert [status for status, _ in found] == [503, 503]
    assert found[0][1]["error"]["message"] == "the server is loading the model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_folder.CONFIG | dict(eos_token_id=None)
    made = tiny_folder.write(tmp_path_factory.mktemp("model") / "small", config)
    write_tokenizer(made)
    return made


def started(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], Client]:
    command = [sys.executable, "-m", "deepspeed_ext.inference", str(folder), "--serve"]
    process = subprocess.Popen(
        [*command, "--port", "0", *arguments], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    said = next(line for line in process.stderr if line.startswith("serving"))
    found = re.fullmatch(r"serving small at http://127.0.0.1:(\d+)/v1\n", said)
    assert found, said
    return process, Client(int(found.group(1)))


@pytest.mark.parametrize("grace", ["60", "0.2"])
def test_sigterm(folder: Path, grace: str) -> None:
    """What is under way is finished if there is time, else ends with an error; the status is 0."""
    process, client = started(folder, "--grace", grace, "--max-tokens", "3000", "--device", "cpu")
    count = 300 if grace == "60" else 2900
    fields = dict(model="small", prompt="a", max_tokens=count, stream=True, temperature=0)
    response = client.send("/v1/completions", fields)
    first = response.read1(100)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: client.ask("/health")[0] == 503 if process.poll() is None else True)
    *events, last = events_of((first + response.read()).decode())
    assert process.wait(30) == 0
    if grace == "60":
        assert last == "[DONE]" and events[-1]["choices"][0]["finish_reason"] == "length"
    else:
        assert last["error"]["message"].startswith("the server is closing")
        assert 0 < len(events) < count


@pytest.mark.parametrize("fails", [True, False])
def test_who_calls_run_keeps_handlers_of_signals(fails: bool) -> None:
    def load() -> Any:
        if fails:
            raise ValueError("no engine")
        return engine()

    def mine(*_: Any) -> None:
        pytest.fail("while it serves, it has the signals")

    assert threading.current_thread() is threading.main_thread()
    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.signal(number, mine) for number in numbers]
    try:
        with pytest.raises(ValueError, match="no engine") if fails else nullcontext():
            run(load, Settings("m", port=0), lambda _: signal.raise_signal(signal.SIGTERM))
        assert [signal.getsignal(number) for number in numbers] == [mine, mine]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_what_the_command_line_refuses(folder: Path, tmp_path: Path) -> None:
    from deepspeed_ext.inference.__main__ import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main([str(folder), "--serve", "--port", str(taken.getsockname()[1])]) == 2
    assert main([str(tiny_folder.write(tmp_path / "bare")), "--serve"]) == 2
    with pytest.raises(SystemExit):
        main([str(folder), "--serve", "--prompt", "a"])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--api-key", ""], "serve: api_key is empty, expected a key, or none for no key"),
        (["--api-key", " a"], "serve: api_key has what no header can, expected ASCII without"),
        (["--api-key", "ä"], "serve: api_key has what no header can, expected ASCII without"),
        (["--grace", "nan"], "serve: grace is nan, expected 0 to 1e+09 seconds"),
        (["--grace", "inf"], "serve: grace is inf, expected 0 to 1e+09 seconds"),
        (["--grace", "-1"], "serve: grace is -1, expected 0 to 1e+09 seconds"),
        (["--port", "70000"], "serve: port is 70000, expected 0 to 65535"),
        (["--port", "-1"], "serve: port is -1, expected 0 to 65535"),
        (["--host", ""], "serve: host is empty, expected some text"),
        (["--served-name", ""], "serve: name is empty, expected some text"),
        (["--allow-origin", ""], "serve: allow_origins is empty, expected some text"),
        (["--max-batch", "0"], "init_inference: max_batch is 0, expected 1 to 2^31 - 1"),
        (["--temperature", "1"], "--temperature is given with --serve, expected it in requests"),
        (["--max-new-tokens", "9"], "--max-new-tokens is given with --serve, expected it in"),
        (["--stop", "a"], "--stop is given with --serve, expected it in requests"),
    ],
)
def test_options_of_the_command_line_that_cannot_be(
    given: list[str], told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepspeed_ext.inference.__main__ import main

    serving = [str(folder), "--serve", "--port", "0", "--device", "cpu"]
    assert main([*serving, *given]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"inference: {told}")


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (dict(depth=0), "serve: depth is 0, expected 1 to 2147483647"),
        (dict(waiting=-1), "serve: waiting is -1, expected 0 to 2147483647"),
        (dict(body_bytes=1.5), "serve: body_bytes is 1.5, expected an int"),
        (dict(completions=True), "serve: completions is True, expected an int"),
        (dict(send_seconds=0), "serve: send_seconds is 0, expected 0.001 to 1e+06 seconds"),
        (dict(send_seconds="1"), "serve: send_seconds is '1', expected a number of seconds"),
        (dict(body_seconds=math.nan), "serve: body_seconds is nan, expected 0.001 to 1e+06 sec"),
    ],
)
def test_limits_that_bound_nothing(limits: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        Limits(**limits)
    assert str(error.value).startswith(told)
