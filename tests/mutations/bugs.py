"""Plausible bugs, one for each invariant that would break without a word: one replacement in one function.

A bug is anchored to a function, wherever that stands, and to a short text in it, which `tests/test_mutations.py` checks to
be there once. `likely` names tests that should see the bug, so that they run first; the whole test command follows if they do
not.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["BUGS", "Bug", "planted"]


@dataclass(frozen=True, slots=True)
class Bug:
    """One bug.

    Attributes:
        name: Of the bug, in kebab case.
        where: The function, as "Class.method"; with its file where others are called so ("plan/links.py:_least"); or a file
            of C.
        breaks: What it breaks.
        old, new: The text that is there, and what is put in its place.
        likely: Tests to run first, as pytest takes them.
    """

    name: str
    where: str
    breaks: str
    old: str
    new: str
    likely: str = "tests/distributed/test_training.py"


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
        "tests/transport/test_collectives.py",
    ),
    Bug(
        "wrong-divisor-in-c",
        "kernels/nontemporal.c",
        "the mean over ranks, of large tensors",
        "return sum / (float)count;",
        "return sum / (float)(count - 1);",
        "tests/kernels/test_nontemporal.py",
    ),
    Bug(
        "copies-forget-the-rest",
        "kernels/nontemporal.c",
        "copies whose bytes fill no whole line of the cache",
        "    memcpy(into, source, nbytes);\n    order_writes();",
        "    order_writes();",
        "tests/kernels/test_nontemporal.py",
    ),
    Bug(
        "sum-in-another-order",
        "Sum.finish",
        "sums in the order of ranks, from 3 ranks on",
        "for rank in sorted(addends)]",
        "for rank in sorted(addends, reverse=True)]",
        "tests/transport/test_collectives.py",
    ),
    Bug(
        "sum-in-16-bits",
        "_mean_by_torch",
        "sums of bfloat16 in float32",
        "if first.dtype == into.dtype:",
        "if others:",
        "tests/transport/test_collectives.py",
    ),
    Bug(
        "missed-wait-for-bytes",
        "Pending.wait",
        "a collective is finished before its bytes are there",
        "        for work, peer in works:",
        "        for work, peer in works[1:]:",
        "tests/transport/test_collectives.py",
    ),
    Bug(
        "last-piece-not-cut",
        "Segment.piece_bounds",
        "the piece of the last rank, where rows do not divide",
        "return start, min(self.piece_numel, self.numel - start)",
        "return start, self.piece_numel",
        "tests/transport/test_collectives.py",
    ),
    Bug(
        "any-is-all",
        "Exchange.any.merge",
        "which gradients exist on some rank",
        "torch.amax(rows, 0, out=bits)",
        "torch.amin(rows, 0, out=bits)",
        "tests/transport/test_collectives.py",
    ),
    Bug(
        "block-freed-early",
        "Shared._free_read",
        "a message that not all peers have read",
        "read_by_all = min(",
        "read_by_all = max(",
        "tests/transport/test_mailbox.py",
    ),
    Bug(
        "native-wrong-divisor",
        "Native.reduce_scatter.divide",
        "the mean over ranks, on other backends than gloo",
        "torch._foreach_div_(sums, self._size)",
        "torch._foreach_div_(sums, max(self._size - 1, 1))",
        "tests/transport/test_collectives.py",
    ),
    Bug(
        "second-axis-not-summed",
        "Links._reductions",
        "gradients that the second axis does not cut",
        "yield from self._last_hops([room.segment for room in rooms], what)",
        "yield from self._last_hops([], what)",
        "tests/composition",
    ),
    Bug(
        "own-shard-not-copied",
        "fill_own",
        "the own part of a gathered parameter",
        "apart = [segment for segment in segments if segment.source is not None]",
        "apart: list[Segment] = []",
        "tests/distributed/test_training.py",
    ),
    Bug(
        "traffic-counted-wrong",
        "transport/one_host/same_host.py:_Message.__init__",
        "bytes sent against the plan",
        "self.nbytes += sum(",
        "self.nbytes += 2 * sum(",
        "property_tests/test_plan_laws.py",
    ),
    # -- ranks that fail or part ---------------------------------------------------------------------------------------
    Bug(
        "out-of-step-ignored",
        "_Message.read",
        "bytes of another collective are used",
        "if mark != self._mark:",
        "if False:",
        "tests/transport/test_desync.py",
    ),
    Bug(
        "deadline-ignored",
        "wait_for",
        "a stopped rank is waited for until the timeout of the group",
        "work.wait(_limit)",
        "work.wait()",
        "tests/transport/test_collectives.py",
    ),
    Bug(
        "death-unnoticed",
        "Mailbox._loss",
        "a killed rank is found at the deadline only",
        "if self._death.poll(0):",
        "if False:",
        "tests/transport/test_mailbox.py",
    ),
    Bug(
        "ring-overrun",
        "Mailbox.send",
        "headers that the peer has not taken are overwritten",
        ">= _SLOTS:\n            self._make_room()",
        "> _SLOTS:\n            self._make_room()",
        "tests/transport/test_mailbox.py",
    ),
    Bug(
        "failure-forgotten",
        "Guarded.issue",
        "collectives go on after a failure",
        "        if history.failure is not None:\n            raise history.failure\n        event",
        "        event",
        "tests/transport/test_guarded.py",
    ),
    Bug(
        "comparison-forgotten",
        "Guarded.issue",
        "guard(compare=True) compares nothing",
        "        if _compares:\n",
        "        if False:\n",
        "tests/transport/test_desync.py",
    ),
    Bug(
        "agreement-with-rank-0-only",
        "transport/agreement.py:_require_equal",
        "ranks that disagree with a later rank",
        "for rank in range(len(digests)):",
        "for rank in range(2):",
        "tests/transport/test_agreement.py",
    ),
    Bug(
        "edits-not-compared",
        "_unsharded",
        "edits that differ between ranks",
        "                _require_equal_edits(unit, wholes)\n",
        "                assert wholes is not None\n",
        "tests/errors",
    ),
    Bug(
        "shards-of-another-rank",
        "require_own_shard",
        "that a file with the shards of one rank is no other rank's",
        "placement.is_replicate() or theirs[i] == ours[i]",
        "True",
        "tests/distributed/test_loaded_states.py",
    ),
    # -- layout --------------------------------------------------------------------------------------------------------
    Bug(
        "rows-rounded-down",
        "ShardLayout.shard_rows",
        "rows that do not divide by the ranks",
        "return -(-self.rows // self.shards)",
        "return max(self.rows // self.shards, 1)",
        "property_tests/test_layout_laws.py",
    ),
    Bug(
        "padding-in-the-shard",
        "ShardLayout.local_shape",
        "the norm: the last shard has the padding in it",
        "rows = self.owned_rows(rank)[1]\n",
        "rows = self.shard_rows\n",
        "property_tests/test_layout_laws.py",
    ),
    Bug(
        "strides-lost",
        "shard_layout",
        "the order in memory of parameters that are not contiguous",
        "order = by_stride if _is_dense(shape, stride, by_stride) else order",
        "order = list(range(len(shape)))",
        "property_tests/test_layout_laws.py",
    ),
    Bug(
        "strided-placement-forgotten",
        "Grid.placements",
        "where a tensor that two axes cut along one dim has its rows",
        "found.append(Shard(cut.dim) if factor == 1 else _StridedShard(cut.dim, split_factor=factor))",
        "found.append(Shard(cut.dim))",
        "tests/composition",
    ),
    Bug(
        "join-takes-the-less",
        "Home.join",
        "a stage absorbs the stages below it",
        "max(self.sharded, other.sharded)",
        "min(self.sharded, other.sharded)",
        "property_tests/test_home_laws.py",
    ),
    Bug(
        "persist-below-includes-its-bound",
        "transforms/shard.py:_join",
        "a parameter of exactly persist_below bytes",
        "parameter.parameter.element_size() < persist_below",
        "parameter.parameter.element_size() <= persist_below",
        "tests/transforms/test_promises.py",
    ),
    Bug(
        "tie-lost",
        "_unit_of",
        "the second name of a tied parameter",
        "for name, attribute in parameter.places]\n        home",
        "for name, attribute in parameter.places[:1]]\n        home",
        "property_tests/test_transform_laws.py",
    ),
    # -- a step --------------------------------------------------------------------------------------------------------
    Bug(
        "prefetch-over-a-reshard",
        "prefetch",
        "a unit is gathered before it was freed, and then freed",
        "before.unit == event.unit:\n                break\n            at -= 1\n            if",
        "before.unit == event.unit + 1:\n                break\n            at -= 1\n            if",
        "tests/values/test_schedule.py",
    ),
    Bug(
        "gathered-freed-under-a-holder",
        "Gathered.free",
        "who holds a part of a gathered buffer keeps it",
        "if _references(storage._cdata) != references or not storage.resizable():",
        "if not storage.resizable():",
        "tests/runtime/test_gathered.py",
    ),
    Bug(
        "saved-weight-not-packed",
        "_pack",
        "memory: autograd keeps gathered weights",
        "    packed = _find(tensor)\n    if packed is not None:\n",
        "    packed = None\n    if packed is not None:\n",
        "tests/distributed/test_peak_memory.py",
    ),
    Bug(
        "packed-without-offset",
        "_find",
        "which weight of a unit a saved tensor is",
        "tensor.size(), tensor.stride(), tensor.storage_offset()",
        "tensor.size(), tensor.stride(), 0",
        "tests/distributed/test_training.py",
    ),
    Bug(
        "hooks-fire-twice",
        "runtime/gradients.py:add_gradient",
        "hooks of users on parameters",
        "    for hook in gradient_hooks(parameter):",
        "    for hook in 2 * gradient_hooks(parameter):",
        "tests/distributed/test_verbs.py",
    ),
    Bug(
        "regather-not-awaited",
        "Reduction.wait_regathered",
        "gradients that rest replicated are read before they are there",
        "if self._regathered is not None:",
        "if self._regathered is not None and self._memory is None:",
        "tests/distributed/test_training.py",
    ),
    Bug(
        "recomputation-passes-uses",
        "BackwardPass._must_wait",
        "units below one checkpoint, in one forward of several",
        "else at) > self._reached_to",
        "else at) > self._entered_to",
        "property_tests/test_simulated_training.py::test_a_recomputation_ahead_of_backward_is_not_taken_for_an_earlier_forward",
    ),
    Bug(
        "generation-not-counted",
        "_after_step",
        "a backward of a forward before the step is refused",
        "unit.generation += 1",
        "unit.generation += 0",
        "tests/errors",
    ),
    Bug(
        "stale-optimizer-unnoticed",
        "_require_not_replaced",
        "an optimizer built before the transform is refused",
        "if parameter.grad is None and successor.grad is not None:",
        "if parameter.grad is None and successor.grad is None:",
        "tests/errors",
    ),
    Bug(
        "zero-grad-leaves-pending",
        "Gradients.forget_dropped",
        "zero_grad() inside accumulate drops what was summed so far",
        "if self._slots[i].parameter.grad is not marker:",
        "if False:",
        "tests/acceptance/test_accumulation.py",
    ),
    Bug(
        "earlier-gradient-lost",
        "Gradients.unmark",
        "gradients of before an accumulate block stay in the sum",
        "self._slots[i].parameter.grad, marker.earlier = marker.earlier, None",
        "self._slots[i].parameter.grad, marker.earlier = None, None",
        "tests/acceptance/test_accumulation.py",
    ),
    Bug(
        "gradients-lost-in-unsharded",
        "_unsharded",
        "that a gradient into a copy raises",
        "            if whole.requires_grad:",
        "            if False:",
        "tests/distributed/test_verbs.py",
    ),
    Bug(
        "changes-unseen",
        "Shown.require_unchanged",
        "that what a forward changes in place is refused",
        "or not tensor._version:",
        "or True:",
        "tests/distributed/test_changes.py",
    ),
    Bug(
        "assigned-data-unseen",
        "_assign_data",
        "that values assigned to `.data` are kept",
        "self._local_tensor = room.copy_(",
        "room.copy_(",
        "tests/distributed/test_verbs.py::test_what_is_assigned_to_data_is_kept_through_the_next_use",
    ),
    Bug(
        "partial-gradient-taken-for-whole",
        "local_gradient",
        "gradients of norms under sequence parallelism",
        "if grad.placements != spec.placements:",
        "if any(p.is_shard() for p in spec.placements) and grad.placements != spec.placements:",
        "tests/composition",
    ),
    Bug(
        "swapped-values-ignored",
        "swapped_values",
        "functional_call computes with the values it was given",
        "found[i] = swapped[0]",
        "pass",
        "tests/acceptance/test_functional.py",
    ),
    Bug(
        "frozen-parameter-reduced",
        "Gradients.memory",
        "frozen parameters send nothing",
        "GradientMemory(self._slots, now, taken)",
        "GradientMemory(self._slots, [True] * len(now), taken)",
        "property_tests/test_plan_laws.py",
    ),
    Bug(
        "missed-wait-for-weights",
        "InFlight.finish",
        "weights are read before they are there",
        "            self._pending.wait()\n",
        "",
        "tests/distributed/test_training.py",
    ),
    Bug(
        "stale-kept-weights",
        "InFlight.free",
        "kept buffers are gathered again after a step",
        "if self.phase is Phase.AT_REST:",
        "if self.phase is Phase.AT_REST or not self._groups.is_transient:",
        "tests/distributed/test_training.py",
    ),
    Bug(
        "reshard-forgotten",
        "Forwards.reshard",
        "gathered parameters are freed in forward",
        "not unit.running",
        "unit.running",
        "tests/distributed/test_peak_memory.py",
    ),
    Bug(
        "any-rank-decides-alone",
        "Backwards._begun",
        "uses that some rank does not run",
        "zip(uses, union, strict=False) if runs",
        "zip(uses, local, strict=True) if runs",
        "tests/distributed/test_programs.py",
    ),
    Bug(
        "waiting-uses-not-agreed",
        "Backwards._begun",
        "which uses ranks remember",
        "zip(uses, union[len(uses) :], strict=False)",
        "zip(uses, later, strict=True)",
        "property_tests/test_simulated_training.py::test_ties_of_skipped_experts_train_in_later_backwards",
    ),
    Bug(
        "failed-pass-keeps-its-buffers",
        "Pass.close",
        "states are taken from memory that a failed read has left",
        "if not is_whole:",
        "if False:",
        "tests/streamed/test_streamed.py::test_states_that_could_not_be_read_are_read_again",
    ),
    Bug(
        "chunk-read-over-what-is-written",
        "Pass.fetch",
        "a slow disk gets the bytes of another chunk",
        "_wait(self._puts.pop(later - BUFFERS, ()))",
        "pass",
        "tests/streamed/test_pipeline.py",
    ),
    Bug(
        "conjugate-lost-in-a-tier",
        "_viewed",
        "a complex parameter in a tier is its own conjugate",
        " or view.is_conj()",
        "",
        "tests/transforms/test_offload.py::test_a_complex_parameter_away_is_not_read_as_its_own_conjugate",
    ),
    Bug(
        "notes-of-buffers-overwritten",
        "Statistics.told",
        "buffers that an earlier backward told of stay different on ranks",
        "_is_due |= has",
        "_is_due = has",
        "tests/acceptance/test_buffers.py",
    ),
    Bug(
        "shared-gradient-summed-in-place",
        "Gradients.add",
        "a gradient that two parameters share is added to both",
        "have.to(slot.kind.sum_dtype, copy=True)",
        "have.to(slot.kind.sum_dtype)",
        "tests/runtime/test_gradients.py",
    ),
    Bug(
        "gradients-owned-after-they-were-taken",
        "Gradients.take",
        "a gradient that two parameters share is added to both, after a step in which the unit had several uses",
        "self._is_owned = [False] * len(self._slots)",
        "pass",
        "tests/runtime/test_gradients.py",
    ),
    Bug(
        "what-travelled-not-remembered",
        "Gathered._add",
        "autograd keeps what a class has gathered until backward",
        "remember_buffer(buffer, self, source, len(self.buffers))",
        "pass",
        "tests/runtime/test_extended.py",
    ),
    Bug(
        "uneven-rows-travel",
        "travels",
        "a class is given another shard than it takes",
        "path.is_in_order and path.numel == path.piece_numel * path.size",
        "path.is_in_order",
        "tests/runtime/test_extended.py",
    ),
    Bug(
        "subclass-kept-whole-for-backward",
        "runtime/saved.py:_find",
        "quantized weights stay gathered from forward to backward",
        "return _PackedParts(tensor, names, context) if is_ours else None",
        "return None",
        "tests/transforms/test_flatten_subclasses.py",
    ),
    Bug(
        "steps-not-counted",
        "Run.note_optimizer_step",
        "a rank that left out a step of the optimizer trains on, and replicas part",
        "self.backwards.updates += 1",
        "self.backwards.updates += 0",
        "tests/transport/test_desync.py",
    ),
    Bug(
        "uses-not-compared",
        "Backwards._begun",
        "ranks that ran the same units in another order share a backward",
        "check=passed, ",
        "",
        "tests/transport/test_desync.py",
    ),
    Bug(
        "nested-units-stay-gathered",
        "_Nested.reshard",
        "memory of reentrant checkpoints",
        "if unit.shown.is_left and now",
        "if False and now",
        "tests/distributed/test_peak_memory.py",
    ),
    Bug(
        "accumulate-is-never-fresh",
        "Run.begin_accumulation",
        "a block gathers what a step has changed",
        "is_fresh = True",
        "is_fresh = False",
        "tests/transforms/test_promises.py",
    ),
    Bug(
        "accumulate-forgets-to-reset",
        "Run.end_accumulation",
        "what was accumulated before an exception is dropped",
        "unit.gradients.take()",
        "pass",
        "tests/distributed/test_programs.py::test_a_program_gives_what_replicas_give[failing accumulation-2]",
    ),
    Bug(
        "failed-backward-leaves-gradients",
        "Backwards.recover",
        "gradients of a backward that raised leak into the next",
        "unit.gradients.take()",
        "pass",
        "tests/transforms/test_promises.py",
    ),
    Bug(
        "failed-forward-ignored",
        "Forwards.leave",
        "a unit whose forward raised counts as left",
        "forward.failed |= failed",
        "forward.failed = forward.failed",
        "tests/distributed/test_programs.py::test_a_program_gives_what_replicas_give[failing forward-2]",
    ),
    Bug(
        "agreement-skipped",
        "Forwards.agree",
        "ranks that hold different modules",
        "if module.assignment.axis is not None:",
        "if module.assignment.axis is None:",
        "tests/errors",
    ),
    Bug(
        "step-inside-accumulate-unnoticed",
        "_has_local_gradients",
        "a step with gradients that were not reduced is refused",
        "unit.gradients.has_pending()",
        "False",
        "tests/errors",
    ),
    Bug(
        "moved-parameters-not-followed",
        "AtRest.is_current",
        "parameters that .to(), to_empty() and load_state_dict(assign=True) moved",
        "return self.moving is None and all(",
        "return True or all(",
        "tests/distributed/test_verbs.py",
    ),
    Bug(
        "writeback-skips-a-slot",
        "AtRest.scatter",
        "edits of the first parameter of a unit in unsharded()",
        "in wholes.items()",
        "in list(wholes.items())[1:]",
        "tests/distributed/test_verbs.py",
    ),
    Bug(
        "buffers-never-due",
        "Statistics.told",
        "rank 0's statistics are those of all ranks",
        "_is_due |= has",
        "_is_due &= has",
        "tests/acceptance/test_buffers.py",
    ),
    Bug(
        "one-frozen-norm-hides-the-others",
        "Statistics.note",
        "ranks evaluate with different statistics if one BatchNorm is frozen",
        "trains = any(modes)",
        "trains = all(modes)",
        "tests/acceptance/test_buffers.py",
    ),
    Bug(
        "values-of-buffers-never-compared",
        "Statistics.note",
        "buffers that change without a version drift apart",
        "self._has_changed |= self._changes_unseen or self._has_other_values()",
        "pass",
        "tests/acceptance/test_buffers.py",
    ),
    Bug(
        "rates-that-are-tensors-read-late",
        "_Step.__init__",
        "a learning rate that is changed after a step changes that step",
        "value.clone() if isinstance(value, Tensor) else value",
        "value",
        "tests/streamed/test_waiting.py",
    ),
    Bug(
        "single-edits-lost",
        "_take_over",
        "a whole parameter that was edited once keeps its old value",
        "if leaf._version}",
        "if leaf._version > 1}",
        "tests/distributed/test_whole_steps.py",
    ),
    Bug(
        "load-without-refresh",
        "_note_loaded",
        "the backward of a forward before a load computes gradients with what was loaded",
        "refresh(model)",
        "pass",
        "tests/checkpoint/test_resume.py",
    ),
    Bug(
        "load-counts-no-version",
        "Leaf.fill",
        "the backward of a plain module computes gradients with what was loaded since",
        "torch.autograd.graph.increment_version(local)",
        "pass",
        "tests/checkpoint/test_resume.py",
    ),
    Bug(
        "units-run-on-after-an-interrupt",
        "Unit.start_over",
        "a unit is not entered after its recomputation was interrupted",
        "self.running = 0",
        "pass",
        "tests/distributed/test_door.py",
    ),
    Bug(
        "interrupted-forwards-stay-open",
        "Forwards.abandon",
        "a forward after an interrupted one begins anew",
        "self.start_over()",
        "pass",
        "tests/distributed/test_door.py",
    ),
    Bug(
        "interrupted-units-keep-running",
        "Unit.start_over",
        "a unit that an interrupt has left is entered again",
        "self.running = 0",
        "pass",
        "tests/distributed/test_door.py",
    ),
    # -- tiers ---------------------------------------------------------------------------------------------------------
    Bug(
        "read-before-it-is-written",
        "Waiting.reach",
        "what a waiting step has stepped is in its tier before it is read there",
        "self.wait(self._lanes[-1])  #",
        "pass  #",
        "tests/streamed/test_waiting.py",
    ),
    Bug(
        "buffers-kept-after-a-failure",
        "Store.forget",
        "a read that failed leaves its memory with any bytes",
        "self._let_go(next(iter(self._held)))",
        "break",
        "tests/streamed/test_streamed.py",
    ),
    Bug(
        "place-given-out-while-it-is-read",
        "Store.reserve",
        "a place that was given up has nothing under way when it is used again",
        "self._let_go(member.place)  # the memory of what was there before",
        "pass",
        "tests/storage/test_store.py",
    ),
    Bug(
        "limit-of-the-host-for-each-growth",
        "Shelf._grow",
        "the limit of host memory bounds all that was taken of it",
        "None if limit is None else limit - self.nbytes",
        "limit",
        "tests/storage/test_slab.py",
    ),
    Bug(
        "staging-lent-while-it-is-written",
        "Disk.borrow",
        "staging buffers have nothing under way when they are lent again",
        "        self._carrier.settle(memory)\n",
        "",
        "tests/storage/test_disk.py",
    ),
    Bug(
        "windows-share-a-buffer",
        "Windows.fetch",
        "parcels of one chunk are written back before those of another take their memory",
        "self._turn += 1",
        "self._turn += 0",
        "tests/runtime/test_compute_copies.py",
    ),
    Bug(
        "visits-share-a-room",
        "Window.bring",
        "a value and its gradient visit their states side by side",
        "self._for_copies[padded_nbytes(there.numel(), there.dtype) :]",
        "self._for_copies[0:]",
        "tests/accelerator/test_accelerator.py",
    ),
    Bug(
        "stale-compute-copy",
        "Record.write_parcel",
        "a copy in the compute dtype is behind once its original was written",
        "parcel.version = parcel.version + 1 if version is None else version",
        "parcel.version = 1 if version is None else version",
        "tests/runtime/test_compute_copies.py",
    ),
    Bug(
        "fetched-ahead-and-out-of-date",
        "Record.write_parcel",
        "letting go of what was fetched before a write",
        "        self.drop()  # what was fetched ahead is out of date\n",
        "        pass\n",
        "tests/runtime/test_record.py",
    ),
    Bug(
        "read-while-it-is-written",
        "Record.read_parcel",
        "waiting for what is written before the same is read",
        "        self.finish_writing()\n        if not parcel.is_stored:",
        "        if not parcel.is_stored:",
        "tests/runtime/test_record.py",
    ),
    Bug(
        "gradient-beside-is-lost",
        "Record.begin_writing",
        "tensors of a parcel that are not written with the others",
        "[p for p in parcels if any(piece.parameter not in values for piece in p.pieces)]",
        "[]",
        "tests/runtime/test_record.py",
    ),
    Bug(
        "tensor-read-before-its-step",
        "Record.opened",
        "that whoever reads a tensor in a tier finds it stepped",
        "        self.settle()\n",
        "",
        "tests/streamed/test_waiting.py",
    ),
    Bug(
        "failures-along-one-axis",
        "_axes_of",
        "a disk that fails is an error along every axis of the mesh",
        "axes = [mesh_axis(mesh[names[dim]] if names and mesh.ndim > 1 else mesh, verb=what) for dim in dims]",
        "axes = [mesh_axis(mesh[names[dim]] if names and mesh.ndim > 1 else mesh, verb=what) for dim in list(dims)[:1]]",
        "tests/composition/test_tiers.py",
    ),
    Bug(
        "copy-not-sent",
        "streamed/one_pass.py:_pieces",
        "the kernel writes copies of what it steps",
        "sent = map(sends.get, parameters)",
        "sent = map({}.get, parameters)",
        "tests/runtime/test_compute_copies.py",
    ),
    Bug(
        "parked-and-fetched-too-early",
        "_OnHost.fetch",
        "what is copied to the host has arrived there before it is copied back",
        "self._memory, after=self._there)",
        "self._memory)",
        "tests/accelerator/test_accelerator.py",
    ),
    Bug(
        "gathered-before-it-is-there",
        "Gathered.wait_for_own",
        "a gathered parameter has arrived from the host before it is read",
        "stream.wait_for(end)",
        "pass",
        "tests/accelerator/test_accelerator.py",
    ),
    Bug(
        "copied-before-it-is-computed",
        "SideStream.copy_all",
        "a copy reads what was computed, and writes where all was read",
        "stream.wait_stream(torch.accelerator.current_stream(self._device))",
        "pass",
        "tests/accelerator/test_accelerator.py",
    ),
    Bug(
        "copied-from-memory-that-is-gone",
        "SideStream.copy_all",
        "memory of a device stays while it is copied",
        "self._copying.append((event, to if is_there else sources))",
        "pass",
        "tests/accelerator/test_accelerator.py",
    ),
    Bug(
        "written-while-it-leaves",
        "_stay",
        "memory of the host stays as it is while it is copied to the device",
        "leaving.synchronize()",
        "pass",
        "tests/accelerator/test_accelerator.py",
    ),
    Bug(
        "staging-read-over-what-leaves",
        "Disk.borrow",
        "a staging buffer is used again once what it held is on the device",
        "left.synchronize()",
        "pass",
        "tests/accelerator/test_accelerator.py",
    ),
    Bug(
        "gathered-before-it-is-stepped",
        "Record.settle",
        "a gather reads what the step that waits has written",
        "reach(index)",
        "pass",
        "tests/accelerator/test_accelerator.py",
    ),
    Bug(
        "first-of-a-gather-is-waited-for",
        "SideStream.copy_all",
        "the last copy of a gather is waited for, too",
        "                self._copy(place, source)\n        event = stream.record_event()",
        "                self._copy(place, source)\n"
        "                event = stream.record_event() if place is to[0] else event",
        "tests/accelerator/test_accelerator.py",
    ),
    Bug(
        "gathered-beside-its-copies",
        "InFlight.begin",
        "an all-gather waits for the shard that comes from the host",
        "with beside:  #",
        "if True:  #",
        "tests/accelerator/test_accelerator.py",
    ),
    Bug(
        "gathers-that-computation-waits-for",
        "InFlight.begin",
        "what computes does not wait for copies of the next unit",
        "memory.fill_own(has_failed=self.failure is not None)",
        "memory.fill_own(has_failed=self.failure is not None)\n        memory.wait_for_own()",
        "tests/accelerator/test_accelerator.py",
    ),
    Bug(
        "saved-before-it-has-come",
        "checkpoint/saving.py:_copy",
        "what is saved beside the training has come from the device before it is written",
        "torch.accelerator.synchronize()",
        "pass",
        "tests/accelerator/test_accelerator.py",
    ),
    Bug(
        "gradients-written-before-they-came",
        "Stretch.go_on",
        "that gradients are written to a disk once they have come from the device",
        "            arriving.synchronize()\n        unwritten",
        "            pass\n        unwritten",
        "tests/accelerator/test_accelerator.py",
    ),
    Bug(
        "failed-disk-is-not-told",
        "InFlight.begin",
        "other ranks are told of a disk that failed",
        "Told(transport, self.failure,",
        "Told(transport, None,",
        "tests/transforms/test_offload.py",
    ),
    # -- plan ----------------------------------------------------------------------------------------------------------
    Bug(
        "plan-of-sent-bytes",
        "sent_nbytes",
        "bytes of gradients sent: the own piece stays",
        "else numel - own",
        "else numel",
        "property_tests/test_plan_laws.py",
    ),
    Bug(
        "plan-of-moved-bytes",
        "_streamed",
        "bytes that a step reads from a disk",
        "min(kept // 2, sum(sizes))",
        "0",
        "tests/plan/test_tiers.py",
    ),
    Bug(
        "plan-forgets-microbatches",
        "walk",
        "gathers of the microbatches after the first",
        "((forward, True), (backward, False)) * backwards:",
        "((forward, True), (backward, False)) * 1:",
        "tests/distributed/test_verbs.py",
    ),
    # -- DeepSpeed -----------------------------------------------------------------------------------------------------
    Bug(
        "weights-of-16-bits-without-masters",
        "placed_by",
        "what is trained rests in float32",
        "is_narrow = parameter.dtype in (torch.bfloat16, torch.float16)",
        "is_narrow = False",
        "tests/deepspeed/test_setup.py",
    ),
    Bug(
        "samples-that-are-not-shared",
        "require_own_samples",
        "a trainer gives no rank of a model axis other samples",
        "if prod(axis.size for axis in axes) != processes:",
        "if not axes:",
        "tests/integrations/test_trainer.py",
    ),
    Bug(
        "one-checkpoint-too-few",
        "prune",
        "so many checkpoints stay, also while there are fewer",
        "max(len(beside) - keep, 0)",
        "len(beside) - keep",
        "tests/checkpoint/test_folders.py",
    ),
    Bug(
        "folder-not-synced",
        "Draft.commit",
        "names of files are on the disk before the rename",
        "sync_folder(self.path / kind)",
        "pass",
        "tests/checkpoint/test_atomic.py",
    ),
    Bug(
        "saved-before-the-step",
        "ParcelWindow._open",
        "a checkpoint has the weights of a step that waits",
        "record.settle()",
        "pass",
        "tests/streamed/test_waiting.py",
    ),
    Bug(
        "stepped-after-the-load",
        "Fit.put",
        "states that are loaded are not those of the step before",
        "end_step(self.optimizer)",
        "pass",
        "tests/streamed/test_waiting.py",
    ),
    Bug(
        "ranks-named-across",
        "Links.__init__",
        "the numbers of ranks of two axes, in errors",
        "for axis in reversed(self.axes):",
        "for axis in self.axes:",
        "tests/transport/test_agreement.py",
    ),
    Bug(
        "entry-without-outcome",
        "Entries._take",
        "every entry has an outcome",
        "self.outcomes.append(TakenEntry(entry, shown(value), by_value))",
        "len(by_value)",
        "tests/deepspeed/test_settings.py",
    ),
    Bug(
        "overflow-in-bfloat16-stepped",
        "DeepSpeedSetup.step",
        "steps that are not finite are skipped",
        "is_taken = not self.skips_overflow or (norm is not None and isfinite(norm))",
        "is_taken = True",
        "tests/deepspeed/test_setup.py",
    ),
    Bug(
        "scale-doubles-a-step-early",
        "Scaler._moved",
        "the scale of the loss moves when DeepSpeed's does",
        "since = self._steps - self._skipped_at - 1",
        "since = self._steps - self._skipped_at",
        "tests/deepspeed/test_golden.py",
    ),
)
