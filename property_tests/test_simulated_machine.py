"""A machine that steps the ranks rule by rule: after every rule, what all ranks hold equals what replicas hold.

The ranks stand still between rules: each waits for the next one at a point where it holds nothing of the simulator but the
baton. So Hypothesis sees the state it builds on, and shrinks the list of rules like any other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from property_tests.modules import Model
from property_tests.on_ranks import OnRank, Seen
from property_tests.replicas import Replicas
from property_tests.rules import Evaluate, Fail, Freeze, Optimizer, Program, Rule, ZeroGrad
from property_tests.strategies_of_programs import backwards, chains_for, models, rules, schedules, steps
from tests.simulation import Simulated, axis
from tests.support.profiles import machine_settings


def machine_of(simulated: Simulated) -> type[RuleBasedStateMachine]:
    """The machine on these simulated ranks."""

    class Training(RuleBasedStateMachine):
        """One model on ranks, and its replicas."""

        def __init__(self) -> None:
            super().__init__()
            self.number = 0
            self.before: list[Rule] = []
            self.ranks: list[OnRank] = []

        @initialize(
            model=models(),
            n=st.integers(1, 3),
            schedule=schedules,
            kind=st.sampled_from(["sgd", "adamw"]),
            data=st.data(),
        )
        def begin(self, model: Model, n: int, schedule: tuple[int, ...], kind: str, data: st.DataObject) -> None:
            chain = data.draw(chains_for(model), label="chain")
            self.model, self.n, self.schedule = model, n, schedule
            program = Program(model, chain, _ANY_ORDER, Optimizer(kind))
            self.replicas = Replicas(program, n, is_reordered=True)
            self.ranks = self._on_ranks(lambda rank: OnRank(program, axis()))

        @rule(one=backwards())
        def backward(self, one: Rule) -> None:
            self._do(one)

        @rule(one=steps())
        def step(self, one: Rule) -> None:
            self._do(one)

        @rule(to_none=st.booleans())
        def zero_grad(self, to_none: bool) -> None:
            self._do(ZeroGrad(to_none))

        @rule(part=st.integers(0, 3), frozen=st.booleans())
        def freeze(self, part: int, frozen: bool) -> None:
            self._do(Freeze(part, frozen))

        @rule(mode=st.sampled_from(["no_grad", "inference_mode", "eval"]))
        def evaluate(self, mode: str) -> None:
            self._do(Evaluate(mode))

        @rule(
            where=st.sampled_from(["forward", "backward", "recomputation"]),
            part=st.integers(0, 3),
            within=st.booleans(),
        )
        def fail(self, where: str, part: int, within: bool) -> None:
            self._do(Fail(where, part, within))

        @rule(data=st.data())
        def anything(self, data: st.DataObject) -> None:
            """Accumulate, edit, save and load, transform, copy: whatever fits the model."""
            self._do(data.draw(rules(self.model), label="rule"))

        def _do(self, one: Rule) -> None:
            if not self.ranks:
                return
            self.before.append(one)
            seed = 100 * self.number
            self.number += 1
            seen: list[Seen] = self._on_ranks(lambda rank: self.ranks[rank].do(one, seed))
            found = self.replicas.follow(one, seed, seen)
            assert not found, "\n".join(found)

        def _on_ranks(self, run: Callable[[int], object]) -> list:
            case = simulated(self.n, schedule=self.schedule, timing="late")
            return case.run(lambda: run(dist.get_rank()), may_leave_messages=True)

    return Training


_ANY_ORDER: tuple[Rule, ...] = ()


def test_the_model_equals_the_oracle_after_every_rule(simulated: Simulated) -> None:
    run_state_machine_as_test(machine_of(simulated), settings=machine_settings(dev=15, ci=400, deep=20_000))
