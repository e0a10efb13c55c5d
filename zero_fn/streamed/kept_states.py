"""What `optimizer.state` of a streamed optimizer shows: the states that are in memory, to be read only."""

from __future__ import annotations

from typing import Any, NoReturn

from zero_fn.errors import StateError

__all__ = ["KeptStates", "MissingStateError", "refuse_edit"]


class MissingStateError(StateError, KeyError):
    """So that whoever asks whether a state is there is answered no."""

    __str__ = Exception.__str__  # that of KeyError quotes the message


def refuse_edit(*_args: object, **_kwargs: object) -> NoReturn:
    """Takes the place of whatever would change the states that are shown.

    Raises:
        StateError: Always.
    """
    raise StateError(
        "The states of a streamed optimizer cannot be edited through `state`.",
        why="they are in a tier, and what `state` gives is a copy of what is in memory",
        fix="saved = optimizer.state_dict(); edit saved['state']; optimizer.load_state_dict(saved)",
    )


class KeptStates(dict[Any, Any]):
    """A dict that refuses to be changed and says where states are that it does not have."""

    __setitem__ = __delitem__ = __ior__ = refuse_edit
    clear = pop = popitem = setdefault = update = refuse_edit

    def __missing__(self, key: object) -> NoReturn:
        raise MissingStateError(
            "This state of a streamed optimizer is not in memory.",
            state=key if isinstance(key, str) else type(key).__name__,
            fix="optimizer.state_dict() reads all states from their tier",
        )
