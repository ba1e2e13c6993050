"""A Daytona on loopback for tests: control API, toolbox, preview proxy, events and faults.

Sandboxes are processes of this machine with a directory of their own as disk; they are **not** isolated. It speaks
what the SDK 0.226 speaks (``runner/sandbox/daytona`` is driven against it), records every exchange and checks it
against the SDK's generated models and, where a copy is at hand, against the published OpenAPI (``contract.py``).

``DaytonaEmulator`` (``server.py``) runs in the loop of the test, ``python -m tests.daytona_emulator`` in a process of
its own; the fixture ``daytona_emulator`` is the latter. Time can be moved (``POST /__emu/clock``), faults are rules
(``POST /__emu/fault``) or named scenarios (``POST /__emu/scenario``).
"""
