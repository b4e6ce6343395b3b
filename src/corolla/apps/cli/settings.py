"""What one run of the command line carries from its options to its frame."""

from dataclasses import dataclass


@dataclass(slots=True)
class RunSettings:
    """Made by `main.run`, filled in by the options of the command that runs."""

    debug: bool = False
    """Show the traceback of what went wrong."""
