"""Errors in the form that clients may see: a code and a sentence, without paths (`private_paths`) or tracebacks.

code              HTTP    error
invalid_request   400     ConfigError, RequestError
not_found         404     MissingError
conflict          409     ConflictError, MergeStateError
gone              410     GoneError
unsupported_media_type    415  MediaTypeError
unreadable_file   422     FormatError
lora_mismatch     422     TargetError
quota             429     QuotaError
busy              429     BusyError
not_ready         503     NotReadyError
out_of_memory     500     MemoryBudgetError, out-of-memory errors of the device
storage           507     StorageError
internal          500     all other errors; the log has the traceback
"""

from __future__ import annotations

from inweave.errors import (
    BusyError,
    CancelledError,
    ConfigError,
    ConflictError,
    FormatError,
    InweaveError,
    MemoryBudgetError,
    MergeStateError,
    MissingError,
    Problem,
    RequestError,
    TargetError,
)
from inweave.serve.jobs.errors import GoneError, MediaTypeError, NotReadyError, QuotaError, StorageError
from inweave.serve.jobs.job import Failure
from inweave.serve.jobs.private_paths import public

_CODES: tuple[tuple[type[InweaveError], str, int], ...] = (
    (GoneError, "gone", 410),
    (NotReadyError, "not_ready", 503),
    (MediaTypeError, "unsupported_media_type", 415),
    (MissingError, "not_found", 404),
    (ConflictError, "conflict", 409),
    (QuotaError, "quota", 429),
    (BusyError, "busy", 429),
    (MergeStateError, "conflict", 409),
    (ConfigError, "invalid_request", 400),
    (RequestError, "invalid_request", 400),
    (FormatError, "unreadable_file", 422),
    (TargetError, "lora_mismatch", 422),
    (MemoryBudgetError, "out_of_memory", 500),
    (StorageError, "storage", 507),
    (CancelledError, "cancelled", 409),
)


class JobFailed(InweaveError):
    """A job failure with no matching InweaveError: a crash, a timeout, a bug."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.code = failure.code


def failure_of(error: BaseException) -> Failure:
    """Return the code, the message and the field of an error that clients may see."""
    field = error.field if isinstance(error, InweaveError) else None
    return Failure(code_of(error), message_of(error), None if field is None else public(field))


def code_of(error: BaseException) -> str:
    """Return the code of an error."""
    if isinstance(error, JobFailed):
        return error.code
    for kind, code, _ in _CODES:
        if isinstance(error, kind):
            return code
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out_of_memory"
    return "internal"


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error."""
    for kind, _, status in _CODES:
        if isinstance(error, kind):
            return status
    return 500


def message_of(error: BaseException) -> str:
    """Return the message of an InweaveError without private paths; of any other error no details."""
    if isinstance(error, InweaveError):
        return public(str(error))
    if code_of(error) == "out_of_memory":
        return "the device has too little free memory for this request; ask for fewer or smaller images"
    return "internal error; see the worker's log for details"


def error_of(failure: Failure) -> InweaveError:
    """Return the error that another process reported."""
    prefix = "" if failure.field is None else f"{failure.field}: "
    for kind, code, _ in _CODES:
        if code == failure.code:
            return kind(Problem(failure.field, failure.message.removeprefix(prefix)))
    return JobFailed(failure)
