"""CUDA targets: how they are read, what is chosen without a list, and what nvcc does not know."""

import pytest

from deepspeed_ext.op_builder import cuda
from deepspeed_ext.op_builder.cuda import Request, Target, clamp, parse_targets
from deepspeed_ext.op_builder.errors import Unavailable

CUDA_13 = [75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121]
CUDA_11 = [35, 50, 60, 70, 75, 80, 86, 89, 90]
BY_NAME = "TORCH_CUDA_ARCH_LIST"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("8.0", [Target(80)]),
        ("8.0;9.0", [Target(80), Target(90)]),
        ("9.0 8.0", [Target(80), Target(90)]),
        ("10.0", [Target(100)]),
        ("12.0", [Target(120)]),
        ("12.1+PTX", [Target(121, "", True)]),
        ("9.0a", [Target(90, "a")]),
        ("10.0f", [Target(100, "f")]),
        ("9.0a+PTX;10.0", [Target(90, "a", True), Target(100)]),
        ("80;90;100+PTX", [Target(80), Target(90), Target(100, "", True)]),
        ("8.0; 8.0 ;", [Target(80)]),
    ],
)
def test_lists_are_read(text: str, expected: list[Target]) -> None:
    assert list(parse_targets(text)) == expected


@pytest.mark.parametrize("word", ["8", "Hopper", "9.0b", "9.0+ptx", "1.0.0", "9.0,10.0", "sm_90"])
def test_what_is_no_target_is_an_error(word: str) -> None:
    with pytest.raises(Unavailable, match=f"TORCH_CUDA_ARCH_LIST has '{word.replace('+', '.')}'"):
        parse_targets(word)


@pytest.mark.parametrize(
    "target, flags",
    [
        (Target(90), ["-gencode=arch=compute_90a,code=sm_90a"]),
        (
            Target(90, ptx=True),
            [
                "-gencode=arch=compute_90a,code=sm_90a",
                "-gencode=arch=compute_90,code=compute_90",
            ],
        ),
        (Target(90, "a"), ["-gencode=arch=compute_90a,code=sm_90a"]),
        (
            Target(120, "", True),
            [
                "-gencode=arch=compute_120,code=sm_120",
                "-gencode=arch=compute_120,code=compute_120",
            ],
        ),
    ],
)
def test_flags_of_a_target(target: Target, flags: list[str]) -> None:
    assert target.gencode() == flags


def test_the_list_wins_over_devices_and_devices_over_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "device_capabilities", lambda: [120])
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert cuda.requested_targets() == Request((Target(90),), BY_NAME)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", " ;")
    assert cuda.requested_targets().targets == (Target(120),)
    monkeypatch.setattr(cuda, "device_capabilities", list)
    assert cuda.requested_targets().targets == parse_targets("80;90;100+PTX")


def test_known_targets_stay_as_they_are() -> None:
    request = Request(parse_targets("8.0 9.0a 10.0f+PTX"), BY_NAME)
    assert clamp(request, CUDA_13) == (request.targets, [])


def test_an_unknown_target_asked_for_by_name_is_an_error() -> None:
    request = Request(parse_targets("9.0;12.0"), BY_NAME)
    with pytest.raises(
        Unavailable, match=r"names 12\.0, which this nvcc does not know .only 3\.5 to 9\.0"
    ):
        clamp(request, CUDA_11)


@pytest.mark.parametrize(
    "targets, expected",
    [
        ("80;90;100+PTX", "80;90+PTX"),  # the driver makes code for later devices from PTX
        ("120", "90+PTX"),
        ("80;120", "80;90+PTX"),
    ],
)
def test_an_unknown_target_of_the_default_is_dropped_with_a_note(
    targets: str, expected: str
) -> None:
    kept, notes = clamp(Request(parse_targets(targets), "the default"), CUDA_11)
    assert kept == parse_targets(expected)
    assert len(notes) == 1 and "dropped" in notes[0]


def test_a_device_that_is_too_old_leaves_nothing() -> None:
    with pytest.raises(Unavailable, match=r"6\.0 of the devices .* dropped.*7\.5 to 12\.1"):
        clamp(Request((Target(60),), "the devices of this machine"), CUDA_13)
