"""What Windows lacks is used where `vivace.foundation.processes` says it may be, and nowhere else."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "vivace"
MODULES = {
    "fcntl",
    "resource",
    "pwd",
    "grp",
    "termios",
    "tty",
    "pty",
    "syslog",
    "posix",
    "readline",
    "curses",
}
ATTRIBUTES = {
    "os": {
        "fork", "forkpty", "killpg", "setpgid", "getpgid", "setsid", "getuid", "geteuid", "getgid", "getgroups",
        "chown", "fchmod", "getloadavg", "uname", "nice", "mkfifo", "statvfs", "waitpid", "wait", "register_at_fork",
        "sched_getaffinity", "O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC", "O_DIRECTORY", "O_NOCTTY", "sync", "pread",
        "getpriority",
    },
    "signal": {
        "SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGPIPE", "SIGSTOP", "SIGCONT",
        "alarm", "setitimer", "pthread_sigmask", "sigwait", "pause",
    },
    "select": {"poll", "epoll", "kqueue"},
}  # fmt: skip
GUARDED = {
    "foundation/processes/launcher.py": {"os.killpg", "signal.SIGKILL", "select.poll"},
    "foundation/processes/resident.py": {
        "os.fork",
        "os.waitpid",
        "os.register_at_fork",
        "os.setpgid",
        "signal.SIGKILL",
        "select.poll",
    },
    "foundation/processes/template.py": {
        "os.fork",
        "os.setsid",
        "os.waitpid",
        "signal.SIGCHLD",
        "signal.pthread_sigmask",
    },
    "foundation/processes/system.py": {"fcntl", "os.O_DIRECTORY", "os.O_NOFOLLOW", "resource"},
    "serve/queue/messages.py": {"os.getuid"},
    "foundation/untrusted/destinations.py": {"os.chown"},
}
"""Each asks `processes.system`, or for the attribute, first. `tests/unit/*/test_without_fork.py` run without them."""


def of_posix(source: str) -> Iterator[str]:
    """Yield the modules and attributes of POSIX alone that a file uses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = {alias.name for alias in node.names} & ATTRIBUTES.get(node.module or "", set())
            yield from (f"{node.module}.{name}" for name in names)
            if (node.module or "") in MODULES:
                yield str(node.module)
        elif isinstance(node, ast.Attribute):
            module = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in ATTRIBUTES.get(module, ()):
                yield f"{module}.{node.attr}"


def test_what_windows_lacks_is_used_in_guarded_places_alone() -> None:
    used = {
        path.relative_to(SOURCE).as_posix(): names
        for path in SOURCE.rglob("*.py")
        if (names := set(of_posix(path.read_text(encoding="utf-8"))))
    }
    assert used == GUARDED


def test_a_use_is_noticed() -> None:
    source = (
        "import fcntl\nfrom signal import SIGKILL\nos.fork()\nsignal.SIGTERM\nfrom resource import getrusage"
    )
    assert set(of_posix(source)) == {"fcntl", "signal.SIGKILL", "os.fork", "resource"}


def test_names_of_files_are_told_apart_without_case() -> None:
    """Two files whose names differ by case alone are one file on Windows and macOS."""
    names = [path.relative_to(SOURCE.parents[1]).as_posix() for path in SOURCE.parents[1].glob("*/**/*.py")]
    names = [name for name in names if not name.startswith((".venv", "build"))]
    assert len({name.lower() for name in names}) == len(names)
    reserved = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))}
    assert not [
        name for name in names if reserved & {part.partition(".")[0].lower() for part in name.split("/")}
    ]
