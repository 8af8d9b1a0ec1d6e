"""A store that keeps its objects as files of a folder on this machine's disk."""

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from storage.local_files.durable_files import flush_folder, linked_beside, locked_folder, written_beside
from storage.local_files.regular_files import about, irregular_kind, open_regular, read_regular
from storage.local_files.temporary_files import name_written, remove_left_behind
from storage.objects.store import KEY_PART, Entry, check_key, check_prefix
from tba.errors import AlreadyExists, ConfigError, Conflict, Missing, StorageError


class LocalStore:
    """A folder whose regular files are the objects. Until a write is complete, its data is in a hidden file in the same
    folder. `create` then gives that file its final name with `link`, which fails if the name is taken. `replace` locks
    the object's folder before it reads the old object, and unlocks it when the new object has the name."""

    def __init__(self, path: str | Path):
        if not str(path):
            raise ConfigError("a store needs a path or URL, got ''")
        self.folder = Path(path).expanduser().absolute()
        self.url = str(self.folder)

    def __str__(self) -> str:
        return self.url

    def create(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with self._naming(key), written_beside(path, data) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                _refuse_irregular(path)
                raise AlreadyExists(f"{self.url}/{key} exists already") from None
            flush_folder(path.parent)

    def read(self, key: str) -> bytes:
        path = self._path(key)
        with self._naming(key):
            return read_regular(path)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        path = self._path(key)
        with self._naming(key), open_regular(path) as file:
            return os.pread(file.fileno(), length, start)

    def read_many(self, keys: Sequence[str]) -> Sequence[bytes]:
        return [self.read(key) for key in keys]

    def exists(self, key: str) -> bool:
        path = self._path(key)
        with self._naming(key):
            return path.is_file()

    def list(self, prefix: str = "", *, after: str = "") -> list[Entry]:
        start = check_prefix(prefix).rpartition("/")[0]
        with self._naming(prefix):
            found = self._walk(f"{start}/" if start else "", prefix, after)
            return sorted(Entry(key, it.st_size) for key, it in found if it and stat.S_ISREG(it.st_mode))

    def irregular(self, prefix: str = "") -> Sequence[str]:
        start = check_prefix(prefix).rpartition("/")[0]
        with self._naming(prefix):
            found = self._walk(f"{start}/" if start else "", prefix)
            return sorted(key for key, it in found if not (it and stat.S_ISREG(it.st_mode)))

    def folders(self, prefix: str = "") -> Sequence[str]:
        check_prefix(prefix)
        with self._naming(prefix):
            names = [entry.name for entry in self._scan(prefix) if _is_folder(about(entry))]
            return sorted(name for name in names if self._holds(self.folder / prefix / name))

    def upload(self, path: Path, key: str, *, may_link: bool = False) -> None:
        final = self._path(key)
        with self._naming(key), (linked_beside if may_link else written_beside)(final, path) as temporary:
            _refuse_irregular(final)
            os.replace(temporary, final)
            flush_folder(final.parent)

    def download(self, key: str, path: Path) -> None:
        source = self._path(key)
        with self._naming(key):
            open_regular(source).close()  # the source can be read, so any later error is about the copy
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()  # leave no partial file
            raise StorageError(f"{self.url}/{key} cannot be written to {path}: {error.strerror or error}") from error

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._naming(key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if not irregular_kind(path):
                path.unlink()
        self._remove_empty(path.parent)

    def unfinished(self, prefix: str = "") -> Sequence[str]:
        return sorted({key for key, _ in self._temporaries(prefix)})

    def discard(self, key: str) -> None:
        path = self._path(key)
        with self._naming(key), contextlib.suppress(FileNotFoundError):
            for name in os.listdir(path.parent):
                if name_written(name) == path.name:
                    (path.parent / name).unlink(missing_ok=True)
        self._remove_empty(path.parent)

    def discard_older(self, prefix: str, seconds: float) -> Sequence[str]:
        with self._naming(prefix):
            return sorted({key for key, path in self._temporaries(prefix) if remove_left_behind(path, seconds)})

    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        try:
            data = self.read(key)
        except Missing:
            return None
        return data, _digest(data)

    def replace(self, key: str, data: bytes, *, tag: str | None) -> str:
        path = self._path(key)
        with self._naming(key), written_beside(path, data) as temporary, locked_folder(path.parent):
            found = self.read_tagged(key)
            if (found[1] if found else None) != tag:
                raise Conflict(f"{self.url}/{key} was changed by another writer")
            if tag is None:
                try:
                    os.link(temporary, path)
                except FileExistsError:  # `create` does not wait for the lock
                    _refuse_irregular(path)
                    raise Conflict(f"{self.url}/{key} was created by another writer") from None
            else:
                os.replace(temporary, path)
            flush_folder(path.parent)
        return _digest(data)

    def local_path(self, key: str) -> Path | None:
        return self._path(key)

    def _path(self, key: str) -> Path:
        return self.folder / check_key(key)

    def _temporaries(self, prefix: str) -> Iterator[tuple[str, Path]]:
        """Yield each temporary file under a folder: the key of the object that it becomes, and its path."""
        start = self.folder / check_prefix(prefix).rpartition("/")[0]
        for folder, _, names in os.walk(start):
            for name in names:
                if (final := name_written(name)) and KEY_PART.fullmatch(final):
                    key = (Path(folder) / final).relative_to(self.folder).as_posix()
                    if key.startswith(prefix):
                        yield key, Path(folder) / name

    def _remove_empty(self, folder: Path) -> None:
        """Remove a folder if it is empty, then its parent if that is empty, and so on. The store's own folder stays."""
        with contextlib.suppress(OSError):
            while folder != self.folder:
                folder.rmdir()
                folder = folder.parent

    @contextmanager
    def _naming(self, key: str) -> Iterator[None]:
        """Convert an error of the operating system into a StorageError that names the key, or into Missing if there is
        no such file."""
        try:
            yield
        except StorageError:
            raise
        except FileNotFoundError:
            raise Missing(f"{self.url}/{key} does not exist{_instead(self.folder / key)}") from None
        except OSError as error:
            raise StorageError(f"{self.url}/{key}: {error.strerror or error}") from error

    def _walk(self, folder: str, prefix: str = "", after: str = "") -> Iterator[tuple[str, os.stat_result | None]]:
        """Yield the key and the status of everything below a folder that is not a folder itself, if the key starts with
        `prefix` and sorts after `after`. The status of a link that leads nowhere is None."""
        if folder < after and not after.startswith(folder):
            return  # everything inside sorts before `after`
        rest = after[len(folder) :] if after.startswith(folder) else ""
        for entry in self._scan(folder):
            if entry.name < rest and not rest.startswith(entry.name):
                continue  # it sorts before `after`, and so does everything inside: its status is not needed
            key, found = folder + entry.name, about(entry)
            if _is_folder(found):
                if key.startswith(prefix) or prefix.startswith(f"{key}/"):
                    yield from self._walk(f"{key}/", prefix, after)
            elif key.startswith(prefix) and key > after and (found or entry.is_symlink()):
                yield key, found

    def _holds(self, folder: Path) -> bool:
        """True if there is an object in a folder or below it. The search ends at the first object."""
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                found = about(entry) if not entry.name.startswith(".") else None
                if found and (stat.S_ISREG(found.st_mode) or (_is_folder(found) and self._holds(Path(entry.path)))):
                    return True
        return False

    def _scan(self, folder: str) -> Sequence[os.DirEntry[str]]:
        try:
            with os.scandir(self.folder / folder) as entries:
                return [entry for entry in entries if not entry.name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return []


def _refuse_irregular(path: Path) -> None:
    """Raise StorageError if something that is not a regular file lies at a path. The error says what it is."""
    if kind := irregular_kind(path):
        raise StorageError(f"{path} is {kind}, but an object must be a regular file: move it away")


def _instead(path: Path) -> str:
    """Return the end of an error message, which says what lies at a path instead of an object. Return an empty string
    if nothing lies there, or a folder."""
    kind = irregular_kind(path)
    return f": {kind} of that name is not an object" if kind not in ("", "a folder") else ""


def _is_folder(found: os.stat_result | None) -> bool:
    return found is not None and stat.S_ISDIR(found.st_mode)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
