"""Turn libraries' errors about a foreign file into one of vivace's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from vivace.errors import UnusableModel, VivaceError

_MAX_REASON = 300  # characters
# Their text alone does not say what happened.
_BARE = (LookupError, AssertionError, StopIteration, ZeroDivisionError, AttributeError, NameError)


def reading(
    what: object,
    error: type[VivaceError] = UnusableModel,
    advice: str = "",
    *,
    problem: str = "cannot be read",
) -> AbstractContextManager[None, None]:
    """Raise every failure inside the context as `error`: "WHAT cannot be read: REASON; ADVICE".

    The reason is the last line of the library's message. vivace's own errors and running out of memory, which is not
    the file's fault, stay as they are.

    Args:
        what: the file or model that is read.
        problem: replaces "cannot be read"; may be empty.
    """
    return _ReadErrors(f"{what} {problem}".rstrip(), error, advice)


@dataclass(frozen=True)
class _ReadErrors(AbstractContextManager[None, None]):
    problem: str
    error: type[VivaceError]
    advice: str

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        if (
            cause is None
            or isinstance(cause, VivaceError)
            or is_out_of_memory(cause)
            or not _is_failure(cause)
        ):
            return
        advice = f"; {self.advice}" if self.advice else ""
        raise self.error(f"{self.problem}: {reason(cause)}{advice}") from cause


def reason(error: BaseException) -> str:
    """Return the last line of an exception's message, and its class where the message alone says little."""
    if isinstance(error, OSError) and error.strerror and error.errno is not None:
        return error.strerror
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    last = lines[-1] if len(lines[-1]) <= _MAX_REASON else f"{lines[-1][:_MAX_REASON]} …"
    return f"{type(error).__name__}: {last}" if isinstance(error, _BARE) else last


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on the CPU or a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in str(error) or "out of memory" in str(error).lower()
    )


def _is_failure(error: BaseException) -> bool:
    # A panic of the tokenizers' Rust code is no Exception.
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
