"""Errors that are the user's to mend."""


class UserError(Exception):
    """Something the user can fix. The message says what, where, and what to do; the CLI exits with 2."""


class ClientError(RuntimeError):
    """Code of the model, the data or the algorithm failed on a client; says which one and where."""


class Diverged(UserError):
    """Training diverged: its numbers are infinite or not numbers; with a smaller learning rate it may not."""
