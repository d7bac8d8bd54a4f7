"""Test locks on files: who holds them, when they end, and that they follow no links."""

import contextlib
import errno
import fcntl
import os
import subprocess
import sys

import numpy as np
import pytest

from fbuf._formats.checkpoint.directory import Folder
from fbuf._formats.checkpoint.filesystem import DISK, write_partial
from fbuf._host.io import lock as locks
from fbuf._host.io.directory import rollback
from fbuf._host.io.file import File
from fbuf._host.io.lock import lock_path
from fbuf.datasets import _lock
from tests.support.disk import make
from tests.support.paths import ROOT
from tests.support.processes import run_python
from tests.support.refusals import raises
from tests.support.store import columns_of, fetch
from tests.support.threads import Thread


def take(path):
    return lock_path("Test: it", str(path), "Wait.")


def test_a_lock_is_held_until_its_last_user_releases_it(tmp_path):
    first = take(tmp_path / "a")
    first.share()
    for _ in range(2):
        raises(
            BlockingIOError, "Test: it is in use by this process; expected no other user. Wait.", take, tmp_path / "a"
        )
        assert first.is_held and first.is_at(str(tmp_path / "a")) and not first.is_at(str(tmp_path / "b"))
        first.release()
    assert not first.is_held and not first.is_at(str(tmp_path / "a"))
    second = take(tmp_path / "a")
    first.release()  # once too often, which releases no one else's
    raises(BlockingIOError, None, take, tmp_path / "a")
    second.release()


@pytest.mark.parametrize(
    ("text", "who"),
    [("{pid}", "process {pid} of another container"), ("7", "process 7;"), ("\xff\n", "another process")],
)
def test_the_holder_is_told_by_the_lock_and_not_by_its_number(tmp_path, text, who):
    with (tmp_path / "a").open("w") as other:  # as a process of another container that has the same number
        print(text.format(pid=os.getpid()), end="", file=other, flush=True)
        fcntl.flock(other, fcntl.LOCK_EX)
        raises(BlockingIOError, f"in use by {who.format(pid=os.getpid())}", take, tmp_path / "a")


