"""The command line: python -m deepspeed_ext.inference FOLDER --prompt TEXT or --serve."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from deepspeed_ext.inference.execution.sampling import SamplingOptions
from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.inference.model.checkpoint_folder import ModelFolder
from deepspeed_ext.inference.model.policies import policy_of
from deepspeed_ext.inference.requests.stream import Piece
from deepspeed_ext.inference.requests.tokenizer import tokenizer_of
from deepspeed_ext.inference.serving.engine import InferenceEngine
from deepspeed_ext.inference.serving.roofline import bytes_per_token, memory_bandwidth
from deepspeed_ext.op_builder import BuildError, program

_SAMPLING = (  # the options of a call of generate, with their types and what they mean
    ("max-new-tokens", int, "N", "tokens to write at most; default: 128"),
    ("temperature", float, "X", "0, the default, takes the likeliest token each time"),
    ("top-k", int, "N", "draw one of the N likeliest tokens"),
    ("top-p", float, "X", "leave out tokens beyond this share of the probability"),
    ("min-p", float, "X", "leave out tokens below this share of the likeliest one's"),
    ("repetition-penalty", float, "X", "what makes tokens that were there before less likely"),
    ("seed", int, "N", "of the draws; default: another one each time"),
)
_LOADING = (  # those of init_inference
    ("quantize", str, "FORMAT", "weights in int8, int4 or fp8"),
    ("quantize-head", str, "FORMAT", "the same for the head"),
    ("input-format", str, "FORMAT", "with either of these, int8: faster on a CPU"),
    ("kv-dtype", str, "FORMAT", "keys and values in int8 or fp8"),
    ("dtype", str, "DTYPE", "bfloat16, float16 or float32; default: that of the folder"),
    ("device", str, "DEVICE", "default: cuda if there is one, else cpu"),
    ("max-tokens", int, "N", "of prompt and text together; default: the model's, 4096 at most"),
    ("offload", str, "PLACE", "where layers rest that the device has no room for: cpu or nvme"),
    ("nvme-path", str, "FOLDER", "with nvme, on the disk to use"),
)


_SERVING = (
    ("host", str, "ADDRESS", "to listen at; default: 127.0.0.1, which is for this machine alone"),
    ("port", int, "N", "likewise; default: 8000"),
    ("api-key", str, "KEY", "that clients have to give"),
    ("served-name", str, "NAME", "of the model, for clients; default: that of the folder"),
    ("grace", float, "SECONDS", "for what is under way after SIGTERM; default: 30"),
    ("max-batch", int, "N", "completions that are computed at a time; default: 32"),
)
_USUAL_BATCH = 32  # of a server


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text}, expected numbers of tokens") from None


def _renamed(_: str) -> NoReturn:
    raise argparse.ArgumentTypeError("is now --input-format")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed_ext.inference",
        description="Write on from a prompt with the model of a folder; the text goes to the"
        " standard output as it comes, what it took to the standard error. Or serve it by HTTP.",
    )
    parser.add_argument(
        "folder", metavar="FOLDER", help="has config.json and safetensors files, as Hugging Face's"
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to go on from")
    text = "the same as numbers of tokens, such as '1 15 8'; the text is numbers then, too"
    prompt.add_argument("--tokens", type=_numbers, metavar="NUMBERS", help=text)
    text = "answer clients of OpenAI's API, until SIGTERM; pip install 'deepspeed_ext[serve]'"
    prompt.add_argument("--serve", action="store_true", help=text)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="where it ends; may be repeated"
    )
    groups = (("sampling", _SAMPLING), ("loading", _LOADING), ("serving", _SERVING))
    for title, some in groups:
        group = parser.add_argument_group(title)
        for name, kind, meta, text in some:
            group.add_argument(f"--{name}", type=kind, metavar=meta, help=text)
    text = "pages of this origin may ask; may be repeated"
    group.add_argument("--allow-origin", action="append", default=[], metavar="URL", help=text)
    parser.add_argument("--activations", type=_renamed, help=argparse.SUPPRESS)
    return parser


@program
def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for and return the exit status."""
    options = _parser().parse_args(arguments)

    def given(some: tuple[tuple[str, Any, str, str], ...]) -> dict[str, Any]:
        values = {name: getattr(options, name.replace("-", "_")) for name, *_ in some}
        return {name.replace("-", "_"): v for name, v in values.items() if v is not None}

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a model may write anything
    try:
        _check_together(options, given(_SAMPLING), given(_SERVING))
        if options.serve:
            _serve(options, given(_LOADING), given(_SERVING))
            return 0
        wanted = SamplingOptions(stop=options.stop, **given(_SAMPLING))
        tokenizer = _tokenizer_for(options)
        tokens = options.tokens if options.prompt is None else tokenizer.encode(options.prompt)
        loading = given(_LOADING) | {"tokenizer": tokenizer}
        engine = init_inference(options.folder, max_batch=1, progress=True, **loading)
        assert isinstance(engine, InferenceEngine)
        with engine:
            _write(engine, tokens, wanted, options.prompt is not None)
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, OSError, MemoryError, RuntimeError, BuildError) as error:
        print(f"inference: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninference: stopped", file=sys.stderr)
        return 130
    return 0


