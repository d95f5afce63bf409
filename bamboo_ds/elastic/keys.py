"""The keys of a job in the store, all below `/bamboo/<job>/`.

What everybody must hear lies on the *board*, and each worker and agent watches that one prefix, so news reaches it in
the order in which it was decided. What only the coordinator reads lies on its *desk*: a thousand workers do not wake up
for each other's votes.

========================================================= ======================= =====================================
key                                                       written by              value
========================================================= ======================= =====================================
board/plan                                                coordinator             Plan
board/roster                                              coordinator             Roster, once
board/decision/<engine>/<number>                          coordinator             Outcome
board/roll                                                coordinator             a number: workers answer with it
board/settled                                             coordinator             the newest epoch with a decision
board/finished                                            coordinator             why the job is over
board/spec, board/settings/<engine>                       the first worker        JobSpec, JobSettings
board/failure/<scope>                                     the first that fails    JSON of `world.failure.Failure`
board/preempt/<node>                                      a person, a bench       kill, term, stop or cut
desk/nodes/<node>                                         its agent, under lease  Node
desk/ready/<worker>                                       the worker              its node: it can be given a stage
desk/ended/<worker>                                       its agent               JSON {"signal": ..., "reason": ...}
desk/left/<worker>                                        the worker              its script has ended in order
desk/suspects/<epoch>.<version>/<reporter>-<suspect>      a worker                LinkReport
desk/answers/<worker>                                     the worker              the number of the roll it answers
desk/leaving/<node>                                       its agent, under lease  JSON: its cloud will take it away
desk/votes/<engine>/<number>/<epoch>.<version>/<pipeline> a pipeline's spokesman  Ballot
coordinator/<lease>                                       agents, under lease     name of the node
workers                                                   agents                  counter: next worker id
launch                                                    hosted agents           which launch the job's run is
events/<time>-<node>                                      whoever saw it          JSON, see `elastic.events`
progress                                                  coordinator             JSON, at most once a second
rdzv/<epoch>.<version>/<scope>/...                        workers                 what groups form by
========================================================= ======================= =====================================

`<engine>` is the number of the engine in its script, `<number>` counts that engine's commits (not its steps, which go
back when a checkpoint is loaded).
"""

from __future__ import annotations

BOARD = "board/"
PLAN = f"{BOARD}plan"
ROSTER = f"{BOARD}roster"
ROLL = f"{BOARD}roll"
SETTLED = f"{BOARD}settled"
FINISHED = f"{BOARD}finished"
SPEC = f"{BOARD}spec"
DECISIONS = f"{BOARD}decision/"
FAILURES = f"{BOARD}failure/"
PREEMPTIONS = f"{BOARD}preempt/"

DESK = "desk/"
NODES = f"{DESK}nodes/"
READY = f"{DESK}ready/"
ENDED = f"{DESK}ended/"
LEFT = f"{DESK}left/"
SUSPECTS = f"{DESK}suspects/"
ANSWERS = f"{DESK}answers/"
VOTES = f"{DESK}votes/"

COORDINATOR = "coordinator"
WORKER_COUNTER = "workers"
LAUNCH = "launch"
EVENTS = "events/"
PROGRESS = "progress"
RENDEZVOUS = "rdzv/"


def prefix(job: str) -> str:
    """Return what all keys of a job begin with."""
    return f"/bamboo/{job}/"


def settings(engine: int) -> str:
    """Return the key of an engine's config."""
    return f"{BOARD}settings/{engine}"


def decision(engine: int, number: int) -> str:
    """Return the key of the outcome of a commit."""
    return f"{DECISIONS}{engine}/{number}"


def failure(scope: str) -> str:
    """Return the key of the first failure in a scope: `job`, or `engine-<number>`."""
    return f"{FAILURES}{scope}"


def preempt(node: str) -> str:
    """Return the key under which a node is told to break."""
    return f"{PREEMPTIONS}{node}"


def node(name: str) -> str:
    """Return the key of a node."""
    return f"{NODES}{name}"


def ready(worker: int) -> str:
    """Return the key that says that a worker can be given a stage."""
    return f"{READY}{worker}"


def ended(worker: int) -> str:
    """Return the key that says that a worker's agent saw it end."""
    return f"{ENDED}{worker}"


def left(worker: int) -> str:
    """Return the key that says that a worker's script has ended in order."""
    return f"{LEFT}{worker}"


def suspect(number: tuple[int, int], reporter: int, accused: int) -> str:
    """Return the key of a report of a broken link."""
    return f"{SUSPECTS}{dotted(number)}/{reporter}-{accused}"


def answer(worker: int) -> str:
    """Return the key of a worker's answer to the roll."""
    return f"{ANSWERS}{worker}"


def votes(engine: int, number: int) -> str:
    """Return the prefix of all ballots of a commit."""
    return f"{VOTES}{engine}/{number}/"


def vote(engine: int, number: int, plan_number: tuple[int, int], pipeline: int) -> str:
    """Return the key of a pipeline's ballot."""
    return f"{votes(engine, number)}{dotted(plan_number)}/{pipeline}"


def rendezvous(number: tuple[int, int], scope: str) -> str:
    """Return the prefix below which the groups of a plan form; `scope` is `engine-<number>` or `user`."""
    return f"{RENDEZVOUS}{dotted(number)}/{scope}/"


def dotted(number: tuple[int, int]) -> str:
    """Return a plan's number as text: `<epoch>.<version>`."""
    return f"{number[0]}.{number[1]}"
