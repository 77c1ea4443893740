"""Memory that shows parts of files: what is seen, what is kept from the file, what is refused."""

import os

import pytest
import torch

from deepspeed_ext.io import AsyncIO, TensorStore
from deepspeed_ext.io.extents import PAGE
from deepspeed_ext.io.file_map import file_map, scratch_file


@pytest.fixture
def store(tmp_path):
    with TensorStore(tmp_path) as made:
        made.put("a", torch.arange(2 * PAGE, dtype=torch.int32).view(torch.uint8))
        yield made


def test_shows_zeros_and_parts_of_files(store):
    view, memory = file_map(3 * PAGE)
    assert not memory.any()
    store.show("a", view, PAGE, PAGE, 2 * PAGE)
    numbers = memory.view(torch.int32)
    per_page = PAGE // 4
    assert torch.equal(
        numbers[per_page : 2 * per_page], torch.arange(per_page).int() + 2 * per_page
    )
    assert not numbers[:per_page].any() and not numbers[2 * per_page :].any()


def test_what_is_written_stays_in_memory_until_it_is_shown_anew(store):
    view, memory = file_map(PAGE)
    store.show("a", view, 0, PAGE)
    memory.fill_(7)
    assert torch.equal(store.get("a")[:PAGE].view(torch.int32), torch.arange(PAGE // 4).int())
    store.show("a", view, 0, PAGE)
    assert torch.equal(memory.view(torch.int32), torch.arange(PAGE // 4).int())


def test_follows_what_is_put(store):
    view, memory = file_map(PAGE)
    store.show("a", view, 0, PAGE)
    assert memory[4] == 1  # so the page is in the cache of the kernel
    store.put("a", torch.full((8 * PAGE,), 5, dtype=torch.uint8))
    assert (memory == 5).all()


def test_what_is_hidden_shows_zeros_and_can_show_again(store):
    view, memory = file_map(2 * PAGE)
    store.show("a", view, PAGE, PAGE)
    memory[0] = 9
    view.hide()
    assert not memory.any()
    store.show("a", view, PAGE, PAGE)
    assert memory[PAGE + 4] == 1


def test_outlives_its_store(tmp_path):
    store = TensorStore(tmp_path)
    store.put("a", torch.full((PAGE,), 5, dtype=torch.uint8))
    view, memory = file_map(PAGE)
    store.show("a", view, 0, PAGE)
    store.close()
    assert (memory == 5).all()


def test_what_is_written_to_a_shared_part_is_in_the_file_at_once(tmp_path):
    file = scratch_file(str(tmp_path))
    file.allocate(0, 3 * PAGE)
    file.refuse_direct()
    assert not file.direct
    view, memory = file_map(2 * PAGE)
    view.show(PAGE, PAGE, file, 2 * PAGE, shared=True)
    found = torch.empty(3 * PAGE, dtype=torch.uint8)
    with AsyncIO() as engine:
        for value in (5, 6):
            memory.fill_(value)
            assert (engine.read(found, file).result()[2 * PAGE :] == value).all()
        assert not found[: 2 * PAGE].any()
        assert engine.stats()["direct_bytes"] == 0
    view.show(PAGE, PAGE, file, 2 * PAGE)
    memory.fill_(7)
    assert os.pread(file.fileno(), 1, 2 * PAGE) == b"\6"


@pytest.mark.parametrize(("begin", "nbytes", "at"), [(1, PAGE, 0), (0, PAGE, 9), (PAGE, 5000, 0)])
def test_refuses_parts_that_do_not_fit(store, begin, nbytes, at):
    view, _ = file_map(2 * PAGE)
    with pytest.raises(
        ValueError, match=r"^FileMap: part is of .*, expected whole pages inside of"
    ):
        store.show("a", view, begin, nbytes, at)


def test_refuses_names_that_are_not_there(store):
    with pytest.raises(KeyError):
        store.show("b", file_map(PAGE)[0], 0, PAGE)
    with pytest.raises(ValueError, match="nbytes is negative"):
        file_map(-1)
