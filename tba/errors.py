"""The errors of the system, as one tree of classes.

TBAError
├── ConfigError          a setting is unknown, out of range or contradicts another (also a ValueError)
├── DataError            a task's data is missing or malformed, or its own code fails (also a ValueError)
├── StorageError         an object is missing, damaged or refused (names the key)
│   ├── AlreadyExists    a create-only name is taken (also a FileExistsError)
│   ├── Missing          no such object (also a FileNotFoundError)
│   ├── Conflict         another writer changed an object first (a compare-and-swap failed)
│   ├── Damaged          an object is not what its name or checksum promises
│   └── UnsafeStore      the object store ignores conditional writes
├── Superseded           another incarnation of this role has taken over: stop, touch nothing
├── Stopped              the run was asked to stop; everything committed is safe
├── Busy                 requests in flight cannot continue with the new version: adopt it once they have finished
├── DeadlinePassed       a wait took too long (says for what, and since when; also a TimeoutError)
├── QueryError           a query has no answer
│   ├── QueryFailed      the database refused the query; the message is the database's own
│   ├── Refused          the query asks for something that is not allowed or does not exist
│   │   └── TooLong      the query took longer than its time limit
│   └── QueryEnded       the query ended the process that answers queries
└── RunFailed            a role kept failing, or the run cannot go on
"""


class TBAError(Exception):
    """Base class of every error that a user can act on. Such errors are shown without a traceback."""


class ConfigError(TBAError, ValueError): ...


class DataError(TBAError, ValueError): ...


class StorageError(TBAError): ...


class AlreadyExists(StorageError, FileExistsError): ...


class Missing(StorageError, FileNotFoundError): ...


class Conflict(StorageError): ...


class Damaged(StorageError): ...


class UnsafeStore(StorageError): ...


class Superseded(TBAError): ...


class Stopped(TBAError): ...


class Busy(TBAError): ...


class DeadlinePassed(TBAError, TimeoutError): ...


class QueryError(TBAError): ...


class QueryFailed(QueryError): ...


class Refused(QueryError): ...


class TooLong(Refused): ...


class QueryEnded(QueryError): ...


class RunFailed(TBAError): ...


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class where it has no message."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def error_named(name: str, says: str) -> Exception:
    """Rebuild an error that another process raised, from its class name and message. An error that is not a TBAError
    becomes a RuntimeError."""
    kind = globals().get(name)
    return kind(says) if isinstance(kind, type) and issubclass(kind, TBAError) else RuntimeError(f"{name}: {says}")
