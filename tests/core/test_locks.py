"""The lock of a directory: one holder, who is named; released by a kill; also without fcntl."""

import json
import os
import socket
import subprocess
import sys

import pytest
from tests.helpers.directories import put_odd

from geodl.core.errors import StoreError
from geodl.core.locks import is_locked, locked

HOLDER = """
import sys
sys.modules["fcntl"] = {without}
from pathlib import Path
import geodl.store
from geodl.core.locks import is_locked, locked
path = Path(sys.argv[1])
assert not is_locked(path)
with locked(path):
    assert is_locked(path)
    print("locked", flush=True)
    sys.stdin.readline()
print("free", is_locked(path), flush=True)
"""


@pytest.mark.parametrize("without", ["None", "__import__('fcntl')"])
@pytest.mark.parametrize("end", ["kill", "leave"])
def test_the_error_of_a_second_writer_names_the_holder(tmp_path, without, end):
    code = [sys.executable, "-W", "ignore", "-c", HOLDER.format(without=without), str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(code, **pipes) as first:
        assert first.stdout.readline() == "locked\n"
        second = subprocess.run(
            [*code[:4], code[4].replace("assert not is_locked(path)\n", ""), *code[5:]],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert f"is being written by process {first.pid} on {socket.gethostname()}" in second.stderr
        if end == "kill":
            first.kill()
        else:
            assert first.communicate("\n")[0] == "free False\n"
    again = subprocess.run(
        code, input="\n", capture_output=True, text=True, check=True, timeout=120
    )
    assert again.stdout == "locked\nfree False\n"


def test_the_package_is_imported_without_fcntl():
    code = (
        "import sys; sys.modules['fcntl'] = None\n"
        "import geodl.app.classifier, geodl.bench.experiment, geodl.cli, geodl.core.cache\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_one_holder_of_a_lock_at_a_time(tmp_path):
    assert not is_locked(tmp_path)
    assert not (tmp_path / "lock").exists()
    with locked(tmp_path):
        assert is_locked(tmp_path)
        expected = f"is being written by process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(StoreError, match=expected), locked(tmp_path):
            pass
        assert is_locked(tmp_path), "the failed attempt must not free it"
    assert not is_locked(tmp_path)
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    assert not is_locked(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"pid": "x", "host": 5}', '{"pid": 1}', "[" * 99_999]
)
def test_a_damaged_name_of_the_holder_does_not_matter(tmp_path, content):
    expected = pytest.raises(StoreError, match="is being written by another process: wait")
    with locked(tmp_path):
        (tmp_path / "writer.json").write_text(content)
        with expected, locked(tmp_path):
            pass


def test_a_stale_name_beside_the_lock_blocks_nobody(tmp_path):
    (tmp_path / "lock").write_text("")
    (tmp_path / "writer.json").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        assert json.loads((tmp_path / "writer.json").read_bytes())["pid"] == os.getpid()
    assert not (tmp_path / "writer.json").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "folder", "mine", "/dev/zero"])
@pytest.mark.parametrize("name", ["lock", "writer.json"])
def test_a_lock_is_a_regular_file_of_its_own(tmp_path, kind, name):
    (tmp_path / "mine").write_text("mine")
    put_odd(tmp_path / name, kind)
    with pytest.raises(StoreError, match=name), locked(tmp_path):
        pass
    assert (tmp_path / "mine").read_text() == "mine"
    assert not is_locked(tmp_path)
