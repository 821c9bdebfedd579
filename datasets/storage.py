"""Writing files so that nobody ever reads half of one, and so that two do not write one.

The content goes to a new file beside the target, is flushed to the disk, and takes the target's
name in one step (POSIX ``rename``). A reader sees the old file or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from foreplan.errors import SpecError


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file whole or not at all.

    A symbolic link is followed, so that the file it names is replaced and the link stays. A pipe
    or a device (``/dev/stdout``) is written to directly, because renaming would replace it.

    Args:
        path: where to write; the folder must exist. An existing file keeps its permissions.
        content: text is encoded as UTF-8 with line ends as they are.

    Raises:
        SpecError: the path cannot be written (no such folder, a folder of that name, no
            permission, disk full); the former file is then still whole.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    with _writable(Path(path)):
        # As given: what ``/dev/stdout`` leads to has no path of its own where it is a pipe.
        mode = _mode(Path(path))
        if mode is not None and stat.S_ISDIR(mode):
            raise IsADirectoryError(f"Is a directory: {target}")
        if mode is not None and not stat.S_ISREG(mode):
            Path(path).write_bytes(data)
            return
        _replace(target, data, None if mode is None else stat.S_IMODE(mode))


def write_together(
    folder: str | os.PathLike[str], files: Mapping[str, str | bytes], *, runnable: str = ".sh"
) -> None:
    """Write files that belong together: all of them, or none where one cannot be written.

    Args:
        folder: where; it must exist.
        files: content by name, as of `write_atomically`.
        runnable: files whose names end like this may be run.

    Raises:
        SpecError: a file cannot be written; the former files are then still whole. (Where a disk
            fails while files take their names, those that have taken them stay.)
    """
    staged: list[tuple[Path, Path]] = []
    try:
        for name, content in files.items():
            target = Path(os.path.realpath(Path(folder) / name))
            data = content.encode("utf-8") if isinstance(content, str) else content
            with _writable(Path(folder) / name):
                mode = _mode(target)
                if mode is not None and not stat.S_ISREG(mode):
                    raise FileExistsError(f"no regular file: {target}")
                permissions = None if mode is None else stat.S_IMODE(mode)
                aside = _aside(target, data, 0o755 if name.endswith(runnable) else permissions)
                staged.append((aside, target))
        while staged:
            aside, target = staged[0]
            with _writable(target):
                os.replace(aside, target)
            staged.pop(0)
    finally:  # nothing is left to unlink where all took their names
        for aside, _ in staged:
            with contextlib.suppress(OSError):
                aside.unlink()
    _sync_folder(Path(folder))


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    """Say in a line which file could not be written."""
    try:
        yield
    except OSError as error:
        raise SpecError(
            str(path), got=error.strerror or str(error), expected="a path that can be written"
        ) from error


def refuse_overwriting(output: str | os.PathLike[str], *inputs: object) -> None:
    """Refuse to write over what is read, before it is lost.

    Args:
        output: what will be written.
        inputs: what is read; whatever is no path of a file is passed over.

    Raises:
        SpecError: they are the same file.
    """
    for source in inputs:
        if isinstance(source, (str, os.PathLike)):
            with contextlib.suppress(OSError, ValueError):  # one of them is no file
                if os.path.samefile(output, source):
                    raise SpecError(
                        str(output), got="a file that is read here", expected="another to write"
                    )


def refuse_twice(*outputs: str | os.PathLike[str] | None) -> None:
    """Refuse to write two documents into one file, where the first would be lost.

    Args:
        outputs: what will be written, ``None`` for a document that is not asked for.

    Raises:
        SpecError: two are the same file; a pipe or a device may take several.
    """
    seen: set[str] = set()
    for output in outputs:
        if output is None or (Path(output).exists() and not Path(output).is_file()):
            continue
        target = os.path.realpath(output)
        if target in seen:
            raise SpecError(
                str(output), got="one file for two documents", expected="a file for each"
            )
        seen.add(target)


def refuse_unwritable(output: str | os.PathLike[str]) -> None:
    """Refuse a file that `write_atomically` could not write, before the work rather than after it.

    Raises:
        SpecError: a folder of that name, no folder to write into, or no permission. A disk may be
            full later all the same.
    """
    if Path(output).exists() and not (Path(output).is_file() or Path(output).is_dir()):
        return  # a pipe or a device
    target = Path(os.path.realpath(output))
    folder = target.parent
    wrong = (
        "Is a directory" if target.is_dir()
        else "No such file or directory" if not folder.exists()
        else "Not a directory" if not folder.is_dir()
        else "Permission denied" if not os.access(folder, os.W_OK | os.X_OK)
        else None
    )  # fmt: skip
    if wrong is not None:
        raise SpecError(
            str(output), got=wrong, expected="a path that can be written",
            fix=None if folder.exists() else f"make the folder {folder} first",
        )  # fmt: skip


@contextlib.contextmanager
def exclusive(
    path: str | os.PathLike[str], *, wait: bool = False, file: bool = False
) -> Iterator[None]:
    """Be the only process of this machine that writes a file or folder, until the block ends.

    The lock is a file beside it, ``.NAME.lock``; the system lets go of it when its holder dies.

    Args:
        path: what is written; its folder must exist.
        wait: for another process to end, rather than to refuse.
        file: whether a folder of that name is refused, before the work rather than after it.

    Raises:
        SpecError: another process writes it, or the lock cannot be made.
    """
    target = Path(os.path.realpath(path))
    if file and target.is_dir():
        raise SpecError(str(path), got="a folder", expected="a file to write")
    lock = target.with_name(f".{target.name[:64]}.lock")
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise SpecError(
                str(path), got=error.strerror, expected="a path that can be written"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # The holder before may have removed the file between our opening and locking it.
            if os.path.exists(lock) and os.path.samestat(os.fstat(descriptor), lock.stat()):
                break
        except FileNotFoundError:
            pass
        except BlockingIOError as error:
            os.close(descriptor)
            raise SpecError(
                str(path), got="a path that another process writes",
                expected="one process at a time",
                fix="wait for it to end, or choose another output",
            ) from error  # fmt: skip
        os.close(descriptor)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()
        os.close(descriptor)


@contextlib.contextmanager
def folder_for(output: str | os.PathLike[str], where: str = "--output") -> Iterator[Path]:
    """Make a folder that the block writes into; if nothing gets into it, it is not left behind.

    Args:
        output: the folder, made with its parents where it is missing.
        where: what to call it in an error.

    Raises:
        SpecError: it cannot be made.
    """
    folder = Path(output)
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        got = getattr(error, "strerror", None) or error
        raise SpecError(where, got=f"{folder} ({got})", expected="a folder to make") from error
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # those that hold something stay
            for path in missing:
                path.rmdir()


def _mode(target: Path) -> int | None:
    try:
        return target.stat().st_mode
    except FileNotFoundError:
        return None


def _replace(target: Path, data: bytes, permissions: int | None) -> None:
    aside = _aside(target, data, permissions)
    try:
        os.replace(aside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    _sync_folder(target.parent)


def _aside(target: Path, data: bytes, permissions: int | None) -> Path:
    """A new file beside ``target`` with the whole content on the disk."""
    aside = target.with_name(f".{target.name[:64]}.{secrets.token_hex(6)}.tmp")
    # 0o666 is narrowed by the umask as for any file; tempfile's 0o600 would lock colleagues out.
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        if permissions is not None:
            aside.chmod(permissions)
    except BaseException:  # Ctrl-C too must leave nothing behind
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    return aside


def _sync_folder(folder: Path) -> None:
    """Make the rename itself last; some file systems cannot, and the content is safe anyway."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
