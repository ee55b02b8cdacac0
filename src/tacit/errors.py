"""Errors that are the user's to mend."""


class UserError(Exception):
    """Something the user can fix. The message says what, where, and what to do; the CLI exits with 2."""


class Diverged(UserError):
    """Training left the finite numbers; with a smaller rate it may not."""
