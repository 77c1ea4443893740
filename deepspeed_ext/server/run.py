"""run: listens, loads, answers, and ends as it is told to."""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn

from deepspeed_ext.inference.serving.encoder_engine import EncoderEngine
from deepspeed_ext.inference.serving.engine import InferenceEngine
from deepspeed_ext.server.app import app_of
from deepspeed_ext.server.body import Limits
from deepspeed_ext.server.checks import check_count, check_key, check_seconds, check_text
from deepspeed_ext.server.embeddings import Pooling
from deepspeed_ext.server.service import Service

_ENDING = signal.SIGTERM, signal.SIGINT
_LAST_WORDS = 5  # seconds in which answers that were given up are sent


@dataclass(frozen=True)
class Settings:
    """Where and how to serve.

    Args:
        name: of the model, for clients.
        host: the address to listen at.
        port: likewise; 0 for one that is free.
        api_key: that clients have to give, or None.
        allow_origins: pages of which origins a browser may let ask.
        grace: seconds that what is under way is given after SIGTERM.
        limits: of requests.
        pooling: of an encoder.

    Raises:
        TypeError, ValueError: one of them cannot be.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    allow_origins: Sequence[str] = ()
    grace: float = 30.0
    limits: Limits = field(default_factory=Limits)
    pooling: Pooling = Pooling.MEAN

    def __post_init__(self) -> None:
        check_text("name", self.name)
        check_text("host", self.host)  # of which an empty one is any address of this machine
        check_count("port", self.port, 0, 65535)
        check_seconds("grace", self.grace, 0, 1e9)
        if self.api_key is not None:
            check_key(self.api_key)
        if isinstance(self.allow_origins, str):
            raise TypeError("serve: allow_origins is text, expected a sequence of such")
        for each in self.allow_origins:
            check_text("allow_origins", each)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `run`: uvicorn would end the process by the one that came."""
        yield


def run(
    load: Callable[[], InferenceEngine | EncoderEngine],
    settings: Settings,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends what is under way at once.

    The server listens from the beginning, and answers 503 until the engine is there.

    Args:
        load: returns the engine; it is called in a thread, and closed in the end.
        settings: where and how.
        say: is told what goes on.

    Raises:
        OSError: the address cannot be listened at.
        Whatever load raises.
    """
    with _handlers_of_before():
        asyncio.run(_run(load, settings, say))


@contextmanager
def _handlers_of_before() -> Iterator[None]:
    """Let signals have the handlers of now in the end: asyncio leaves Python's own there."""
    before = {number: signal.getsignal(number) for number in _ENDING if _is_main()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # which is one that Python does not know
                signal.signal(number, handler)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


async def _run(
    load: Callable[[], InferenceEngine | EncoderEngine],
    settings: Settings,
    say: Callable[[str], None],
) -> None:
    service = Service(settings.name, settings.limits, settings.api_key)
    config = uvicorn.Config(
        app_of(service, settings.allow_origins),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_LAST_WORDS,
    )
    server, loop = _Server(config), asyncio.get_running_loop()
    listening = _listening(settings.host, settings.port, settings.limits.send_seconds)
    host, port = listening.getsockname()[:2]
    stopping = asyncio.Event()
    hurried = asyncio.Event()
    for number in _ENDING if _is_main() else ():
        loop.add_signal_handler(number, _stop, service, stopping, hurried)
    serving = asyncio.ensure_future(server.serve([listening]))
    loading = asyncio.ensure_future(asyncio.to_thread(load))
    told = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({loading, told, serving}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            service.open(loading.result(), settings.pooling)
            shown = f"[{host}]" if ":" in host else host
            say(f"serving {service.name} at http://{shown}:{port}/v1")
            await asyncio.wait({told, serving}, return_when=asyncio.FIRST_COMPLETED)
            await _let_go(service, settings.grace, hurried)
    finally:
        service.is_closing = True
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        told.cancel()
        made = loading.result() if loading.done() and not loading.exception() else None
        if isinstance(made, InferenceEngine):  # the other one holds nothing but weights
            made.close()


def _listening(host: str, port: int, patience: float) -> socket.socket:
    """Return a socket whose connections end where a client takes nothing for so many seconds."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, backlog=2048)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * patience))
        return made  # what it accepts has its options
    except OSError as error:
        raise OSError(f"serve: {host} port {port} cannot be listened at: {error}") from None


def _stop(service: Service, stopping: asyncio.Event, hurried: asyncio.Event) -> None:
    if stopping.is_set():
        hurried.set()
    service.is_closing = True
    stopping.set()


async def _let_go(service: Service, grace: float, hurried: asyncio.Event) -> None:
    """Wait for what is under way, not for long, and end the rest."""
    end = asyncio.get_running_loop().time() + grace
    while service.running and not hurried.is_set():
        left = end - asyncio.get_running_loop().time()
        if left <= 0:
            break
        await asyncio.sleep(min(left, 0.05))
    service.give_up()
    while service.running:  # a moment: they are woken
        await asyncio.sleep(0.01)
        if asyncio.get_running_loop().time() > end + _LAST_WORDS:
            break
