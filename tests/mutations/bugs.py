"""Plausible bugs whose text is an arithmetic or an order, which survives moves: one replacement in one function.

What else may be wrong is drawn (`tests.mutations.sample`). A bug is anchored to a function, wherever that stands, and to a
short text in it, which `tests/test_mutations.py` checks to be there once. `likely` names tests that should see the bug, so
that they run first; the whole test command follows if they do not.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["BUGS", "Bug", "planted"]


@dataclass(frozen=True, slots=True)
class Bug:
    """One bug: the text `old` of a function becomes `new`."""

    name: str
    where: str  # "Class.method"; with its file where others are called so ("planning/links.py:_least"); or a file of C
    breaks: str
    old: str
    new: str
    likely: str = "tests/promises/test_stages_agree.py"


def planted(bug: Bug, package: Path) -> tuple[Path, str]:
    """The file of a package that a bug is in, and its text with the bug.

    Raises:
        ValueError: There is no such function, or more than one; or its text is not there, or not once.
    """
    found = _sources(bug.where, package)
    if len(found) != 1:
        raise ValueError(f"{bug.name}: {len(found)} functions are called {bug.where}")
    path, first, last = found[0]
    lines = path.read_text().splitlines(keepends=True)
    body = "".join(lines[first:last])
    if body.count(bug.old) != 1:
        raise ValueError(f"{bug.name}: its text stands {body.count(bug.old)} times in {bug.where}: {bug.old!r}")
    return path, "".join([*lines[:first], body.replace(bug.old, bug.new), *lines[last:]])


def _sources(where: str, package: Path) -> list[tuple[Path, int, int]]:
    """Files with a function of this name, its first line and the one after its last, counted from 0."""
    file, _, name = where.rpartition(":")
    if where.endswith(".c"):
        return [(package / where, 0, len((package / where).read_text().splitlines()))]
    return [found for found in _functions(package).get(name, []) if not file or found[0] == package / file]


@cache
def _functions(package: Path) -> dict[str, list[tuple[Path, int, int]]]:
    """All functions of a package, by name."""
    functions: dict[str, list[tuple[Path, int, int]]] = {}
    for path in sorted(package.rglob("*.py")):
        todo: list[tuple[str, ast.AST]] = [("", ast.parse(path.read_text()))]
        while todo:
            prefix, node = todo.pop()
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.FunctionDef | ast.ClassDef):
                    todo.append((f"{prefix}{child.name}.", child))
                if isinstance(child, ast.FunctionDef):
                    first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                    place = (path, first - 1, child.end_lineno or child.lineno)
                    functions.setdefault(f"{prefix}{child.name}", []).append(place)
    return functions


BUGS: tuple[Bug, ...] = (
    # -- bytes ---------------------------------------------------------------------------------------------------------
    Bug(
        "wrong-divisor",
        "_mean_by_torch",
        "the mean over ranks",
        "into.div_(len(parts))",
        "into.div_(len(parts) - 1)",
        "tests/units/transport/test_collectives.py",
    ),
    Bug(
        "wrong-divisor-in-c",
        "kernels/nontemporal.c",
        "the mean over ranks, of large tensors",
        "return sum / (float)count;",
        "return sum / (float)(count - 1);",
        "tests/units/kernels/test_nontemporal.py",
    ),
    Bug(
        "sum-in-another-order",
        "ReducePlan.add",
        "sums in the order of ranks, from 3 ranks on",
        "for rank in sorted(addends)]",
        "for rank in sorted(addends, reverse=True)]",
        "tests/units/transport/test_collectives.py",
    ),
    Bug(
        "sum-in-16-bits",
        "_mean_by_torch",
        "sums of bfloat16 in float32",
        "if first.dtype == into.dtype:",
        "if others:",
        "tests/units/transport/test_collectives.py",
    ),
    Bug(
        "missed-wait-for-bytes",
        "Work.wait",
        "a collective is finished before its bytes are there",
        "            for work, peer in works:",
        "            for work, peer in works[1:]:",
        "tests/units/transport/test_collectives.py",
    ),
    Bug(
        "last-piece-not-cut",
        "Segment.piece_bounds",
        "the piece of the last rank, where rows do not divide",
        "return start, min(self.piece_numel, self.numel - start)",
        "return start, self.piece_numel",
        "tests/units/transport/test_collectives.py",
    ),
    Bug(
        "any-is-all",
        "transport/direct_exchange.py:_merge",
        "which gradients exist on some rank",
        "torch.amax(rows, 0, out=bits)",
        "torch.amin(rows, 0, out=bits)",
        "tests/units/transport/test_collectives.py",
    ),
    Bug(
        "native-wrong-divisor",
        "Native._divide",
        "the mean over ranks, on other backends than gloo",
        "torch._foreach_div_(sums, self._size)",
        "torch._foreach_div_(sums, max(self._size - 1, 1))",
        "tests/units/transport/test_collectives.py",
    ),
    Bug(
        "traffic-counted-wrong",
        "one_host/same_host.py:_Message.__init__",
        "bytes sent against the plan",
        "self.nbytes += sum(",
        "self.nbytes += 2 * sum(",
        "property_tests/test_plan_laws.py",
    ),
    # -- ranks that fail or part ---------------------------------------------------------------------------------------
    Bug(
        "ring-overrun",
        "Mailbox.send",
        "headers that the peer has not taken are overwritten",
        ">= _SLOTS:\n            self._make_room()",
        "> _SLOTS:\n            self._make_room()",
        "tests/units/transport/test_mailbox.py",
    ),
    # -- layout --------------------------------------------------------------------------------------------------------
    Bug(
        "rows-rounded-down",
        "ShardLayout.shard_rows",
        "rows that do not divide by the ranks",
        "return -(-self.rows // self.shards)",
        "return max(self.rows // self.shards, 1)",
        "property_tests/test_value_laws.py",
    ),
    Bug(
        "padding-in-the-shard",
        "ShardLayout.local_shape",
        "the norm: the last shard has the padding in it",
        "rows = self.owned_rows(rank)[1]\n",
        "rows = self.shard_rows\n",
        "property_tests/test_value_laws.py",
    ),
    Bug(
        "strides-lost",
        "shard_layout",
        "the order in memory of parameters that are not contiguous",
        "order = by_stride if _is_dense(shape, stride, by_stride) else order",
        "order = list(range(len(shape)))",
        "property_tests/test_value_laws.py",
    ),
    Bug(
        "join-takes-the-less",
        "Home.join",
        "a stage absorbs the stages below it",
        "max(self.stage, other.stage)",
        "min(self.stage, other.stage)",
        "property_tests/test_value_laws.py",
    ),
    Bug(
        "persist-below-includes-its-bound",
        "transforms/shard.py:_join",
        "a parameter of exactly persist_below bytes",
        "parameter.parameter.element_size() < persist_below",
        "parameter.parameter.element_size() <= persist_below",
        "tests/units/transforms/test_promises.py",
    ),
    # -- a step --------------------------------------------------------------------------------------------------------
    Bug(
        "prefetch-over-a-reshard",
        "prefetch",
        "a unit is gathered before it was freed, and then freed",
        "before.unit == event.unit:\n                break\n            at -= 1\n            if",
        "before.unit == event.unit + 1:\n                break\n            at -= 1\n            if",
        "tests/units/values/test_schedule.py",
    ),
    Bug(
        "packed-without-offset",
        "_pack",
        "which weight of a unit a saved tensor is",
        "(local.storage_offset(), local.size(), local.stride())",
        "(0, local.size(), local.stride())",
        "tests/promises/test_stages_agree.py",
    ),
    Bug(
        "recomputation-passes-uses",
        "BackwardPass._may_still_pass",
        "units below one checkpoint, in one forward of several",
        "else self._at) > self._reached_to",
        "else self._at) > self._entered_to",
        "property_tests/test_training_laws.py",
    ),
    Bug(
        "chunk-read-over-what-is-written",
        "ChunkPipeline.fetch",
        "a slow disk gets the bytes of another chunk",
        "wait_all(self._puts.pop(later - BUFFERS, ()))",
        "pass",
        "tests/units/streamed/test_pipeline.py",
    ),
    Bug(
        "shared-gradient-summed-in-place",
        "Gradients.add",
        "a gradient that two parameters share is added to both",
        "have.to(slot.kind.sum_dtype, copy=True)",
        "have.to(slot.kind.sum_dtype)",
        "tests/units/runtime/test_gradients.py",
    ),
    # -- tiers ---------------------------------------------------------------------------------------------------------
    Bug(
        "windows-share-a-buffer",
        "Windows.fetch",
        "parcels of one chunk are written back before those of another take their memory",
        "self._turn += 1",
        "self._turn += 0",
        "tests/units/runtime/test_compute_copies.py",
    ),
    Bug(
        "read-while-it-is-written",
        "Record.read_parcel",
        "waiting for what is written before the same is read",
        "        self.finish_writing()\n        if not parcel.is_stored:",
        "        if not parcel.is_stored:",
        "tests/units/runtime/test_record.py",
    ),
    Bug(
        "copied-before-it-is-computed",
        "SideStream.copy_all",
        "a copy reads what was computed, and writes where all was read",
        "stream.wait_stream(torch.accelerator.current_stream(self._device))",
        "pass",
        "tests/accelerator/test_accelerator.py",
    ),
    # -- plan ----------------------------------------------------------------------------------------------------------
    Bug(
        "plan-of-sent-bytes",
        "_moves",
        "bytes of gradients sent: the own piece stays",
        "sent = cut.numel - cut.own",
        "sent = cut.numel",
        "property_tests/test_plan_laws.py",
    ),
    Bug(
        "plan-of-moved-bytes",
        "_streamed",
        "bytes that a step reads from a disk",
        "min(kept // 2, sum(sizes))",
        "0",
        "tests/units/inspect/test_planned_tiers.py",
    ),
    Bug(
        "plan-forgets-microbatches",
        "_walk",
        "gathers of the microbatches after the first",
        "((forward, True), (backward, False)) * backwards:",
        "((forward, True), (backward, False)) * 1:",
        "property_tests/test_plan_laws.py",
    ),
    # -- DeepSpeed -----------------------------------------------------------------------------------------------------
    Bug(
        "one-checkpoint-too-few",
        "prune",
        "so many checkpoints stay, also while there are fewer",
        "keep - 1",
        "max(keep - 2, 0)",
        "tests/units/checkpoint/test_folders.py",
    ),
    Bug(
        "folder-not-synced",
        "Draft.commit",
        "names of files are on the disk before the rename",
        "sync_folder(self.path / kind)",
        "pass",
        "tests/units/checkpoint/test_atomic.py",
    ),
    Bug(
        "scale-doubles-a-step-early",
        "Scaler._moved",
        "the scale of the loss moves when DeepSpeed's does",
        "since = self._steps - self._skipped_at - 1",
        "since = self._steps - self._skipped_at",
        "tests/units/deepspeed/test_golden.py",
    ),
    Bug(
        "sums-of-microbatches-in-16-bits",
        "Gradients._room",
        "a gradient in bfloat16 is rounded once, when its sum is complete",
        "and slot.kind.sum_dtype == slot.kind.gradient_dtype",
        "and slot.kind.sum_dtype == slot.dtype",
        "tests/promises/test_narrow_gradients.py",
    ),
    Bug(
        "own-rows-do-not-come-along",
        "owners/exchange.py:collected",
        "an owner has its own rows of a tensor, too",
        "leg.rows(room, owner).copy_(held[at])",
        "leg.rows(room, owner)",
        "tests/promises/test_by_owner.py",
    ),
    Bug(
        "loads-of-owners-are-forgotten",
        "Dealing.deal",
        "the next tensor goes to the rank with the least to do",
        "load[number] += cost",
        "load[number] = cost",
        "tests/units/owners/test_assignment.py",
    ),
)
