"""Time and memory of what longspan computes, beside its peers, in one run: `longspan bench`.

`measure` runs one subject once, in a process of its own; `compare` runs several in turn. A subject is anything with a
`work` and a `check` (see `Subject`): the mechanisms (`Ours`) and the older packages (`PEERS`) are the first.
"""

from longspan.bench.runner import Case, Check, Effort, Row, Run, Step, Subject, Work, compare, measure
from longspan.bench.subjects.mechanisms import Ours
from longspan.bench.subjects.peers import PEERS, Theirs

__all__ = [
    "PEERS",
    "Case",
    "Check",
    "Effort",
    "Ours",
    "Row",
    "Run",
    "Step",
    "Subject",
    "Theirs",
    "Work",
    "compare",
    "measure",
]
