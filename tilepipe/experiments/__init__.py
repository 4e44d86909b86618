"""One module per operation: setup, run once, check, account.

The only place where executor, oracle and clock meet.
"""
