"""Gets the files of a copy in memory that this host has not, and another has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from zero_fn.checkpoint.agreement import RankMeeting, failure_of
from zero_fn.checkpoint.file_transfer import transfer_files
from zero_fn.checkpoint.format.files import damaged, disk
from zero_fn.checkpoint.format.folders import CUT, MANIFEST, part_name
from zero_fn.checkpoint.format.own_folder import OwnFolder
from zero_fn.checkpoint.hosts import Hosts
from zero_fn.checkpoint.live.tensors import ModelTensors, tensors_of_groups
from zero_fn.values.chained_optimizer import Optimizers, members_of

__all__ = ["MissingFiles"]

_DOING = "Getting files of another host"


class MissingFiles:
    """The files of one copy by host."""

    def __init__(
        self, meeting: RankMeeting, hosts: Hosts, path: Path, files: Mapping[str, Sequence[str]]
    ) -> None:
        """`files` are those that each host has, by its name."""
        self._meeting = meeting
        self._hosts = hosts
        self._path = path
        self._files = files

    def get(self, ranks: int, model: nn.Module, optimizer: Optimizers | None) -> None:
        """Gets the manifest of a copy by so many ranks, and what a load on this rank reads."""
        manifest = [MANIFEST, *map(part_name, range(ranks))]
        self._get(manifest if self._hosts.is_first(self._meeting.rank) else [])
        wanted: set[str] = set()

        def look() -> None:
            wanted.update(self._read_by_load(model, members_of(optimizer)))

        self._meeting.agree(_DOING, failure_of(look))
        self._get(sorted(wanted))

    def _read_by_load(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> set[str]:
        """The files that a load reads on this rank, or more: all but those that have other boxes of
        the tensors that it holds."""
        named = ModelTensors()
        named.add(model, None)
        places = {("model", held.name): held.place for held in named.held_tensors}
        places |= {
            ("optimizer", held.name): held.place
            for optimizer in optimizers
            for group in tensors_of_groups(optimizer, named)
            for held in group
        }
        source, wanted = OwnFolder(self._path, lambda name: name), set[str]()
        source.read_all()
        for (kind, name), pieces in [*source.pieces.items(), *source.in_parts.items()]:
            parameter = name.rpartition("/")[0] if kind in CUT[1:] else name
            place = places.get((kind, parameter)) or places.get(("model", parameter))
            for box, piece in pieces.items():
                if place is None or piece.shape != place.shape or place.box.meet(box):
                    wanted.add(str(piece.path.relative_to(self._path)))
        return wanted

    def _get(self, wanted: Sequence[str]) -> None:
        """Gets files from other hosts, and sends them what they want.

        Ranks of one host do not want the same file twice.
        """
        names = self._hosts.names
        receivers: dict[tuple[str, str], int] = {}
        for receiver, files in enumerate(self._meeting.all_of(list(wanted))):
            for file in files:
                if file not in self._files[names[receiver]]:
                    receivers.setdefault((names[receiver], file), receiver)
        sends: dict[int, list[str]] = defaultdict(list)
        for (_, file), receiver in receivers.items():
            holders = [each for each, host in enumerate(names) if file in self._files[host]]
            if not holders:
                raise damaged(self._path / file, why="no host that is left has it")
            if holders[receiver % len(holders)] == self._meeting.rank:  # they take turns
                sends[receiver].append(file)

        def transfer() -> None:
            with disk(self._path, _DOING):
                transfer_files(self._meeting, self._path, sends)

        self._meeting.agree(_DOING, failure_of(transfer))