def test_links_and_pipes_are_refused_and_stay(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("precious")
    folder.mkdir()
    (folder / "lock").symlink_to(victim)
    raises(OSError, "cannot open .*/lock: Too many levels.*Replace the link", make, folder, columns_of(None))
    raises(OSError, "cannot open .*/lock", lambda: Folder(folder, DISK).locked().__enter__())
    raises(OSError, "cannot open .*/lock", lambda: _lock.exclusive("Test", folder).__enter__())
    assert victim.read_text() == "precious"
    os.mkfifo(tmp_path / "pipe")
    raises(OSError, "pipe is not a plain file. Remove it", take, tmp_path / "pipe")


def test_a_lock_file_that_cannot_be_looked_at_is_released(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", failing_call(errno.EIO))
        raises(OSError, f"cannot look at {tmp_path}/a: Input/output error", take, tmp_path / "a")
    take(tmp_path / "a").release()


def failing_call(number):
    def call(*args, **options):
        raise OSError(number, os.strerror(number))

    return call


def test_a_file_that_cannot_be_closed_is_named(tmp_path, monkeypatch):
    """Network disks report writes that failed where a file is closed."""
    file = File(str(tmp_path / "rows"), 8)
    monkeypatch.setattr(File, "_close", staticmethod(failing_call(errno.EDQUOT)))
    raises(OSError, f"cannot close {tmp_path}/rows: Disk quota exceeded", file.close)
    file.close()  # once
    monkeypatch.setattr(DISK, "close", failing_call(errno.EIO), raising=False)
    text = b"{}"
    raises(OSError, f"cannot close {tmp_path}/new", write_partial, DISK, str(tmp_path / "new"), text, True, "advice")


def test_a_lock_file_that_its_holder_removes_locks_nothing(tmp_path, monkeypatch):
    path, opened = tmp_path / "a", []

    def opening(*arguments):
        fd = real(*arguments)
        if len(opened) < 3:
            path.unlink()  # as the holder does before it unlocks
        opened.append(fd)
        return fd

    real = os.open
    monkeypatch.setattr(os, "open", opening)
    held = take(path)
    assert len(opened) == 4 and held.is_at(str(path))
    raises(BlockingIOError, "this process", take, path)
    held.release()


@contextlib.contextmanager
def failing(monkeypatch, module, name, number):
    """Let a system call fail, after it was done, when its argument is a file named lock."""
    real, seen = getattr(module, name), []

    def call(first, *rest):
        if isinstance(first, int):
            with contextlib.suppress(OSError):
                where = os.readlink(f"/proc/self/fd/{first}")
        else:
            where = os.fspath(first)
        fails = where.endswith("lock") and (name != "flock" or rest[0] == fcntl.LOCK_UN)
        if name == "close" or not fails:
            real(first, *rest)
        if fails:
            seen.append(where)
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(module, name, call)
        yield seen


@pytest.mark.parametrize(("module", "name"), [(fcntl, "flock"), (os, "close"), (os, "unlink")])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EROFS, errno.ESTALE])
def test_locks_are_released_whatever_fails(tmp_path, monkeypatch, module, name, number):
    class Failing(type(DISK)):
        def close(self, fd):
            os.close(fd)

    before = set(locks._descriptors)  # of shards that other tests made, which hold theirs for good
    for _ in range(2):  # the first leaves nothing locked
        with failing(monkeypatch, module, name, number) as seen:
            with Folder(tmp_path, Failing()).locked():
                pass
            with _lock.exclusive("Test", tmp_path / "set"):
                pass
            make(tmp_path / "store", columns_of(None)).close()
            take(tmp_path / "lock").release()
        assert seen
        (tmp_path / "store" / "manifest.json").unlink()
        for folder in (tmp_path, tmp_path / "set", tmp_path / "store"):
            if (folder / "lock").exists():
                with (folder / "lock").open() as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert locks._descriptors.keys() == before


