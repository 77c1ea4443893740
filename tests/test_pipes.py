"""Programs whose output nobody reads to its end: no traceback, no complaint, the work put away."""

import os
import subprocess
import sys

import pytest

from deepspeed_ext.op_builder import program

PROGRAMS = [
    ["deepspeed_ext.op_builder", "list"],
    ["deepspeed_ext.op_builder", "path"],
    ["deepspeed_ext.op_builder", "--help"],
    ["deepspeed_ext.report", "cpu_adam"],
    ["deepspeed_ext.io", "--help"],
    ["deepspeed_ext.zero", "--help"],
    ["deepspeed_ext.inference", "--help"],
    ["examples.train_gpt", "--help"],
    ["examples.compare_layers", "--help"],
    ["examples.compare_states", "--help"],
    ["examples.search_docs", "--help"],
]


def unread(command, both=False, **environ):
    """Run a program whose standard output, or that and its standard error, is a closed pipe."""
    receiver, sender = os.pipe()
    os.close(receiver)
    try:
        return subprocess.run(
            [sys.executable, *command],
            stdout=sender,
            stderr=sender if both else subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
        )
    finally:
        os.close(sender)


@pytest.mark.parametrize("command", PROGRAMS, ids=" ".join)
def test_a_program_ends_quietly(command, tmp_path):
    environ = {"DS_EXT_CACHE": str(tmp_path), "DS_EXT_JIT": "0", "TMPDIR": str(tmp_path)}
    # With a buffer a short text fails as Python ends, without one as it is printed.
    unbuffered = "1" if command[-1] == "list" else ""
    done = unread(["-m", *command], PYTHONUNBUFFERED=unbuffered, **environ)
    assert done.stderr == ""
    assert done.returncode == (1 if "report" in command[0] and not unbuffered else 141)


@pytest.mark.parametrize("where", ("full", "closed"))
@pytest.mark.parametrize("command", PROGRAMS[:4], ids=" ".join)
def test_a_program_says_that_its_output_cannot_be_written(command, where, tmp_path):
    environ = {"DS_EXT_CACHE": str(tmp_path), "DS_EXT_JIT": "0", "TMPDIR": str(tmp_path)}
    # Where it fails: as it is printed, which argparse does not mind, or with a buffer at the end.
    environ["PYTHONUNBUFFERED"] = "1" if command[-1] in ("list", "--help") else ""
    closed = "import os, sys; os.close(1); os.execv(sys.argv[1], sys.argv[1:])"
    begin = [sys.executable, "-S", "-c", closed] if where == "closed" else []
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*begin, sys.executable, "-m", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
        )
    assert done.returncode == 1
    wanted = {
        "full": "standard output cannot be written, No space left on device, expected room",
        "closed": "standard output is closed, expected an open one;",
    }
    said = done.stderr.splitlines()
    assert len(said) == 1 and said[0].startswith(wanted[where]), done.stderr


def test_a_program_ends_quietly_without_anywhere_to_complain():
    done = unread(["-m", "deepspeed_ext.op_builder", "build", "no_such_op"], both=True)
    assert done.returncode == 141


LONG = """
import sys
from deepspeed_ext.op_builder import program

@program
def main(arguments):
    try:
        for _ in range(10_000):
            print("a line of text")
    finally:
        print("put away", file=sys.stderr)
    return 3

sys.exit(main())
"""


def test_work_is_put_away_and_the_status_is_that_of_sigpipe():
    done = unread(["-c", LONG])
    assert (done.returncode, done.stderr) == (141, "put away\n")


def test_another_closed_pipe_is_an_error():
    def main(arguments):
        receiver, sender = os.pipe()
        os.close(receiver)
        try:
            os.write(sender, b"x")
        finally:
            os.close(sender)
        return 0

    with pytest.raises(BrokenPipeError):
        program(main)()


def test_a_program_in_this_process_returns_its_status(capsys):
    assert program(lambda arguments: print("text", *arguments) or 5)(["more"]) == 5
    assert capsys.readouterr().out == "text more\n"