def _check_together(
    options: argparse.Namespace, sampling: dict[str, Any], serving: dict[str, Any]
) -> None:
    """Refuse what would do nothing."""
    of_writing = [*sampling, *(["stop"] if options.stop else [])]
    of_server = [*serving, *(["allow_origin"] if options.allow_origin else [])]
    for name in of_writing if options.serve else of_server:
        beside = "with --serve, expected it in requests"
        if not options.serve:
            beside = "without --serve, expected both, or none"
        raise ValueError(f"--{name.replace('_', '-')} is given {beside}")


def _serve(options: argparse.Namespace, loading: dict[str, Any], serving: dict[str, Any]) -> None:
    """Answer clients until a signal comes."""
    try:
        from deepspeed_ext.server.embeddings import pooling_of
        from deepspeed_ext.server.run import Settings, run
    except ImportError as error:
        raise ValueError(
            f"--serve needs {error.name}, expected: pip install 'deepspeed_ext[serve]'"
        ) from None
    tokenizer, folder = _tokenizer_for(options), ModelFolder(Path(options.folder))
    of_kind: dict[str, Any] = {}
    if policy_of(folder.config).causal:
        of_kind["max_batch"] = serving.pop("max_batch", _USUAL_BATCH)
    elif "max_batch" in serving:
        raise ValueError(
            f"--max-batch is {serving['max_batch']}, expected none, as {options.folder} has an"
            " encoder"
        )
    else:
        serving["pooling"] = pooling_of(folder)
    name = serving.pop("served_name", Path(options.folder).resolve().name)

    def load() -> Any:
        more = dict(tokenizer=tokenizer, progress=True)
        return init_inference(options.folder, **loading, **of_kind, **more)

    settings = Settings(name, allow_origins=options.allow_origin, **serving)
    run(load, settings, lambda text: print(text, file=sys.stderr, flush=True))


def _tokenizer_for(options: argparse.Namespace) -> Any:
    """Return the folder's tokenizer, and refuse what it has not, before weights are read."""
    folder = ModelFolder(Path(options.folder))
    if not (options.serve or policy_of(folder.config).causal):
        raise ValueError(f"{options.folder} has an encoder, expected a model that writes text")
    tokenizer = tokenizer_of(folder, None)
    if tokenizer is None and (options.prompt is not None or options.stop or options.serve):
        what = "serve" if options.serve else "stop" if options.prompt is None else "prompt"
        raise ValueError(
            f"{options.folder} has no tokenizer, expected one for --{what}; without, there is"
            " --tokens"
        )
    return tokenizer


def _write(
    engine: InferenceEngine, prompt: list[int], options: SamplingOptions, is_text: bool
) -> None:
    """Print what follows the prompt, piece by piece, and then how fast it came."""
    with engine.generate([prompt], options, stream=True) as stream:
        count, first, first_count, last = 0, 0.0, 0, 0.0
        for piece in stream:
            print(_shown(piece, is_text), end="", flush=True)
            last = time.perf_counter()
            count += len(piece.tokens)
            if not first_count:
                first, first_count = last, count
        print(flush=True)
    text = f"{count} token{'' if count == 1 else 's'}"
    if count > first_count:
        seconds = (last - first) / (count - first_count)
        text += f", {1 / seconds:.4g} a second{_share(engine, len(prompt) + count / 2, seconds)}"
    print(text, file=sys.stderr)


def _shown(piece: Piece, is_text: bool) -> str:
    return piece.text if is_text else "".join(f"{token} " for token in piece.tokens)


def _share(engine: InferenceEngine, length: float, seconds: float) -> str:
    """Say how near a token was to the time that reading takes."""
    stream = engine.decoder.stream
    if stream is not None:
        return f": {stream.nbytes / 1e9:.3g} GB come to the device for each"
    bandwidth = memory_bandwidth(engine.device)
    if bandwidth is None:
        return ""
    nbytes = bytes_per_token(engine.decoder, engine.cache, length)
    return (
        f": {nbytes / bandwidth / seconds:.0%} of the limit, {nbytes / 1e9:.3g} GB to read for each"
        f" at {bandwidth / 1e9:.4g} GB/s"
    )


if __name__ == "__main__":
    sys.exit(main())
