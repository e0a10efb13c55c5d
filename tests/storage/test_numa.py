"""On which nodes the memory of a slab lies, asked of the kernel. A node that a machine lacks is passed over by it, so one
with a single node will do."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from zero_fn.storage import numa
from zero_fn.storage.slab import Slab
from zero_fn.tiers import cpu

_BY_ADDRESS = 2  # MPOL_F_ADDR
_DEFAULT, _BIND, _INTERLEAVE = 0, 2, 3
_SLAB_NBYTES = 4 << 20


def policy_of(slab: Slab, at: int = 0) -> int:
    """The policy of the memory there, as the kernel has it."""
    found = ctypes.c_int(-1)
    numa._syscall(numa._GET_MEMPOLICY, ctypes.byref(found), None, 0, ctypes.c_void_p(slab.address + at), _BY_ADDRESS)
    return found.value


def _has_policies() -> bool:
    if sys.platform != "linux" or numa._MBIND is None:
        return False
    try:
        return policy_of(Slab(_SLAB_NBYTES, cpu(), "states")) in (_DEFAULT, _INTERLEAVE)
    except OSError:
        return False


with_policies = pytest.mark.skipif(not _has_policies(), reason="the kernel has no memory policies, or refuses them")


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a machine with some processors on each node, of which the process may use some."""
    real = numa.nodes_of_process

    def make(*processors: str, allowed: set[int]) -> None:
        (tmp_path / "has_memory").write_text(f"0-{len(processors) - 1}\n")
        for node, listed in enumerate(processors):
            (tmp_path / f"node{node}").mkdir()
            (tmp_path / f"node{node}" / "cpulist").write_text(f"{listed}\n")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
        monkeypatch.setattr(numa, "nodes_of_process", lambda: real(tmp_path))

    return make


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [(set(range(12)), [0, 1]), ({1, 9}, [0]), ({4}, [1]), ({3, 4}, [0, 1]), ({40}, [])],
    ids=["unbound", "bound to the first", "one processor", "across both", "elsewhere"],
)
def test_nodes_are_those_with_memory_on_whose_processors_the_process_may_run(
    nodes: Callable[..., None], allowed: set[int], expected: list[int]
) -> None:
    nodes("0-3,8-9", "4-7,10,11", "", allowed=allowed)  # the last is memory without processors
    assert numa.nodes_of_process() == expected


def test_a_system_that_does_not_speak_of_nodes_has_none(tmp_path: Path) -> None:
    assert numa.nodes_of_process(tmp_path / "nothing") == []


@with_policies
@pytest.mark.parametrize(
    ("allowed", "expected"), [({0, 1}, _INTERLEAVE), ({0}, _DEFAULT)], ids=["two nodes", "one node"]
)
def test_a_slab_is_spread_over_the_nodes_of_an_unbound_process(
    nodes: Callable[..., None], allowed: set[int], expected: int
) -> None:
    nodes("0", "1", allowed=allowed)
    slab = Slab(_SLAB_NBYTES, cpu(), "states")
    assert policy_of(slab) == policy_of(slab, slab.nbytes - 1) == expected
    slab.memory.fill_(1)  # and can be used
    assert slab.memory.sum() == _SLAB_NBYTES


@with_policies
def test_a_policy_that_somebody_chose_stands(nodes: Callable[..., None]) -> None:
    nodes("0", "1", allowed={0, 1})
    found: list[int] = []

    def work() -> None:
        with _bound_to_first_node():
            found.append(policy_of(Slab(_SLAB_NBYTES, cpu(), "states")))

    thread = threading.Thread(target=work)  # a policy is that of a thread
    thread.start()
    thread.join()
    assert found == [_DEFAULT]  # none of its own: that of the thread holds


@with_policies
def test_a_kernel_that_refuses_leaves_the_memory_to_the_first_touch(
    nodes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes("0", "1", allowed={0, 1})
    monkeypatch.setattr(numa, "_MBIND", -1)  # no such call
    slab = Slab(_SLAB_NBYTES, cpu(), "states")
    monkeypatch.undo()
    assert policy_of(slab) == _DEFAULT


@contextmanager
def _bound_to_first_node() -> Iterator[None]:
    assert numa._GET_MEMPOLICY is not None
    set_mempolicy = numa._GET_MEMPOLICY + (-1 if numa._GET_MEMPOLICY == 239 else 1)  # 238 of x86-64, 237 of aarch64
    numa._syscall(set_mempolicy, _BIND, (ctypes.c_ulong * 1)(1), ctypes.sizeof(ctypes.c_ulong) * 8 + 1)
    yield
    numa._syscall(set_mempolicy, _DEFAULT, None, 0)
