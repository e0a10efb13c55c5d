"""`weights`: what another engine is given is what the model has, to the bit; and a loop that ends early hangs nobody."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import zero_fn as zf
from tests.axes.grids import Decoder, composed
from tests.axes.grids import loss_of as loss_on_axes
from tests.support.messages import refusals, refused
from tests.support.models import Language, Odd
from tests.support.on_ranks import on_ranks
from tests.support.profiles import by_night
from tests.support.programs import STAGES, loss_of
from tests.support.ranks import axis
from tests.support.seeds import seed_generator
from tests.support.storages import Storages
from tests.units.storage.disks import failing
from zero_fn.weights import _differing


class Counting(Odd):
    """Beside all awkward parameters a buffer that is saved, and one that is not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.arange(5.0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def _away(tier):
    return lambda folder: zf.offload(zf.shard_params(Counting(), axis()), params=tier(folder))


WORLDS = {
    "plain": lambda _: Counting(),
    **{stage: lambda _, stage=stage: STAGES[stage](Counting(), axis()) for stage in ("replicate", "zero2", "zero3")},
    "mixed": lambda _: zf.precision(zf.shard_params(zf.shard_optimizer(Counting(), axis()), axis(), where="*.up.*")),
    "disk": _away(zf.nvme),
    "host": _away(lambda _: zf.cpu()),
    "tiles": lambda _: zf.shard_params(zf.tile(Counting(), where="blocks.*.down.*", parts=3), axis()),
}


def _built(world, folder):
    seed_generator(0)
    return WORLDS[world](folder)


def _expected(model, dtype=None):
    """Parameters and persistent buffers of a plain model, each once."""
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        found.setdefault(id(value), (name, value.detach()))
    return {n: value.to(dtype) if dtype and value.is_floating_point() else value for n, value in found.values()}


def _bits(tensor):
    return list(tensor.contiguous().flatten().view(torch.uint8).tolist())


def _differ(one, other):
    assert sorted(one) == sorted(other)
    return [
        name
        for name, value in one.items()
        if (value.dtype, value.shape) != (other[name].dtype, other[name].shape) or _bits(value) != _bits(other[name])
    ]


def _all(items):
    """What all ranks were given."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, list(items))
    return [item for each in found for item in each]


def _trained(model):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    loss_of(model, 0).backward()
    optimizer.step()


@pytest.mark.parametrize("world", WORLDS)
@on_ranks(3)
def test_weights_are_those_of_the_model_whole_and_in_parts(world, folder):
    model = _built(world, folder)
    for dtype, bucket in ((None, "64MiB"), (torch.bfloat16, 1), (None, 2000)):
        plain = _expected(_built("plain", folder), dtype)
        items = list(zf.weights(model, dtype=dtype, bucket=bucket))
        assert len(items) == len(plain), "each once"
        assert _differ(dict(items), plain) == []
        receiver = {name: torch.zeros_like(value) for name, value in plain.items()}
        memory = list(receiver.values())
        assert zf.apply_weights(receiver, _all(zf.weights(model, dtype=dtype, whole=False))) == receiver.keys()
        assert _differ(dict(zip(receiver, memory, strict=True)), plain) == [], "in place"
    loss_of(model, 0).backward()


@on_ranks(2)
def test_names_are_those_of_save_pretrained_or_those_that_are_asked_for(folder):
    seed_generator(0)
    model = zf.shard_params(Language(), axis())
    zf.save_pretrained(model, folder, dtype=torch.bfloat16)
    items = dict(zf.weights(model, dtype=torch.bfloat16))
    assert _differ(items, load_file(f"{folder}/model.safetensors")) == []
    for names in ({r"^blocks\.": "model.layers."}, lambda name: name.replace("blocks.", "model.layers.")):
        assert [name.replace("model.layers.", "blocks.") for name, _ in zf.weights(model, names=names)] == [*items]


@pytest.mark.parametrize("composition", ["hybrid", "hpz", "tp"])
@pytest.mark.parametrize("is_away", [False, True])
@on_ranks(4)
def test_weights_over_two_axes(composition, is_away, folder):
    """Also: one rank that ends early, whole tensors of tensor parallelism, a disk that fails on one rank, and changes."""
    model, row = composed(composition)
    model = zf.offload(model, params=zf.nvme(folder)) if is_away else model
    seed_generator(0)
    plain = _expected(Decoder())
    items = zf.weights(model, bucket=500, keep=True)
    received = dict(items)
    assert _differ(received, plain) == []
    for name, _ in zf.weights(model, bucket=500):
        if dist.get_rank() == 2 and name == "mix.weight":
            break
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = zf.streamed(optimizer, zf.cpu()) if is_away else optimizer
    loss_on_axes(model, 0, row).backward()
    optimizer.step()
    zf.apply_weights(received, _all(zf.weights(model, since=items.version)))
    assert _differ(received, dict(zf.weights(model))) == []
    if is_away:
        with failing(where=dist.get_rank() == 3), pytest.raises(zf.errors.StorageError):
            list(zf.weights(model))


@pytest.mark.parametrize("world", ["replicate", "zero3", "disk"])
@pytest.mark.parametrize("ends", [{1: 3}, {0: 2, 1: 5, 2: 2}, {0: 0, 1: 0, 2: 0}, {0: 1, 2: 0}])
@on_ranks(3)
def test_a_loop_that_ends_early_hangs_nobody(world, ends, folder):
    """By `break`, by an exception, and by an iterator that nobody asks for anything."""
    model, last = _built(world, folder), ends.get(dist.get_rank(), 1000)
    for number, _ in enumerate(zf.weights(model, bucket=1)):
        if number == last:
            break
    loss_of(model, 0).backward()  # at once, on all ranks
    with zf.traffic() as sent, contextlib.suppress(ZeroDivisionError), zf.weights(model, bucket=1) as items:
        for number, _ in enumerate(items):
            if number == last:
                raise ZeroDivisionError
    loss_of(model, 1).backward()
    zf.weights(model)  # dropped at once
    loss_of(model, 2).backward()
    with zf.traffic() as whole:
        list(zf.weights(model, bucket=1))
    if max(ends.values()) == 0 and len(ends) == 3 and world == "zero3":
        assert sent.nbytes < whole.nbytes / 4, "what nobody wants is not gathered"


@on_ranks(2)
def test_until_it_has_ended_forwards_and_other_passes_are_refused():
    model = _built("zero3", "")
    items = zf.weights(model, keep=True)
    next(items)
    for act in (lambda: loss_of(model, 0), lambda: model.blocks[0](torch.zeros(2, 16)), lambda: zf.weights(model)):
        with refused("forward_while_weights_are_handed_over"):
            act()
    items.close()
    items.close()
    loss_of(model, 0).backward()
    with pytest.raises(zf.errors.StateError):
        items.version  # noqa: B018
    told = pytest.raises(zf.errors.DisagreementError) if dist.get_rank() else refused("checkpoint_of_ranks_that_differ")
    with told:
        zf.weights(model, bucket=1000 + dist.get_rank())


def _version_of(model):
    items = zf.weights(model, keep=True)
    list(items)
    return items.version


test_refusals = refusals(
    {
        "weights_without_a_version": lambda model: zf.weights(model).version,
        "weights_of_unknown_names": lambda model: zf.weights(model, names="vllm"),
        "weights_of_one_name": lambda model: zf.weights(model, names={r".*": "weight"}),
        "weights_without_a_place": lambda model: zf.apply_weights(nn.Linear(4, 3), zf.weights(model)),
        "weights_of_another_shape": lambda: zf.apply_weights(nn.Linear(4, 4), zf.weights(nn.Linear(4, 3))),
        "changes_since_other_weights": lambda model: zf.weights(model, since=_version_of(nn.Linear(4, 3))),
        "changes_whose_dtype_is_given": lambda model: zf.weights(model, since=_version_of(model), dtype=torch.bfloat16),
    }
)


def _zeros(model):
    return {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in model.state_dict().items()}


def _whole(model, *_):
    with zf.unsharded(model, writeback=True):
        for parameter in model.parameters():
            parameter.add_(1)


def _merge(model, *_):
    for parameter in model.parameters():
        parameter.data += 1


EDITS = {
    "step": lambda model, optimizer, folder: optimizer.step(),
    "load_state_dict": lambda model, optimizer, folder: model.load_state_dict(_zeros(model)),
    "load": lambda model, optimizer, folder: zf.load(folder, model),
    "in place": lambda model, *_: [parameter.add_(1) for parameter in model.parameters()],
    "through .data": lambda model, *_: [parameter.data.mul_(2) for parameter in model.parameters()],
    "all at once": lambda model, *_: torch._foreach_mul_([p for p in model.parameters() if p.is_floating_point()], 2.0),
    "whole": _whole,
    "merged": _merge,
}


@pytest.mark.parametrize("world", ["replicate", "disk", pytest.param("zero3", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("edit", EDITS)
@on_ranks(2)
def test_weights_that_change_in_the_loop_are_refused_on_all_ranks(world, edit, folder):
    """Before the loop or in it; of whole tensors, parts and changes; also where one rank alone changes them."""
    if world == "disk" and edit in ("merged", "all at once"):
        return  # refused; written one after the other
    model = _built(world, folder)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    optimizer = zf.streamed(optimizer, zf.cpu()) if world == "disk" else optimizer
    zf.save(f"{folder}/runs/step-1", model)
    version = _version_of(model)
    for options in ({"whole": False}, {"bucket": 1}, {"since": version}):
        for begun in (0, 1):
            loss_of(model, 0).backward()
            with zf.weights(model, **options) as items:
                for _ in range(
                    0 if "since" in options and "load" in edit else begun
                ):  # of what was loaded nothing differs
                    next(items)
                with torch.no_grad():
                    EDITS[edit](model, optimizer, f"{folder}/runs")
                with refused("weights_that_change_in_the_loop"):
                    list(items)
            with pytest.raises(StopIteration):
                next(items)
        assert len(list(zf.weights(model, **options))) > 0 or "since" in options, "another pass"
    if edit in ("in place", "through .data") and world != "disk":  # there all ranks scale a gradient together
        found = []
        with pytest.raises(zf.errors.StateError), zf.weights(model, bucket=1) as items:
            for name, _ in items:
                found.append(name)
                if len(found) == 2 and dist.get_rank() == 1:
                    with torch.no_grad():
                        EDITS[edit](model, optimizer, folder)
        assert len(found) == 2, "the next one raises"
    loss_of(model, 1).backward()


@on_ranks(2)
def test_a_pass_of_one_model_does_not_see_steps_of_another():
    model, other = _built("zero3", ""), _built("zero3", "")
    optimizer = torch.optim.AdamW([parameter for parameter in other.parameters() if parameter.requires_grad])
    for _ in zf.weights(model, bucket=1):
        loss_of(other, 0).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_a_pass_takes_the_memory_of_a_bucket(dtype):
    model = zf.shard_params(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16))), axis())
    model(torch.ones(1, 64))
    bucket = 4 * 64 * 64 * dtype.itemsize
    with Storages() as storages:
        for _, tensor in zf.weights(model, dtype=dtype, bucket=bucket):
            assert tensor.dtype == dtype
    assert bucket <= storages.peak <= bucket + tensor.nbytes + 4096, "and the tensor that the loop holds"
    items = zf.weights(model, dtype=dtype, keep=True)
    list(items)
    assert items.version.nbytes == 16 * 64 * 64 * dtype.itemsize // 2


def _edit(model, seed, share):
    """Gives elements of a whole model other bits: also zeros of the other sign, and other NaN."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            at = torch.randperm(tensor.numel(), generator=generator)[: int(share * tensor.numel() + 0.999)]
            values = torch.randn(at.numel(), generator=generator).to(tensor.dtype)
            if tensor.is_floating_point():
                values[::5], values[1::5] = -0.0, 0.0
                nan = torch.full_like(values[2::5], float("nan"))
                values[2::5] = (nan.view(_INT[tensor.dtype]) + 1).view(tensor.dtype)
            tensor.put_(at, values)


_INT = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}


