"""Promises of tests/, on an accelerator: what they run on ranks, this process runs, or two of them do.

`python -m tests.accelerator.promises DEVICE FOLDER SIZE RANK TESTS ...` prints what became of each, as `device.outcome`
does. All that a program makes is made on the device, which is torch's default one, and so is its oracle.
"""

import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from tests.accelerator import device
from tests.conftest import TIERS_OPEN
from tests.support import worlds
from tests.support.worlds import as_replicas

__all__ = ["TESTS", "main"]

_TRANSPORT, _PACKED = "tests/units/transport/test_collectives.py", ("packed", "single", "mixed")
TESTS = {
    "daily": ["tests/promises/test_functional.py", "tests/promises/test_models.py"],
    "training": [
        "tests/promises",
        "tests/promises/test_stages_agree.py::test_stages_train_to_the_same_bits",
    ],
    "collectives": [
        *(f"{_TRANSPORT}::test_all_gather_brings_every_piece_to_every_rank[2-native-{how}]" for how in _PACKED),
        *(
            f"{_TRANSPORT}::test_reduce_scatter_is_the_mean_in_the_order_of_ranks[2-native, apart-{how}]"
            for how in _PACKED
        ),
        f"{_TRANSPORT}::test_all_to_all_brings_every_tensor_to_its_place[2-native]",
        f"{_TRANSPORT}::test_any_and_exchange_are_their_patterns[2-native]",
    ],
}
LEFT_OUT = (
    "channels_last",  # "pretend" has no convolutions
    "Router",  # its weights are made on the host
    "a_call_on_whole_tensors",  # which are on the host
    "KeyboardInterrupt",  # comes in the main thread alone, and recomputations run in that of the device
    "step_after_an_exception",  # the thread of the device lets go of names later: see `programs.a_backward_that_raises`
)


class OfTheHost(TorchFunctionMode):
    """What a generator of the host draws is drawn there."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("generator") is None or function not in (torch.randn, torch.rand, torch.randint, torch.randperm):
            return function(*args, **kwargs)
        return function(*args, **{**kwargs, "device": "cpu"}).to(device.NAME)


class Here:
    """In place of the fixture `ranks`: those that there are run a program, whatever number it asks for."""

    def __init__(self, size):
        self.size, self.executed = size, 0

    def __call__(self, n, *, deadline_s=60.0):
        self.n = n
        return self

    def run(self, program, *args, **kwargs):
        self.executed += 1
        if self.size > 1 and self.n != self.size:
            pytest.skip("these ranks are two")
        torch.set_default_device(device.NAME)
        try:
            torch.manual_seed(0)
            with OfTheHost():
                found = program(*args, **kwargs)
        finally:
            torch.set_default_device(None)
        of_ranks = [None] * self.size
        dist.all_gather_object(of_ranks, tree_map_only(torch.Tensor, torch.Tensor.cpu, found))
        return of_ranks if self.n == self.size else of_ranks * self.n

    def close(self):
        pass


class OnDevice:
    """A plugin of pytest."""

    def __init__(self, size):
        self.ranks = Here(size)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session):
        session.config.stash[TIERS_OPEN]["ranks"] = self.ranks

    def pytest_collection_modifyitems(self, config, items):
        """Of files those whose oracle are replicas on the same device; others are named."""
        named = tuple(argument for argument in config.args if "::" in argument)
        made = [item for item in items if item.function.__qualname__.startswith(as_replicas.__name__)]
        items[:] = [item for item in items if item in made or item.nodeid.startswith(named)]

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.failed:
            wrong = " ".join(line for line in report.longreprtext.splitlines() if line.startswith("E "))
            said = f"wrong: {wrong[:300]}" if report.failed else "right"
            print(f"{report.nodeid}: {said}, {report.duration:.1f} s", file=sys.stderr, flush=True)


def near(one, other, _tolerance):
    """Where a note differs from that of replicas by more than the rounding of a real device."""
    is_there = [noted is not None for _, noted in (one, other)]
    is_same = one[0] == other[0] and (device.same(other[1], one[1]) if all(is_there) else not any(is_there))
    return None if is_same else f"{other[0]} is {other[1]}, not {one[0]}, {one[1]}"


def main(where, folder, size, rank, *names):
    torch.set_num_threads(1)
    device.choose(where)
    device.begin_group(f"{folder}/store of promises", rank, size)
    if device.NAME == "pretend":
        dist.all_gather_object = partial(dist.all_gather_object, group=dist.new_group(backend="gloo"))
    else:
        worlds._difference = near
    tests = [test for name in names for test in TESTS.get(name, [name])]  # in files, those made by `as_replicas`
    options = ["-n0", "-q", "-p", "no:cacheprovider", "-k", f"not ({' or '.join(LEFT_OUT)})"]
    sys.exit(pytest.main([*options, *tests], plugins=[OnDevice(size)]))


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:5]), *sys.argv[5:])
