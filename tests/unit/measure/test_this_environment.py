"""What a record says of the software that it was measured with."""

import subprocess
from pathlib import Path

from vivace.measure.this_environment import source_revision


def git(root: Path, *arguments: str) -> str:
    told = ["git", "-C", str(root), "-c", "user.name=Test", "-c", "user.email=test@example.org", *arguments]
    return subprocess.run(told, check=True, capture_output=True, text=True).stdout.strip()


def test_changed_code_is_not_taken_for_its_commit(tmp_path: Path) -> None:
    assert source_revision(tmp_path) is None, "an installed package"
    code, note = tmp_path / "src" / "package" / "code.py", tmp_path / "results.json"
    code.parent.mkdir(parents=True)
    git(tmp_path, "init", "--quiet")
    for path in (code, note):
        path.write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    commit = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    note.write_text("2")
    assert source_revision(tmp_path) == commit, "a record that is being written changes no code"
    revisions = []
    for text in ("2", "3"):
        code.write_text(text)
        revisions.append(source_revision(tmp_path))
    assert all(revision is not None and revision.startswith(f"{commit}+") for revision in revisions)
    assert revisions[0] != revisions[1]
    code.write_text("1")
    assert source_revision(tmp_path) == commit
