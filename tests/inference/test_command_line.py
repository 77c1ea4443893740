"""python -m deepspeed_ext.inference: the text as it comes, what it took, and how it ends."""

import fcntl
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_folder
import torch

from deepspeed_ext.inference import __main__ as command_line
from deepspeed_ext.inference.execution import memory_budget as room
from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.inference.serving.roofline import bytes_per_token, memory_bandwidth
from deepspeed_ext.inference.weights.quantize_on_load import bytes_of


def write_tokenizer(folder: Path) -> None:
    """Write one of characters, which pads and cuts, as files do that were used for training."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = {chr(32 + i): i for i in range(95)} | {"?": 95}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny_folder.write(
        tmp_path_factory.mktemp("model"), tiny_folder.CONFIG | dict(eos_token_id=None)
    )
    write_tokenizer(made)
    return made


def test_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = dict(max_new_tokens=20, temperature=0.7, seed=3)
    expected = init_inference(folder).generate("once upon", **options)[0]
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert command_line.main([str(folder), "--prompt", "once upon", *given]) == 0
    out, error = capsys.readouterr()
    assert out == f"{expected.text}\n" and len(expected.tokens) == 20
    form = r"20 tokens, \S+ a second: \d+% of the limit, \S+ GB to read for each at [\d.e+]+ GB/s\n"
    assert re.fullmatch(form, error), error


def test_layers_that_rest_elsewhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = init_inference(folder).generate("once upon", max_new_tokens=3)[0]
    given = [str(folder), "--prompt", "once upon", "--max-new-tokens", "3", "--offload"]
    for where in (["cpu"], ["nvme", "--nvme-path", str(tmp_path)]):
        assert command_line.main([*given, *where]) == 0
        out, error = capsys.readouterr()
        assert out == f"{expected.text}\n"
        form = r"3 tokens, \S+ a second: \S+ GB come to the device for each\n"
        assert re.fullmatch(form, error), error
    assert command_line.main([*given, "nvme"]) == 2
    assert "nvme_path is None, expected a folder" in capsys.readouterr().err


def test_prompts_are_taken_whole(folder: Path) -> None:
    """Whatever the file of the tokenizer says of padding and of a greatest length."""
    tokenizer = init_inference(folder).tokenizer
    assert tokenizer.encode("abcdefg!") == [65, 66, 67, 68, 69, 70, 71, 1]
    assert tokenizer.encode("a") == [65] and tokenizer.decode([65, 1]) == "a!"


def test_tokenizers_of_the_package_may_be_given(folder: Path) -> None:
    """Also one that is around another; it stays as it is."""
    from tokenizers import Tokenizer
    from tokenizers.implementations import BaseTokenizer

    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for given in (plain, BaseTokenizer(plain)):
        engine = init_inference(folder, tokenizer=given)
        assert engine.tokenizer.encode("abcdefg!") == [65, 66, 67, 68, 69, 70, 71, 1]
    assert plain.truncation is not None and plain.padding is not None


def test_prompts_that_are_no_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Python makes them of bytes that are no UTF-8."""
    assert command_line.main([str(folder), "--prompt", "a\udcff"]) == 2
    text = r"inference: encode: the text has '\udcff', expected whole characters"
    assert capsys.readouterr().err == text + "\n"


def test_numbers_of_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = dict(max_new_tokens=5)
    expected = init_inference(folder, quantize="int8").generate([[1, 2, 3]], **options)[0]
    given = ["--max-new-tokens", "5", "--quantize", "int8", "--max-tokens", "50"]
    assert command_line.main([str(folder), "--tokens", "1, 2 3", *given]) == 0
    assert capsys.readouterr().out.split() == [str(token) for token in expected.tokens]


