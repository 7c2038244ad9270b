"""What only some systems have for processes is used in `foundation.processes` alone, beside what takes its place."""

import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "vivace"
_POSIX = re.compile(
    r"\bos\.(?:fork|forkpty|killpg|setsid|setpgid|getpgid|waitpid|kill|getloadavg|register_at_fork)\b"
    r"|\bsignal\.(?:SIGKILL|SIGALRM|SIGUSR[12]|SIGHUP|SIGCHLD|setitimer|alarm|pthread_\w+)\b"
    r"|\bimport (?:resource|fcntl|pwd|grp|termios|pty)\b|\bprctl\b|\bpreexec_fn\b|\bselect\.e?poll\b"
)


def test_posix_calls_are_in_processes_alone() -> None:
    used = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.parent.name != "processes"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if _POSIX.search(line)
    ]
    assert used == []
    assert _POSIX.search("    os.killpg(pid, 9)")
