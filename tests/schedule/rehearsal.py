"""A pipeline that loses workers, played through without tensors: every rule of the engine, none of its arithmetic.

Workers run the instructions of the real schedules one by one, in any interleaving. Between two owners there is a link:
messages arrive in order, sends never block. A lost worker's queue to its shadow is dropped; of its queue to its
successor some messages have arrived, the others are lost. Its shadow takes over a little later, and then the successor
sends all gradients of that boundary again. `Rehearsal.finish` runs to the commit and holds what must be true there.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from bamboo_ds.schedule import FailoverSchedule
from bamboo_ds.schedule.instructions import from_word, to_word
from bamboo_ds.schedule.operations import owned_by, shadowed_stage
from bamboo_ds.schedule.words import REDUCE, STEP, Word

Program = list[Word]


@dataclass
class Worker:
    """What one worker has done and holds; `done` counts instructions by their value, so nothing is done twice."""

    home: int
    owned: set[int]
    program: Program
    position: int = 0
    done: dict[Word, None] = field(default_factory=dict)
    backwards: dict[int, int] = field(default_factory=Counter)
    blocked: bool = False

    def copy(self) -> Worker:
        return Worker(self.home, set(self.owned), self.program, self.position, dict(self.done), Counter(self.backwards))

    @property
    def next(self) -> Word:
        return self.program[self.position]


class Rehearsal:
    """One pipeline in one step.

    Args:
        programs: The instructions of every worker, by home stage.
        owners: By stage, the home stage of its owner.
        micro_batches: Of the step.
        rng: Decides everything that is left to chance.
    """

    def __init__(self, programs: Mapping[int, Program], owners: list[int], micro_batches: int, rng: random.Random):
        self.owners, self.micro_batches, self.rng = owners, micro_batches, rng
        self.stages = len(owners)
        self.workers = {
            home: Worker(home, set(owned_by(home, owners=owners)), program) for home, program in programs.items()
        }
        self.activations: list[deque[int]] = [deque() for _ in range(self.stages)]  # to the owner of this stage
        self.gradients: list[deque[int]] = [deque() for _ in range(self.stages)]  # to the owner of this stage
        self.pending: list[list[int]] = []  # [victim, turns until its shadow takes over]
        self.lost: set[int] = set()
        self.edit: Callable[[Program], Program] = list
        """Changes the program of a shadow, for tests of the rehearsal itself."""

    def copy(self, rng: random.Random) -> Rehearsal:
        twin = Rehearsal({}, list(self.owners), self.micro_batches, rng)
        twin.workers = {home: worker.copy() for home, worker in self.workers.items()}
        twin.activations = [deque(queue) for queue in self.activations]
        twin.gradients = [deque(queue) for queue in self.gradients]
        twin.pending, twin.lost = [list(item) for item in self.pending], set(self.lost)
        return twin

    # ---- running -----------------------------------------------------------------------------------------------

    def turn(self, worker: Worker) -> bool:
        """Let a worker run its next instruction; False when it has to wait."""
        word = worker.next
        if word in (REDUCE, STEP):
            worker.blocked = True
            return False
        letters, stage, micro_batch = word
        if letters in ("RA", "RG"):
            queue = (self.activations if letters == "RA" else self.gradients)[stage]
            if not queue:
                worker.blocked = True
                return False
            neighbour = stage + (1 if letters == "RG" else -1)
            assert neighbour not in worker.owned, f"{worker.home} receives {word} from itself"
            arrived = queue.popleft()
            assert arrived == micro_batch, f"{worker.home}: {word} gets the message of micro-batch {arrived}"
        self._check(worker, word)
        assert word not in worker.done, f"{worker.home} runs {word} twice"
        worker.done[word] = None
        worker.position += 1
        if letters in ("SA", "SG"):
            self._send(worker, word)
        return True

    def _send(self, worker: Worker, word: Word) -> None:
        letters, stage, micro_batch = word
        target = stage + (1 if letters == "SA" else -1)
        assert target not in worker.owned, f"{worker.home} sends {word} to itself"
        if self.owners[target] in self.lost:
            return
        (self.activations if letters == "SA" else self.gradients)[target].append(micro_batch)
        self.workers[self.owners[target]].blocked = False

    def _check(self, worker: Worker, word: Word) -> None:
        """Hold that the worker has what the instruction reads."""
        letters, stage, m = word
        done, last = worker.done, self.stages - 1
        forward = Word("F", stage, m) in done or Word("P", stage, m) in done
        if letters == "R":
            assert stage == (worker.home + 1) % self.stages, f"{worker.home} is no shadow for {word}"
            assert stage not in worker.owned
            assert stage == 0 or Word("F", worker.home, m) in done, f"{word} without its source"
            return
        assert stage in worker.owned, f"{worker.home} runs {word}, owns {worker.owned}"
        if letters in ("F", "P"):
            assert not forward, f"{worker.home} runs {word}, which it has"
            if stage == last or (stage == 0 and letters == "F"):
                assert Word("L", stage, m) in done, f"{word} without its batch"
            if letters == "P":
                assert Word("R", stage, m) in done, f"{word} without a redundant forward"
            elif stage > 0:
                assert Word("RA", stage, m) in done or self._handed(worker, ("F", "P"), stage - 1, m), f"{word}: input"
        elif letters == "B":
            assert forward, f"{word} without its forward"
            has = stage == last or Word("RG", stage, m) in done or self._handed(worker, ("B",), stage + 1, m)
            assert has, f"{word} without its gradient"
            assert worker.backwards[stage] == m, f"{word} out of order"
            worker.backwards[stage] += 1
        elif letters in ("SA", "SG"):
            assert forward if letters == "SA" else Word("B", stage, m) in done, f"{word} without its value"

    def _handed(self, worker: Worker, kinds: tuple[str, ...], stage: int, micro_batch: int) -> bool:
        return stage in worker.owned and any(Word(kind, stage, micro_batch) in worker.done for kind in kinds)

    def run(self, choose: Callable[[list[Worker]], Worker], until: Callable[[], bool] = lambda: False) -> None:
        """Give turns to the workers that can run until `until`, or until all are at the end of the step."""
        while not until():
            self._take_over_when_due()
            ready = [worker for worker in self.workers.values() if not worker.blocked]
            if ready:
                self.turn(choose(ready))
            elif self.pending:
                self.pending[0][1] = 0
            elif all(worker.next == REDUCE for worker in self.workers.values()):
                for worker in self.workers.values():
                    worker.position += 1
                    worker.done[REDUCE] = None
            else:
                return

    # ---- losing ------------------------------------------------------------------------------------------------

    def lose(self, victim: int, *, turns: int) -> None:
        """Lose a worker of one stage; its shadow takes over after some turns."""
        assert shadowed_stage(self._shadow(victim), owners=self.owners) == victim
        del self.workers[victim]
        self.lost.add(victim)
        if victim > 0:
            queue = self.gradients[victim - 1]
            for _ in range(self.rng.randint(0, len(queue))):
                queue.pop()
        if victim + 1 < self.stages:
            queue = self.activations[victim + 1]
            for _ in range(self.rng.randint(0, len(queue))):
                queue.pop()
        self.activations[victim].clear()
        self.gradients[victim].clear()
        self.pending.append([victim, turns])

    def _shadow(self, victim: int) -> int:
        return self.owners[(victim - 1) % self.stages]

    def _take_over_when_due(self) -> None:
        for item in self.pending:
            item[1] -= 1
        for victim, turns in list(self.pending):
            if turns < 0:
                self.pending = [item for item in self.pending if item[0] != victim]
                self._take_over(victim)

    def _take_over(self, victim: int) -> None:
        """Let the shadow have the stage, make the new link, and reduce again whatever was reduced."""
        shadow = self.workers[self._shadow(victim)]
        successor = self.workers.get(self.owners[victim + 1]) if victim + 1 < self.stages else None
        if victim > 0:
            self.gradients[victim - 1].clear()  # the victim's; those it sent are computed again
        held = 0
        if successor is not None and successor is not shadow:
            read = sum(Word("RA", victim + 1, m) in successor.done for m in range(self.micro_batches))
            held = read + len(self.activations[victim + 1])
            sent = [word.micro_batch for word in successor.done if word[:2] == ("SG", victim + 1)]
            self.gradients[victim] = deque(sent)
        elif successor is shadow:
            self.activations[victim + 1].clear()
        schedule = FailoverSchedule(
            self.micro_batches,
            self.stages,
            shadow.home,
            victim=victim,
            done=list(map(from_word, shadow.done)),
            held_by_successor=held,
        )
        self.owners[victim] = shadow.home
        shadow.owned.add(victim)
        program = [to_word(instruction) for step in schedule.steps() for instruction in step]
        assert schedule.num_pipe_buffers() == _most_in_flight(shadow.done, program)
        shadow.program, shadow.position = self.edit(program), 0
        for worker in self.workers.values():
            worker.blocked = False
            if worker.done.pop(REDUCE, 0) is None and worker is not shadow:
                worker.position -= 1

    # ---- the end -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Run to the commit and hold that the step is whole."""
        self.run(self.rng.choice)
        stuck = [f"{worker.home} waits in {worker.next}" for worker in self.workers.values() if worker.next != STEP]
        assert not stuck, f"deadlock: {stuck}"
        assert not any([*self.activations, *self.gradients]), "messages that nobody received"
        batches = range(self.micro_batches)
        for stage, owner in enumerate(self.owners):
            worker = self.workers[owner]
            work = [word for word in worker.done if word.stage == stage and word.letters in ("F", "P", "B")]
            assert [word.micro_batch for word in work if word.letters == "B"] == list(batches), "backwards of a stage"
            assert sorted(word.micro_batch for word in work if word.letters != "B") == list(batches), "forwards"
            # Whatever ran the layers, redundant or not, ran them in the order of an undisturbed step.
            ran = [w.micro_batch for w in worker.done if w.stage == stage and w.letters in ("R", "F")]
            assert ran == list(batches), f"layers of stage {stage} ran in the order {ran}"


def _most_in_flight(done: Iterable[Word], program: Program) -> int:
    """Count what a shadow holds between forward and backward, of either stage, while it runs its program."""
    held = Counter(word.stage for word in done if word.letters == "F")
    held.subtract(word.stage for word in done if word.letters == "B")
    most = max([*held.values(), 0])
    for letters, stage, _ in program:
        held[stage] += 1 if letters in ("F", "P") else -1 if letters == "B" else 0
        most = max(most, held[stage])
    return most
