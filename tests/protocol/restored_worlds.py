"""Worlds that go on from the checkpoints that a world stores, on as many shards as there were and on one.

Each content of a checkpoint is followed once: its parts' files are put together and read by the real code, every worker begins
anew with what it had saved, and makes a step or two more, in every order. Must not know what else the first world does.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cut_parts import CutPart, complete_cuts
from setting import gradient_of
from stories import story
from world import State, World

from psd.checkpoint import CheckpointDirectory, Cut
from psd.contract.layout import Layout

if TYPE_CHECKING:
    from explorer import Explorer


class Restores:
    """Of one world.

    Args:
        explorer_of: makes the search of another one.

    Attributes:
        count: worlds that were followed.
    """

    def __init__(self, world: World, explorer_of: Callable[[World], Explorer]) -> None:
        self._world = world
        self._explorer_of = explorer_of
        self._found: dict[tuple[int, ...], list[str]] = {}
        self.count = 0

    def check(self, state: State, sure: set[int]) -> list[str]:
        """What is wrong with the worlds that go on from a state's checkpoints, if of each gradient in them it is sure that it
        counts."""
        wrong = []
        for parts in complete_cuts([node.view.cuts for node in state.shards]):
            key = tuple(part.files for part in parts)
            if min(key) < 0 or not sure.issuperset(g for part in parts for _, gradients in part.gradients for g in gradients):
                continue
            if key not in self._found:
                self._found[key] = [text for shards in {1, len(parts)} for text in self._follow(parts, shards)]
            wrong += self._found[key]
        return wrong

    def _follow(self, parts: Sequence[CutPart], shards: int) -> list[str]:
        self.count += 1
        setting, first = self._world.setting, parts[0]
        directory = Path(tempfile.mkdtemp(prefix="psd-protocol-", dir=self._world.directory))
        for part in parts:
            for name, content in self._world.files[part.files]:
                (directory / name).parent.mkdir(exist_ok=True)
                (directory / name).write_bytes(content)
        layout = Layout(setting.spec, len(parts))
        if not CheckpointDirectory(str(directory)).complete(Cut(first.cut, first.step, 0, "run", 1.0, layout, first.order)):
            return [f"cut {first.cut} is no checkpoint, though all parts are there"]
        later = setting.but(
            name=f"{setting.name}-restored",
            shards=shards,
            stored_by=len(parts),
            steps=first.step + 1,
            programs=("push_pull",) * len(setting.programs),
            faults=frozenset(),
            budget=0,
            has_checkpoint=True,
            cuts=0,
            early_cuts=0,
            reads=0,
            restores=0,
        )
        world = World(later, str(directory))
        try:
            explorer = self._explorer_of(world)
            explorer.run()
            where = f"what goes on from cut {first.cut} on {shards} shard(s)"
            found = [
                "\n".join((f"{where}: {'; '.join(finding.wrong)}", *story(world, finding.actions)))
                for finding in explorer.findings
            ]
            return found + [f"{where}: {text}" for text in self._beginnings(explorer, parts)]
        finally:
            world.close()
            shutil.rmtree(directory, ignore_errors=True)

    def _beginnings(self, explorer: Explorer, parts: Sequence[CutPart]) -> list[str]:
        """Workers begin with what they had saved, and blocks with what the checkpoint has."""
        state, _ = explorer.set_up()
        counted = {frozenset(gradients) for part in parts for _, gradients in part.gradients}
        begun = {
            frozenset(g for update in updates for g in update) for node in state.shards for _, updates in node.view.history
        }
        wrong = (
            [] if begun == counted else [f"blocks begin with {sorted(map(sorted, begun))}, not {sorted(map(sorted, counted))}"]
        )
        saved = {rank: gradient for part in parts for rank, gradient in part.states}
        for process in range(len(self._world.setting.programs)):
            first = min(gradient for gradient, _ in state.workers[process].view.books)
            expected = saved[process] + 1 if process in saved else gradient_of(process, 0)
            if first != expected:
                wrong.append(f"worker {process} goes on with gradient {first}, and had saved what comes before {expected}")
        return wrong
