"""`corolla doctor`: what is wrong here, and what to do about it."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from corolla.apps.cli.options import (
    identity_option,
    join_option,
    json_option,
    listen_options,
    logging_options,
    split_addresses,
)
from corolla.apps.cli.progress import progress
from corolla.apps.cli.settings import RunSettings

if TYPE_CHECKING:
    from corolla.net.findings import Finding
_MARKS = {"ok": "ok    ", "unsure": "unsure", "bad": "bad   "}


@click.command("doctor")
@join_option
@listen_options
@identity_option
@click.option(
    "--cache-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Where models would be kept."
)
@json_option
@logging_options("error")
@click.pass_context
def command(
    context: click.Context,
    join: tuple[str, ...],
    listen: tuple[str, ...],
    announce: tuple[str, ...],
    identity: Path | None,
    cache_dir: Path | None,
    as_json: bool,
) -> int:
    """Check this machine and its place in a swarm.

    Clock, swarm key, identity, disk, memory, whether peers can dial back to the address that is announced, and round
    trips; each finding with its next step. Give it the options that you mean to start a server with, while that server
    does not run: it takes the same port and the same peer id. Exit code 1 when something is bad.
    """
    from corolla.apps.doctor.examine import Asked, examine

    settings = context.find_object(RunSettings) or RunSettings()
    asked = Asked(split_addresses(join), listen, announce, identity, settings.swarm_keys, settings.allow, cache_dir)
    with progress("checking"):
        findings = asyncio.run(examine(asked))
    click.echo(as_json_text(findings) if as_json else as_lines(findings))
    return int(any(finding.state == "bad" for finding in findings))


def as_lines(findings: "Sequence[Finding]") -> str:
    """A line for each finding, and its next step below."""
    width = max(len(finding.check) for finding in findings)
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.state]}  {finding.check:<{width}}  {finding.text}")
        if finding.next_step:
            lines.append(f"{'':<{width + 10}}→ {finding.next_step}")
    return "\n".join(lines)


def as_json_text(findings: "Sequence[Finding]") -> str:
    is_well = not any(finding.state == "bad" for finding in findings)
    return json.dumps({"ok": is_well, "findings": [asdict(finding) for finding in findings]})