def _followed(world, folder, dtype, bucket, edits):
    """A receiver that is given changes alone has what one has that is given everything."""
    model = _built(world, folder)
    items = zf.weights(model, dtype=dtype, bucket=bucket, keep=True)
    received, version = dict(items), items.version
    for seed, share in edits:
        with zf.unsharded(model, writeback=True) if world != "plain" else torch.no_grad():
            _edit(model, seed, share)
        now = dict(zf.weights(model, dtype=dtype))
        differing = sum((_words(now[name]) != _words(value)).any(1).sum().item() for name, value in received.items())
        changes = _all(zf.weights(model, since=version, bucket=bucket))
        assert sum(indices.numel() for _, indices, _ in changes) == differing, "each element once, and no other"
        assert all(indices.dtype == torch.int32 for _, indices, _ in changes), "6 bytes a change in bfloat16"
        zf.apply_weights(received, changes)
        assert _differ(received, now) == []
    assert list(zf.weights(model, since=version)) == [], "nothing has changed since"


def _words(tensor):
    return tensor.contiguous().view(-1, 1).view(torch.uint8)


@pytest.mark.parametrize("world", by_night(WORLDS, ("plain", "mixed", "disk")))
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.sampled_from([3, 2, 4, 1]),
    dtype=st.sampled_from([None, torch.bfloat16, torch.float32]),
    bucket=st.sampled_from([1, 700, 1 << 26]),
    edits=st.lists(st.tuples(st.integers(0, 99), st.sampled_from([0.01, 0.3, 0.0, 1.0])), min_size=1, max_size=2),
)
def test_changes_make_a_receiver_what_the_model_is(ranks, tmp_path, world, n, dtype, bucket, edits):
    ranks(n).run(_followed, world, str(tmp_path), dtype, bucket, edits)


