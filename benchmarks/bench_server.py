"""The server beside its engine, and scores beside prompts: `python -m benchmarks.bench_server`.

The model has the shapes of a real one and random weights. Clients are another process: each has a
stream by HTTP of the tokens after a prompt of tokens. The engine alone gets the same requests in
this process, without a server, from one call that waits for all, which is the fastest way, or as
streams. In the first work all come at once, and all tokens count. In the second they come at
moments drawn beforehand, the same for both, and the time of a request is that to its first token.

The last work is `score` of a long text, beside a prompt of the same tokens and one new token.
"""

import argparse
import asyncio
import gc
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from benchmarks.bench_generate import MODELS, module
from benchmarks.harness import Contender, measure
from benchmarks.results import Result, Timing, add_option, introduced, keep, show
from benchmarks.server_clients import Clients, Seen
from deepspeed_ext.inference import InferenceEngine, SamplingOptions, init_inference
from deepspeed_ext.server.run import Settings, _run

_NAME = "m"


class Load(NamedTuple):
    """What there is to do.

    Args:
        model: its name in `MODELS`.
        streams: requests at a time.
        prompt: tokens of each.
        new: tokens that follow.
        seconds: in which requests come, where they come one after another.
        scored: tokens of a text.
    """

    model: str
    streams: int
    prompt: int
    new: int
    seconds: float
    scored: int

    def prompts(self) -> list[list[int]]:
        """Return the prompts, always the same."""
        draw = random.Random(0)
        return [draw.choices(range(300, 4000), k=self.prompt) for _ in range(self.streams)]

    def moments(self) -> list[float]:
        """Return when requests come, if they come one after another."""
        draw = random.Random(1)
        return sorted(draw.random() * self.seconds for _ in range(self.streams))

    def bodies(self) -> list[dict[str, Any]]:
        """Return the requests of clients."""
        usual: dict[str, Any] = dict(model=_NAME, max_tokens=self.new, temperature=0, stream=True)
        usual |= dict(stop_token_ids=[], stream_options=dict(include_usage=True))
        return [usual | dict(prompt=prompt) for prompt in self.prompts()]


LOADS = {
    "cpu": Load("4 M", 16, 32, 32, 1.0, 256),
    "cuda": Load("8 B", 64, 512, 128, 4.0, 8192),
}


