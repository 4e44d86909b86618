"""The CPU executor: rank processes that push real rows through shared memory."""
