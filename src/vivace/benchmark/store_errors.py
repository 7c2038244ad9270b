"""Errors of SQLite and the file system in words."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from vivace.errors import StoreError


@contextlib.contextmanager
def store_errors(folder: Path) -> Iterator[None]:
    """Turn errors of SQLite and the file system into StoreErrors that say what to do."""
    try:
        yield
    except StoreError:
        raise
    except sqlite3.OperationalError as error:
        text = str(error)
        if "full" in text:
            problem = (
                "the disk is full; free some space and run the same command again, finished rounds are kept"
            )
        elif "readonly" in text or "unable to open" in text:
            problem = "it cannot be written; check its permissions, or give --store another folder"
        elif "locked" in text:
            problem = "another vivace is writing to it; wait for that, or give --store another folder"
        else:
            problem = text
        raise StoreError(f"the store {folder}: {problem}") from error
    except sqlite3.DatabaseError as error:
        raise StoreError(f"the store {folder} is damaged ({error}); give --store another folder") from error
    except (ValidationError, json.JSONDecodeError) as error:
        first = str(error).splitlines()[0]
        raise StoreError(f"the store {folder} holds a row that this vivace cannot read ({first})") from error
    except OSError as error:
        raise StoreError(f"the store {folder}: {error.strerror or error}") from error
