"""One file per invariant, each with ``check(facts) -> Finding``.

Promise: a check is pure, looks at the facts alone, and answers with one
sentence that names the rank, the call, the code and the number. It does not
think about crashes and hangs elsewhere: ``cascade`` takes back what only
followed from one. A rank that the scenario took out has no events after that,
and is not in ``facts.judged``.

To add one: copy the shortest file here (``correct_result``), and name the new
module in ``registry.CHECKS``.
"""
