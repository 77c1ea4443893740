"""Opening and committing a durable tensor store: data file and manifest, in an order that holds."""

import contextlib
import errno
import os
from collections.abc import Iterator

from deepspeed_ext.io._native import native
from deepspeed_ext.io.extents import Extent
from deepspeed_ext.io.file import File
from deepspeed_ext.io.ledger import Ledger
from deepspeed_ext.io.manifest import BadManifest, Entry, decode, encode
from deepspeed_ext.io.regular_file import open_regular
from deepspeed_ext.io.space import Slot, extent_of
from deepspeed_ext.io.store_folder import StoreFolder
from deepspeed_ext.io.store_job import Record


def open_durable(
    folder: StoreFolder, read_only: bool
) -> tuple[File, list[Extent], dict[str, Record]]:
    """Return the data file, the extents in use and the records of a locked folder.

    A writer makes what is missing, and cuts off what a writer that was killed has left behind.

    Raises:
        FileNotFoundError: read_only, and there is no store.
        FileExistsError: the data of something else is in the way.
        OSError: EBADMSG: the manifest is damaged; ELOOP or EINVAL: a file is no regular one.
    """
    text = folder.read()
    if text is None:
        text = _made(folder, read_only)
    file = _opened(folder, read_only)
    try:
        entries = decode(text, file.size())
    except BadManifest as error:
        file.close()
        raise OSError(errno.EBADMSG, f"TensorStore: {folder.manifest} {error}") from error
    records = {name: _record(name, entry) for name, entry in entries.items()}
    extents = [record.slot.extent for record in records.values() if record.slot]
    if not read_only:
        # This also waits for direct writes of a writer that was killed a moment ago.
        file.truncate(max((extent.end for extent in extents), default=0))
    return file, extents, records


def commit(folder: StoreFolder, file: File, ledger: Ledger) -> None:
    """Bring what the ledger has now to the disk: data first, then the manifest that speaks of it.

    Until the manifest is replaced, the disk has the commit before. From then on it may have either,
    so both are kept from being overwritten until the new one is there for certain.
    """
    snapshot = ledger.snapshot()
    if snapshot is None:
        return
    try:
        text = encode(ledger.wait_for(snapshot))
        with _naming(folder):
            _sync(folder, file, ledger)
            folder.prepare(text)
    except BaseException:
        ledger.release(snapshot)
        raise
    ledger.publishing(snapshot)
    with _naming(folder):
        folder.publish()
        folder.sync()
    ledger.published()


def _sync(folder: StoreFolder, file: File, ledger: Ledger) -> None:
    try:
        file.sync()
    except OSError as error:
        ledger.distrust(_named(folder, error))
        raise


@contextlib.contextmanager
def _naming(folder: StoreFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _named(folder, error) from error


def _named(folder: StoreFolder, error: OSError) -> OSError:
    return OSError(error.errno, f"TensorStore: commit of {folder.path} failed: {error.strerror}")


def _made(folder: StoreFolder, read_only: bool) -> bytes:
    if read_only:
        raise FileNotFoundError(
            errno.ENOENT, f"TensorStore: {folder.path} has no manifest.json, expected a store"
        )
    if folder.has_data():
        raise FileExistsError(
            errno.EEXIST,
            f"TensorStore: {folder.path} has a file named data but no manifest.json, expected both"
            " or none; if the store may be lost, delete that file",
        )
    _opened(folder, read_only).close()  # before the manifest that speaks of it
    text = encode({})
    folder.prepare(text)
    folder.publish()
    folder.sync()
    return text


def _opened(folder: StoreFolder, read_only: bool) -> File:
    """Return the data file, which the native code opens by its name, once it is known to be one."""
    flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
    fd = open_regular("TensorStore", folder.data, flags, follow=False)
    try:
        file: File = native().File(str(folder.data), "read" if read_only else "update")
        if not os.path.sameopenfile(fd, file.fileno()):
            file.close()
            raise OSError(errno.ESTALE, f"TensorStore: {folder.data} was replaced meanwhile")
    finally:
        os.close(fd)
    return file


def _record(name: str, entry: Entry) -> Record:
    info, offset = entry
    return Record(name, info, Slot(extent_of(offset, info.nbytes)) if info.nbytes else None)
