"""Kernels are compiled once for a user, from a folder nobody else can write, and their absence is said, not raised."""

import os
import stat
import struct
import sys
from pathlib import Path

import pytest
import xxhash

from zero_fn.kernels.compiler import (
    Compiler,
    CompilerError,
    cache_folder,
    cpu_identity,
    found_compiler,
    is_ours,
    library,
)

SOURCE = "int zero_fn_answer(void) { return 42; }\n"


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """The folder of compiled libraries of a user who has none, with one tiny source; needs a compiler."""
    try:
        found_compiler()
    except CompilerError as error:
        pytest.skip(str(error))
    source = tmp_path / "answer.c"
    source.write_text(SOURCE)
    monkeypatch.setattr("zero_fn.kernels.compiler._SOURCES", (source,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.cache_clear()
    yield tmp_path / "cache" / "zero_fn" / "kernels"
    library.cache_clear()


def answer(found):
    assert found.functions is not None, found.says
    return int(found.functions.zero_fn_answer())


def again():
    """What a new process finds."""
    library.cache_clear()
    return library()


def test_what_was_compiled_is_found_again(fresh, monkeypatch):
    assert answer(library()) == 42
    (made,) = fresh.iterdir()
    assert stat.S_IMODE(made.stat().st_mode) == stat.S_IMODE(fresh.stat().st_mode) == 0o700
    monkeypatch.setattr(Compiler, "compile", lambda *_: pytest.fail("compiled twice"))
    assert answer(again()) == 42


def test_another_source_compiler_or_processor_has_another_name(fresh, monkeypatch):
    compiler, source = found_compiler(), fresh.parents[2] / "answer.c"
    keys = {compiler.key([source]), Compiler(compiler.command, "another 1.0").key([source])}
    source.write_text(SOURCE.replace("42", "43"))
    keys.add(compiler.key([source]))
    monkeypatch.setattr("zero_fn.kernels.compiler.cpu_identity", lambda: "another")
    keys.add(compiler.key([source]))
    assert len(keys) == 4


def test_a_processor_is_told_by_its_name_and_instructions(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    texts = [
        "processor\t: 0\nmodel name\t: A\nflags\t: fma\ncpu MHz\t: 1\n\nprocessor\t: 1\nmodel name\t: A\n",
        "processor\t: 0\nmodel name\t: A\nflags\t: fma\ncpu MHz\t: 2\n\n",
        "processor\t: 0\nmodel name\t: A\nflags\t: fma avx2\ncpu MHz\t: 1\n\n",
    ]
    found = []
    for text in texts:
        cpuinfo.write_text(text)
        found.append(cpu_identity(cpuinfo))
    assert found[0] == found[1] != found[2]
    assert cpu_identity(tmp_path / "missing")


def plant(fresh):
    """A library that answers 7, where ours will be looked for, whole. (A process that has loaded a path keeps what it had:
    plant before it is loaded.)"""
    fresh.mkdir(parents=True, mode=0o700, exist_ok=True)
    source = fresh.parents[2] / "other.c"
    source.write_text(SOURCE.replace("42", "7"))
    made = source.with_suffix(".so")
    found_compiler().compile([source], made)
    key = found_compiler().key([fresh.parents[2] / "answer.c"])
    planted = made.replace(fresh / f"{key}-{xxhash.xxh3_128_hexdigest(made.read_bytes())}.so")
    planted.chmod(0o700)
    return planted


def put(path, content):
    """Another file under a name: to write into the one that this process has loaded would take it away."""
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o700)


def sections(library):
    """Where each section of an ELF file of 64 bits lies: name -> first byte, number of bytes."""
    table_at, size, count, names = struct.unpack_from("<Q10xHHH", library, 0x28)
    rows = [struct.unpack_from("<IIQQQQ", library, table_at + size * number) for number in range(count)]
    strings = library[rows[names][4] :]
    found = {strings[row[0] :].partition(b"\0")[0].decode(): row[4:] for row in rows if row[1] not in (0, 8)}
    return {**found, "table of sections": (table_at, size * count), "header": (0, 64)}


@pytest.mark.skipif(sys.platform != "linux", reason="the sections of ELF files")
def test_a_damaged_library_is_compiled_again(fresh, monkeypatch):
    """Cut in every section, with a bit flipped in every section, empty, or another library under our name. The system maps
    one that was cut without complaint, and SIGBUS kills the process that calls it."""
    planted = plant(fresh)
    foreign = planted.read_bytes()
    planted.unlink()
    library()
    (path,) = fresh.iterdir()
    whole = path.read_bytes()
    compiled = []

    def compile_again(_compiler, _sources, target):
        compiled.append(target)
        target.write_bytes(whole)

    monkeypatch.setattr(Compiler, "compile", compile_again)
    damaged = {"another": foreign, "empty": b"", "without its last byte": whole[:-1], "longer": whole + b"\0"}
    for name, (start, nbytes) in sections(whole).items():
        for at in {start, start + nbytes // 2, start + nbytes - 1} if nbytes else ():
            damaged[f"cut at {at}, in {name}"] = whole[:at]
            damaged[f"flipped at {at}, in {name}"] = whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :]
    assert len(damaged) > 100 and any(".text" in name for name in damaged)
    for number, (name, content) in enumerate(damaged.items()):
        put(path, content)
        assert answer(again()) == 42
        assert len(compiled) == number + 1, f"the library that is {name} was taken for ours"
        assert path.read_bytes() == whole


def test_what_is_kept_has_left_the_memory_of_the_system_first(fresh, monkeypatch):
    done = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr("os.fsync", lambda fd: (done.append("synced"), fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda path, target: (done.append("named"), replace(path, target))[1])
    assert answer(library()) == 42
    assert done == ["synced", "named"]


@pytest.mark.parametrize(
    "what", ["is read-only", "others may write it", "is a link", "is a file", "belongs to another"]
)
def test_a_folder_that_is_not_ours_alone_is_not_used(fresh, monkeypatch, what):
    """What lies there already is not loaded, and nothing is written there: this process compiles for itself."""
    planted = plant(fresh)
    assert is_ours(planted) and cache_folder() == fresh  # so it would be loaded
    if what == "is read-only":
        planted.unlink()
        access = os.access  # root may write anywhere
        monkeypatch.setattr("os.access", lambda path, mode: path != fresh and access(path, mode))
    elif what == "others may write it":
        fresh.chmod(0o777)
    elif what == "is a link":
        fresh.rename(fresh.with_name("elsewhere"))
        fresh.symlink_to(fresh.with_name("elsewhere"))
    elif what == "is a file":
        fresh.rename(fresh.with_name("elsewhere"))
        fresh.touch()
    else:
        monkeypatch.setattr("os.getuid", lambda: 12345)
    before = sorted(fresh.parent.rglob("*"))
    assert cache_folder() is None
    assert answer(again()) == 42
    assert sorted(fresh.parent.rglob("*")) == before


def test_a_library_that_others_may_write_is_replaced(fresh):
    planted = plant(fresh)
    planted.chmod(0o722)
    assert answer(library()) == 42
    (made,) = fresh.iterdir()
    assert is_ours(made)


def test_a_library_that_is_there_is_loaded(fresh):
    """Which shows that the tests of planted ones can fail."""
    plant(fresh)
    assert answer(library()) == 7


def test_processes_that_start_at_once_all_have_the_kernels(fresh):
    started = []
    for _ in range(4):
        child = os.fork()
        if not child:
            library.cache_clear()
            os._exit(0 if library().functions is not None else 1)
        started.append(child)
    assert [os.waitpid(child, 0)[1] for child in started] == [0] * 4
    assert len(list(fresh.iterdir())) == 1
    assert answer(again()) == 42


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("", "CC is set to nothing"),
        ("no_such_compiler", "CC names 'no_such_compiler', which is not there"),
        ("false", "false failed with 1: it said nothing"),
    ],
)
def test_the_absence_of_a_compiler_is_said(fresh, monkeypatch, compiler, said):
    monkeypatch.setenv("CC", compiler)
    assert str(again()) == f"no kernels: {said}"
    assert again().functions is None


def test_a_machine_without_a_compiler_takes_that_of_a_package(fresh, tmp_path, monkeypatch):
    """The package `ziglang` is too large for every run of the tests: another of its name calls this machine's compiler."""
    real = found_compiler()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert str(again()) == "no kernels: no C compiler was found (`pip install ziglang` brings one)"
    package = tmp_path / "packages" / "ziglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import os, sys\n"
        "assert sys.argv[1] == 'cc'\n"
        "del os.environ['PYTHONPATH']  # where this machine's compiler may look for a package of this name\n"
        f"os.execvp({real.command[0]!r}, [*{real.command!r}, *sys.argv[2:]])\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    assert answer(again()) == 42
    assert found_compiler().command == (sys.executable, "-m", "ziglang", "cc")


def test_a_source_that_does_not_compile_is_said(fresh):
    (fresh.parents[2] / "answer.c").write_text("int zero_fn_answer(void) { return x; }\n")
    assert "failed with 1" in again().says and "undeclared" in again().says
    assert list(fresh.iterdir()) == []


def test_this_machine_says_which_kernels_it_has():
    """So that a run whose other tests of kernels were skipped shows it."""
    library.cache_clear()
    assert str(library()).startswith(("compiled kernels (", "no kernels: "))