@given(st.integers(0, 70), st.integers(0, 9), st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]))
def test_differing_elements_are_found_at_any_length_and_offset(numel, offset, dtype):
    now = torch.arange(numel + offset).to(dtype)[offset:]
    before, chosen = now.clone(), torch.arange(numel)[torch.randperm(numel)[: numel // 3]]
    before[chosen] += 1
    assert torch.equal(_differing(now, before), chosen.sort().values)


@on_ranks(2)
def test_what_was_not_yielded_is_yielded_by_the_next_pass():
    model = _built("zero3", "")
    items = zf.weights(model, keep=True, dtype=torch.bfloat16)
    received, version = dict(items), items.version
    _trained(model)
    taken = []
    for item in zf.weights(model, since=version):
        taken.append(item)
        if len(taken) == 3:
            break  # the third may not have arrived
    zf.apply_weights(received, _all(taken[:2]))
    more = []
    for item in zf.weights(model, since=version):
        if dist.get_rank() == 0:
            break  # one rank alone: what it has not had is there for the next pass
        more.append(item)
    zf.apply_weights(received, more := _all(more))
    with pytest.raises(zf.errors.DisagreementError):
        zf.weights(model, since=version if dist.get_rank() else None)
    rest = _all(zf.weights(model, since=version))
    assert sum(name == taken[2][0] for name, *_ in (*more, *rest)) and rest
    zf.apply_weights(received, rest)
    assert _differ(received, dict(zf.weights(model, dtype=torch.bfloat16))) == []
