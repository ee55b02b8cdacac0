"""The one kind of error that is the user's to mend."""


class UserError(Exception):
    """Something the user can fix. The message says what, where, and what to do; the CLI exits with 2."""
