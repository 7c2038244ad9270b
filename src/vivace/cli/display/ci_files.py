"""Files for CI jobs: the answer as JUnit's XML, and as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from vivace.foundation.spec.settings import FILE, Option, Settings
from vivace.foundation.untrusted.destinations import check_writable, replace

if TYPE_CHECKING:
    from vivace.answers.answer import Answer


class CiFiles(Settings):
    junit: Annotated[
        Path | None,
        Option("Also write the result as JUnit's XML, for CI servers.", metavar="FILE", path=FILE),
    ] = None
    summary: Annotated[
        Path | None,
        Option(
            'Also write the result as Markdown, e.g. to "$GITHUB_STEP_SUMMARY".', metavar="FILE", path=FILE
        ),
    ] = None

    def check_ci_files(self) -> None:
        """Raise OutputError, before anything is measured, for a file that cannot be written."""
        for path in (self.junit, self.summary):
            if path is not None:
                check_writable(path)

    def write_ci_files(self, answer: Answer) -> None:
        from vivace.answers.data import junit_of
        from vivace.answers.markdown import markdown_of

        for path, write in ((self.junit, junit_of), (self.summary, markdown_of)):
            if path is not None:
                replace(path, write(answer).encode())