def tokenizer_of(vocabulary: int) -> Tokenizer:
    """Return one of bytes and made-up words, in the form that most have."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    words = (f"Ġ{i:x}" for i in range(vocabulary - len(letters)))
    names = {name: i for i, name in enumerate([*letters, *words])}
    made = Tokenizer(models.BPE(names, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


@contextmanager
def served(engine: InferenceEngine) -> Iterator[Clients]:
    """Serve an engine from another thread of this process, to clients in a process of theirs."""
    said: list[str] = []
    loop = asyncio.new_event_loop()
    running = loop.create_task(_run(lambda: engine, Settings(_NAME, port=0), said.append))

    def serve() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(running)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        while not said and thread.is_alive():
            time.sleep(0.01)
        clients = Clients(int(said[0].rsplit(":", 1)[1].removesuffix("/v1")))
        try:
            yield clients
        finally:
            clients.close()
    finally:
        loop.call_soon_threadsafe(running.cancel)
        thread.join()
        loop.close()


def streamed(engine: InferenceEngine, load: Load, begins: Sequence[float]) -> Seen:
    """Return what is seen of streams of an engine without a server."""
    options = SamplingOptions(max_new_tokens=load.new, stop_tokens=())

    async def one(prompt: list[int], at: float) -> tuple[float, float, float]:
        await asyncio.sleep(at - time.perf_counter())
        sent, first = time.perf_counter(), 0.0
        async for _ in engine.stream([prompt], options):
            first = first or time.perf_counter()
        return sent, first, time.perf_counter()

    async def every() -> list[tuple[float, float, float]]:
        origin = time.perf_counter() + 0.01
        some = zip(load.prompts(), begins, strict=True)
        return await asyncio.gather(*(one(prompt, origin + begin) for prompt, begin in some))

    sents, firsts, ends = zip(*asyncio.run(every()), strict=True)
    return Seen([b - a for a, b in zip(sents, firsts, strict=True)], max(ends) - min(sents))


def whole(engine: InferenceEngine, load: Load) -> Seen:
    """Return what is seen of one call for all requests."""
    begin = time.perf_counter()
    engine.generate(load.prompts(), max_new_tokens=load.new, stop_tokens=())
    return Seen([], time.perf_counter() - begin)


Way = Callable[[], Seen]


def in_turn(ways: dict[str, Way], rounds: int, name: str) -> dict[str, list[Seen]]:
    """Let all take turns; another one begins each round, and the first two do not count."""
    found: dict[str, list[Seen]] = {way: [] for way in ways}
    names = list(ways)
    for i in tqdm(range(-2, rounds), desc=name):
        first = i % len(names)
        for each in (*names[first:], *names[:first]):
            gc.collect()
            seen = ways[each]()
            if i >= 0:
                found[each].append(seen)
    return found


def of_tokens(engine: InferenceEngine, clients: Clients, load: Load, rounds: int) -> Result:
    """Measure all tokens of requests that come at once."""
    at_once = [0.0] * load.streams
    ways: dict[str, Way] = {
        "server": lambda: clients.ask(load.bodies(), at_once),
        "engine alone": partial(whole, engine, load),
        "engine alone, streams": partial(streamed, engine, load, at_once),
    }
    work = f"{load.model}, {load.streams} streams of {load.prompt} + {load.new} tokens"
    found = in_turn(ways, rounds, work)
    timings = {name: Timing.of([seen.seconds for seen in some]) for name, some in found.items()}
    ours, tokens = timings["server"].median, load.streams * load.new
    notes = [
        f"{name}: {tokens / each.median:,.0f} tokens per second" for name, each in timings.items()
    ]
    notes += [
        f"{timings[name].median / ours:.3f} of the tokens per second of the {name}"
        for name in list(ways)[1:]
    ]
    return Result(work, torch.get_num_threads(), 0, 0, timings, notes=notes)


def of_first_tokens(engine: InferenceEngine, clients: Clients, load: Load, rounds: int) -> Result:
    """Measure the time to the first token of requests that come one after another."""
    moments = load.moments()
    ways: dict[str, Way] = {
        "server": lambda: clients.ask(load.bodies(), moments),
        "engine alone, streams": partial(streamed, engine, load, moments),
    }
    work = f"{load.model}, first of {load.new} tokens, {load.streams} clients"
    found = in_turn(ways, rounds, work)
    firsts = {name: [t for seen in some for t in seen.firsts] for name, some in found.items()}
    timings = {name: Timing.of(some) for name, some in firsts.items()}
    added = []
    for part in (50, 99):
        ours, theirs = (statistics.quantiles(some, n=100)[part - 1] for some in firsts.values())
        added.append(f"{1e3 * (ours - theirs):+.2f} ms at {part} % ({1e3 * theirs:.2f} ms without)")
    notes = [f"added by the server: {', '.join(added)}"]
    return Result(work, torch.get_num_threads(), 0, 0, timings, notes=notes)


def of_score(engine: InferenceEngine, load: Load, device: str, rounds: int) -> Result:
    """Measure the scores of a text, beside a prompt of its tokens."""
    text = random.Random(2).choices(range(300, 4000), k=load.scored)
    ways: dict[str, Callable[[], object]] = {
        "score": partial(engine.score, [text]),
        "prompt and a token": partial(engine.generate, [text], max_new_tokens=1, stop_tokens=()),
        "score, with the likeliest": partial(engine.score, [text], top_logprobs=1),
    }
    work = f"{load.model}, score of {load.scored:,} tokens"
    contenders = [Contender(name, way) for name, way in ways.items()]
    with tqdm(total=rounds, desc=work) as progress:
        timings = measure(contenders, device, rounds, progress)
    theirs = timings["prompt and a token"].median
    notes = [
        f"{name}: {timings[name].median / theirs:.3f} of the time of the prompt"
        for name in ("score", "score, with the likeliest")
    ]
    return Result(work, torch.get_num_threads(), 0, 0, timings, notes=notes)


def main() -> None:
    """Read the command line, measure, and show it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=sorted(LOADS), default="cuda")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on the CPU")
    parser.add_argument("--rounds", type=int, default=9)
    add_option(parser)
    options = parser.parse_args()
    load, device, rounds = LOADS[options.device], options.device, options.rounds
    if device == "cpu":
        torch.set_num_threads(options.threads)
    described, results = introduced(device), list[Result]()
    with torch.no_grad():
        made = module(load.model, device)
        engine = init_inference(
            made,
            max_batch=load.streams,
            max_tokens=load.prompt + load.new,
            tokenizer=tokenizer_of(MODELS[load.model][5]),
        )
    del made
    gc.collect()
    assert isinstance(engine, InferenceEngine)
    alone = InferenceEngine(engine.decoder, max_batch=1, max_tokens=load.scored + 1)
    try:
        results.append(of_score(alone, load, device, rounds))
        show(results[-1])
        alone.close()
        with served(engine) as clients:
            for measured in (of_tokens, of_first_tokens):
                results.append(measured(engine, clients, load, rounds))
                show(results[-1])
    finally:
        keep(options.save, results, described)


if __name__ == "__main__":
    main()
