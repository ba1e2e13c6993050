"""What a cell sees of the machine, and the bubblewrap command that shows it exactly that; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from runner.rules.isolation import Network

_SHELLS = ("bash.bashrc", "inputrc", "profile", "shells", "terminfo")
_NAMES = ("gai.conf", "host.conf", "hostname", "hosts", "nsswitch.conf", "protocols", "resolv.conf", "rpc", "services")
_LOADER = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d")
_TRUST = ("ca-certificates", "ca-certificates.conf", "pki", "ssl")
_LANGUAGES = ("java-11-openjdk", "java-17-openjdk", "java-21-openjdk", "perl", "python3", "python3.11", "python3.12")
_PLACE = ("debian_version", "fonts", "localtime", "lsb-release", "magic", "mime.types", "os-release", "timezone")
ETC: Final = (*_SHELLS, *_NAMES, *_LOADER, *_TRUST, *_LANGUAGES, "python3.13", *_PLACE)
"""Names below /etc that programs need; none holds a secret, which /etc/profile.d and /etc/gitconfig may."""
_TOOLCHAIN: Final = ("bin", "include", "lib", "lib32", "lib64", "libexec", "pyvenv.cfg")


@dataclass(frozen=True, slots=True)
class System:
    """The part of the machine that every cell sees, read-only.

    Attributes:
        folders: whole folders, e.g. ``/usr``.
        links: path and target of those that are symlinks, e.g. ``/bin`` to ``usr/bin``.
        etc: files and folders below ``/etc``.
    """

    folders: tuple[str, ...]
    links: tuple[tuple[str, str], ...] = ()
    etc: tuple[str, ...] = ()

    def holds(self, path: str) -> bool:
        """Whether a path is in sight already."""
        return any(below(path, folder) for folder in (*self.folders, *(link for link, _ in self.links)))


@dataclass(frozen=True, slots=True)
class CellView:
    """What one cell sees beside the system; every path is the same inside as outside.

    Attributes:
        read, write: paths it may read, and write.
        hidden: folders that stay hidden where a path above them is shown; what is listed below them is shown again.
        masked: files, which are there, that stay hidden likewise.
        tmp: its own temporary folder, which is also its ``/tmp`` and ``/var/tmp``.
        accounts: files that stand in for ``/etc/passwd`` and ``/etc/group``.
    """

    read: tuple[str, ...]
    write: tuple[str, ...]
    hidden: tuple[str, ...]
    tmp: str
    accounts: tuple[str, str]
    masked: tuple[str, ...] = ()


def below(path: str, folder: str) -> bool:
    """Whether ``path`` is ``folder`` or lies under it; both absolute and normal."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def places_of(secret: str, shown: Iterable[tuple[str, str]]) -> list[str]:
    """Every path by which a cell would reach a real path below what it is shown, links on the way followed.

    Args:
        secret: a real path.
        shown: each path that is shown, and its real path.
    """
    found = [path.rstrip("/") + secret[len(real.rstrip("/")) :] for path, real in shown if below(secret, real)]
    return list(dict.fromkeys(found))


def bubblewrap(
    program: str, system: System, view: CellView, *, uid: int, gid: int, network: Network, init: Sequence[str]
) -> list[str]:
    """The command that runs ``init`` as process 1 of a cell.

    The user namespace comes first of all: without one, a root runner's cell would keep every capability.
    """
    argv = [program, "--unshare-user", "--uid", str(uid), "--gid", str(gid), "--unshare-pid", "--unshare-ipc"]
    argv += ["--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--as-pid-1", "--hostname", "cell"]
    if network != "shared":
        argv.append("--unshare-net")
    for folder in system.folders:
        argv += ["--ro-bind", folder, folder]
    for link, target in system.links:
        argv += ["--symlink", target, link]
    for path in system.etc:
        argv += ["--ro-bind-try", path, path]
    for path, name in zip(view.accounts, ("/etc/passwd", "/etc/group"), strict=True):
        argv += ["--ro-bind", path, name]
    argv += ["--proc", "/proc", "--dev", "/dev", "--bind", view.tmp, "/tmp", "--bind", view.tmp, "/var/tmp"]
    for option, path in _shown(system, view):
        argv += [option, path] if option == "--tmpfs" else [option, path, path]
    for path in view.masked:
        argv += ["--ro-bind", "/dev/null", path]
    return [*argv, "--remount-ro", "/", "--chdir", "/", "--", *init]


def _shown(system: System, view: CellView) -> list[tuple[str, str]]:
    """Binds in an order in which none covers another: what lies higher comes first; writable wins over readable."""
    kinds: dict[str, str] = {path: "--ro-bind-try" for path in view.read if not system.holds(path)}
    kinds.update((path, "--bind-try") for path in (*view.write, view.tmp))
    covering = tuple(kinds)
    for path in view.hidden:
        if any(below(path, shown) and path != shown for shown in covering):
            kinds[path] = "--tmpfs"
    found: dict[str, str] = {}
    for path in sorted(kinds, key=lambda path: (path.rstrip("/").count("/"), path)):
        around = [shown for shown in found if below(path, shown)]
        # A second bind of what is shown already fails where it would go through a symlink.
        if not around or found[max(around, key=len)] != kinds[path]:
            found[path] = kinds[path]
    return [(option, path) for path, option in found.items()]


def toolchain(program: str, there: Iterable[str]) -> tuple[str, ...]:
    """The parts of a ``<prefix>/bin/<program>`` that it needs beside itself, of those that are ``there``.

    Never the whole prefix: that may be a person's ``~/.local``, with data in it.

    Args:
        program: absolute path of the program.
        there: names that exist below the prefix.
    """
    parent, _, _ = program.rpartition("/")
    prefix, _, folder = parent.rpartition("/")
    names = set(there)
    if folder != "bin" or not prefix or not names & {"lib", "pyvenv.cfg"}:
        return (program,)
    return tuple(f"{prefix}/{name}" for name in _TOOLCHAIN if name in names)
