"""Opening and committing a durable tensor store: data file and manifest, in an order that holds."""

import errno

from deepspeed_ext.io._native import native
from deepspeed_ext.io.extents import Extent
from deepspeed_ext.io.file import File
from deepspeed_ext.io.regular_file import naming
from deepspeed_ext.io.store.folder import StoreFolder
from deepspeed_ext.io.store.job import Record
from deepspeed_ext.io.store.ledger import Ledger
from deepspeed_ext.io.store.manifest import BadManifest, ManifestEntry, decode, encode
from deepspeed_ext.io.store.space import Slot, extent_of

_FULL = errno.ENOSPC, errno.EDQUOT


def open_durable(folder: StoreFolder) -> tuple[File, list[Extent], dict[str, Record]]:
    """Return the data file, the extents in use and the records of a locked folder.

    A writer makes what is missing, and cuts off what a writer that was killed has left behind.

    Raises:
        FileNotFoundError: there is no store to be read; or its data are missing.
        FileExistsError: the data of something else is in the way.
        OSError: EBADMSG: the manifest is damaged; ELOOP, EINVAL or EISDIR: a file is no regular
            one.
    """
    with naming("TensorStore", f"opening of {folder.path}"):
        has_data = folder.hold_data()  # before what tells of them is read
        text = folder.read()
        is_made = text is None
        if text is None:
            text = _made(folder, has_data=has_data)
        elif not has_data:
            want = "expected the tensors that manifest.json tells of"
            raise FileNotFoundError(errno.ENOENT, f"TensorStore: {folder.data} is missing, {want}")
        file = _opened(folder)
    try:
        entries = decode(text, file.size())
        if not (folder.read_only or is_made):
            with naming("TensorStore", f"opening of {folder.path}"):
                _publish_again(folder, text)
    except BadManifest as error:
        file.close()
        raise OSError(errno.EBADMSG, f"TensorStore: {folder.manifest} {error}") from error
    except BaseException:
        file.close()
        raise
    records = {name: _record(name, entry) for name, entry in entries.items()}
    extents = [record.slot.extent for record in records.values() if record.slot]
    if not folder.read_only:
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
        with naming("TensorStore", _doing(folder)):
            _sync(folder, file, ledger)
            _prepare(folder, text, ledger)
    except BaseException:
        ledger.release(snapshot)
        raise
    ledger.publishing(snapshot)
    with naming("TensorStore", _doing(folder)):
        folder.publish()
        folder.sync()
    ledger.published()


def _prepare(folder: StoreFolder, text: bytes, ledger: Ledger) -> None:
    """Write the next manifest, on a full disk where the data file has something to spare."""
    try:
        folder.prepare(text)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        ledger.cut_unused()
        folder.prepare(text)


def _sync(folder: StoreFolder, file: File, ledger: Ledger) -> None:
    try:
        file.sync()
    except BaseException as error:  # Ctrl-C may come when the kernel has said that it failed
        code, why = errno.EIO, repr(error)
        if isinstance(error, OSError):
            code, why = error.errno or code, str(error.strerror)
        text = f"TensorStore: {_doing(folder)} failed: {why}"
        ledger.distrust(OSError(code, text))
        raise


def _publish_again(folder: StoreFolder, text: bytes) -> None:
    """Bring the manifest that was found to the disk, whatever became of that before.

    A writer may have replaced it without seeing the folder on the disk: it was killed, or fsync
    failed, after which the next fsync has nothing to write and succeeds. What only the manifest
    before needs is going to be overwritten, so that one must not come back.
    """
    try:
        folder.prepare(text)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        why = f"{error.strerror}, expected room for a manifest; read_only=True reads the store"
        raise OSError(error.errno, why) from error
    folder.publish()
    folder.sync()


def _doing(folder: StoreFolder) -> str:
    return f"commit of {folder.path}"


def _made(folder: StoreFolder, *, has_data: bool) -> bytes:
    """Make the files of a store without a commit, and return its manifest."""
    if folder.read_only:
        raise FileNotFoundError(
            errno.ENOENT, f"TensorStore: {folder.path} has no manifest.json, expected a store"
        )
    if has_data and folder.data_bytes():
        raise FileExistsError(
            errno.EEXIST,
            f"TensorStore: {folder.path} has a file named data but no manifest.json, expected both"
            " or none; if the store may be lost, delete that file",
        )
    if not has_data:
        folder.hold_data(make=True)
    folder.sync()  # its name is there before the manifest that tells of it
    text = encode({})
    folder.prepare(text)
    folder.publish()
    folder.sync()
    return text


def _opened(folder: StoreFolder) -> File:
    """Return the data file, which the native code opens by its name, once it is locked."""
    file: File = native().File(str(folder.data), "read" if folder.read_only else "update")
    if not folder.is_data(file.fileno()):
        file.close()
        raise OSError(errno.ESTALE, f"TensorStore: {folder.data} was replaced meanwhile")
    return file


def _record(name: str, entry: ManifestEntry) -> Record:
    info, offset = entry
    return Record(name, info, Slot(extent_of(offset, info.nbytes)) if info.nbytes else None)