def test_a_stop_string_and_one_token(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = init_inference(folder).generate("abc", max_new_tokens=9)[0].text
    assert text is not None
    given = [str(folder), "--prompt", "abc", "--max-new-tokens"]
    assert command_line.main([*given, "9", "--stop", text[3:5]]) == 0
    assert capsys.readouterr().out == text[: text.index(text[3:5])] + "\n"
    assert command_line.main([*given, "1"]) == 0
    assert capsys.readouterr() == (text[0] + "\n", "1 token\n")


@pytest.mark.parametrize(
    ("changes", "given", "text"),
    [
        ({}, ["--prompt", "abc"], "{} has no tokenizer, expected one for --prompt; without, there"),
        ({}, ["--tokens", "1", "--stop", "a"], "{} has no tokenizer, expected one for --stop; wi"),
        ({}, ["--tokens", "1", "--top-k", "-1"], "generate: top_k is -1, expected 0 to 2147483647"),
        (dict(model_type="bert"), ["--tokens", "1"], "{} has an encoder, expected a model that w"),
        (dict(tokenizer_class="GPT2Tokenizer"), ["--prompt", "abc"], "init_inference: {} has a to"),
    ],
)
def test_what_can_be_refused_before_weights_are_read_is(
    changes: dict[str, Any],
    given: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny_folder.write(tmp_path, tiny_folder.CONFIG | changes)
    if "tokenizer_class" in changes:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(changes))
    monkeypatch.setattr(command_line, "init_inference", None)
    assert command_line.main([str(tmp_path), *given]) == 2
    assert capsys.readouterr().err.startswith(f"inference: {text.format(tmp_path)}")


def test_an_option_with_a_new_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["folder", "--tokens", "1", "--activations", "int8"])
    assert capsys.readouterr().err.endswith("argument --activations: is now --input-format\n")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--quantize", "int3"], "inference: init_inference: quantize is 'int3', expected None or"),
        (["--dtype", "int4"], "inference: init_inference: dtype is 'int4', expected float32"),
        (["--device", "tpu"], "inference: init_inference: device is 'tpu', expected cpu,"),
        (["--temperature", "-1"], "inference: generate: temperature is -1.0, expected 0 or more"),
        (["--max-new-tokens", "9999"], "inference: generate: "),
        (["--prompt", "x", "--top-k", "2"], None),  # given twice: the last one counts
    ],
)
def test_errors_are_one_sentence(
    given: list[str], text: str | None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = command_line.main([str(folder), "--prompt", "abc", *given])
    out, error = capsys.readouterr()
    if text is None:
        assert status == 0
        return
    assert status == 2 and out == ""
    assert error.startswith(text) and error.count("\n") == 1, error


@pytest.mark.parametrize(
    "given",
    [
        *(["--host", "a"], ["--port", "0"], ["--api-key", "a"], ["--served-name", "a"]),
        *(["--grace", "1"], ["--max-batch", "1"], ["--allow-origin", "a"]),
    ],
    ids=lambda given: given[0],
)
def test_options_of_the_server_without_it(
    given: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would do nothing: a key, for one, would not be asked for."""
    assert command_line.main([str(folder), "--prompt", "abc", *given]) == 2
    told = f"inference: {given[0]} is given without --serve, expected both, or none\n"
    assert capsys.readouterr() == ("", told)


def test_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main([str(tmp_path / "none"), "--prompt", "abc"]) == 2
    assert "nothing is downloaded" in capsys.readouterr().err


def test_no_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(room, "free_bytes", lambda device: 1000)
        assert command_line.main([str(folder), "--prompt", "abc"]) == 2
    assert "; nothing fits, not even quantize='int4'" in capsys.readouterr().err
    monkeypatch.setattr("deepspeed_ext.inference.serving.roofline.free_bytes", lambda device: 1000)
    assert command_line.main([str(folder), "--prompt", "abc", "--max-new-tokens", "3"]) == 0
    assert re.fullmatch(r"3 tokens, \S+ a second\n", capsys.readouterr().err)


@pytest.mark.long
def test_ctrl_c_and_a_reader_that_goes(folder: Path) -> None:
    command = [sys.executable, "-m", "deepspeed_ext.inference", str(folder), "--prompt", "abc"]
    command += ["--max-new-tokens", "4000", "--max-tokens", "4096"]
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    # A shell lets its background processes ignore SIGINT, and so it would be in theirs.
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, **pipes) as run:
        assert run.stdout is not None
        fcntl.fcntl(run.stdout, fcntl.F_SETPIPE_SZ, 4096)  # it waits for us before it is done
        assert run.stdout.read(5)
        run.send_signal(signal.SIGINT)
        _, error = run.communicate()
    assert (run.returncode, error) == (130, b"\ninference: stopped\n")
    with subprocess.Popen(command, **pipes) as run:
        assert run.stdout is not None and run.stderr is not None
        assert run.stdout.read(5)
        run.stdout.close()
        assert run.wait() == 141 and run.stderr.read() == b""


def test_bytes_of_a_token(folder: Path) -> None:
    """Weights without the embedding, a head that is tied to it, and keys and values so far."""
    engine = init_inference(folder, kv_dtype="int8")
    weights = engine.decoder.weights
    read = bytes_of(weights) - weights.embedding.nbytes
    per_token = 3 * 2 * 2 * (16 + 4)  # layers, keys and values, heads
    assert bytes_per_token(engine.decoder, engine.cache, 10) == read + 10 * per_token
    bandwidth = memory_bandwidth(torch.device("cpu"))
    assert bandwidth is None or 1e8 < bandwidth < 1e13