FORKED = """
import os, sys, time
from pathlib import Path
import numpy as np
from fbuf._formats.checkpoint.directory import Folder
from fbuf._formats.checkpoint.filesystem import DISK
from fbuf.datasets import _lock
from tests.support.disk import make
from tests.support.store import columns_of
folder = sys.argv[1]
store, temporary = make(folder + "/store", columns_of(None)), make(None, columns_of(None))
os.makedirs(folder + "/checkpoint")
saving, writing = Folder(folder + "/checkpoint", DISK).locked(), _lock.exclusive("Test", Path(folder + "/set"))
saving.__enter__(), writing.__enter__()
if os.fork() == 0:
    try:
        store.write([np.ones((1, 1, 5), np.uint8)], None)
    except FileNotFoundError as error:
        print(error, flush=True)
    del store, temporary
    os.close(1), os.close(2)
    time.sleep(30)  # as a worker of a loader that was not told of the end
    os._exit(0)
time.sleep(0.3)
print(os.path.exists(temporary._folder.path), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.more
def test_locks_end_with_their_process_although_a_forked_child_lives_on(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as parent:
        try:
            said = parent.stdout.read()
            parent.wait()
            assert "is not held by this process" in said and said.endswith("True\n"), said
            os.killpg(parent.pid, 0)  # the child lives
            make(tmp_path / "store", columns_of(None), resume=True).close()
            with Folder(tmp_path / "checkpoint", DISK).locked(), _lock.exclusive("Test", tmp_path / "set", patience=0):
                pass
        finally:
            os.killpg(parent.pid, 9)


@pytest.mark.more
def test_a_fork_waits_until_a_lock_file_is_registered(tmp_path):
    done = run_python(
        """
        import os, sys, threading, time
        from fbuf._host.io import lock
        def opened():
            entered.set()
            time.sleep(0.3)
            return os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
        entered = threading.Event()
        taking = threading.Thread(target=lambda: lock.FileLock("Test", opened, "Wait."))
        taking.start()
        entered.wait()
        if os.fork() == 0:
            print([n for n in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{n}") == sys.argv[1]])
            sys.stdout.flush()
            os._exit(0)
        os.wait()
        taking.join()
        """,
        tmp_path / "lock",
        options=("-W", "ignore"),
    )
    assert done.stdout == "[]\n"


# ---------------------------------------------------------------- who removes what


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("signed", [True, False])
def test_who_did_not_take_the_lock_removes_nothing(tmp_path, signed):
    store = make(tmp_path, columns_of(None, None))
    (tmp_path / "manifest.json").unlink()  # as long as it is being made
    if not signed:
        (tmp_path / "lock").write_text("1")  # as another container's
    before = contents(tmp_path)
    errors = []

    def fail():
        with pytest.raises(BlockingIOError) as caught, rollback(str(tmp_path)):
            make(tmp_path, columns_of(None, None))
        errors.append(caught.value)

    fail()
    Thread(fail).ends()
    with pytest.raises(ZeroDivisionError), rollback(str(tmp_path)):
        raise ZeroDivisionError  # before it makes a store
    assert contents(tmp_path) == before and len(errors) == 2
    store.write([np.ones((3, 1, 5), np.uint8)] * 2, None)
    store._folder.publish()
    store.close()
    assert make(tmp_path, columns_of(None, None), resume=True).resumed == 3


def test_a_failed_store_is_removed_under_its_lock(tmp_path):
    before = set(locks._descriptors)
    path, tried = tmp_path / "new", []

    def attempt():
        with pytest.raises(BlockingIOError) as caught:
            make(path, columns_of(None))
        tried.append(caught.value)

    with pytest.raises(ZeroDivisionError), rollback(str(path)), rollback(str(path)):
        store = make(path, columns_of(None))
        store.close()  # as the garbage collector may
        Thread(attempt).ends()
        raise ZeroDivisionError
    assert tried and not path.exists() and locks._descriptors.keys() == before
    path.mkdir()
    with pytest.raises(ZeroDivisionError), rollback(str(path)):
        store = make(path, columns_of(None))
        raise ZeroDivisionError
    assert list(path.iterdir()) == []
    after = make(path, columns_of(None))
    before = contents(path)
    raises(FileNotFoundError, "is not held by this process", store.write, [np.ones((1, 1, 5), np.uint8)], None)
    assert contents(path) == before
    after.close()
    with rollback(str(path)):
        make(path, columns_of(None), resume=True).close()
    with pytest.raises(ZeroDivisionError), rollback(str(path)):
        store = make(path, columns_of(None), resume=True)
        raise ZeroDivisionError
    assert contents(path) == before and locks._descriptors
    store.close()


def test_files_of_others_are_not_touched(tmp_path):
    (tmp_path / "lock").write_text("theirs")
    (tmp_path / "notes.txt").write_text("theirs")
    with pytest.raises(FileExistsError, match="holds other files"), rollback(str(tmp_path)):
        make(tmp_path, columns_of(None))
    assert contents(tmp_path) == {"lock": b"theirs", "notes.txt": b"theirs"}


@pytest.mark.parametrize("how", ["removed", "moved", "lock removed", "replaced"])
def test_a_removed_folder_is_noticed_at_the_next_write(tmp_path, how):
    path = tmp_path / "store"
    columns = columns_of(None, None)
    store = make(path, columns)
    rows = [np.full((3, 1, 5), 7, np.uint8)] * 2
    tickets = store.write(rows, None)
    if how == "lock removed":
        (path / "lock").unlink()
    else:
        path.rename(tmp_path / "trash")
    if how == "replaced":
        other = make(path, columns)
    calls = [
        (store.write, rows, None),
        (store.flush,),
        (store.update_rows, tickets[:, 0], np.ones(3, bool), {0: rows[0][:, 0]}),
    ]
    for call in calls:
        raises(FileNotFoundError, "was removed or replaced while its store is open.*fbuf.save", *call)
    assert (fetch(store, tickets)[0] == 7).all()  # what it holds can be read, and saved
    if how == "replaced":
        other.close()
        assert make(path, columns, resume=True).resumed == 0
    store.close()
