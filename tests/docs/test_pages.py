"""What the pages say exists does: files, commands, options, exit codes."""

import logging
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from corolla import errors
from corolla.apps.cli.main import COMMANDS, INTERRUPTED, cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
API = (ROOT / "docs" / "api.md").read_text()
EVERYWHERE = {"--help", "--debug", "--log-level", "--log-format"}


@pytest.fixture(autouse=True)
def kept_logging() -> Iterator[None]:
    """Parsing a command line sets its logging up."""
    root, ours = logging.root, logging.getLogger("corolla")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def commands(group: click.Group, *names: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with its full name."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, *names, name)
        elif not command.hidden:
            yield (*names, name), command


ALL_COMMANDS = dict(commands(cli))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_command_lines_are_ones_that_corolla_takes(page: Path) -> None:
    for line in shell_lines(page.read_text()):
        words = shlex.split(line.partition(">")[0], comments=True)
        if words[:1] == ["corolla"]:
            name = next(name for name in ALL_COMMANDS if tuple(words[1 : 1 + len(name)]) == name)
            ALL_COMMANDS[name].make_context(" ".join(name), words[1 + len(name) :])
        elif words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line


def shell_lines(text: str) -> list[str]:
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_the_front_page_shows_every_step_of_a_swarm_on_two_machines() -> None:
    shown = {shlex.split(line)[1] for line in shell_lines(PAGES[0].read_text()) if line.startswith("corolla")}
    assert shown >= {"bootstrap", "serve", "status", "generate", "chat"}


def test_every_command_has_its_place_in_the_reference() -> None:
    for name in COMMANDS:
        assert re.search(rf"^### .*`corolla {name}\b", API, re.MULTILINE), name


@pytest.mark.parametrize("name", ALL_COMMANDS, ids=" ".join)
def test_every_option_is_in_the_reference(name: tuple[str, ...]) -> None:
    said = options_in(section("Shared options")) | options_in(section(f"`corolla {name[0]}"))
    own = {
        max(parameter.opts, key=len)
        for parameter in ALL_COMMANDS[name].params
        if isinstance(parameter, click.Option) and not parameter.hidden
    }
    assert own - EVERYWHERE <= said, "docs/api.md lacks an option of this command"


def test_the_reference_names_no_option_that_is_not_there() -> None:
    known = {option for command in ALL_COMMANDS.values() for parameter in command.params for option in parameter.opts}
    assert options_in(API) <= known | EVERYWHERE


def options_in(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]*", text))


def section(title: str) -> str:
    """The text from the heading that holds `title` to the next one."""
    parts = re.split(r"^### ", API, flags=re.MULTILINE)
    return next(part for part in parts if re.search(re.escape(title) + r"\b", part.splitlines()[0]))


def test_exit_codes_are_those_of_the_error_tree() -> None:
    rows = re.findall(r"^\| (\d+) \|([^|]*)\|([^|]*)\|$", API, re.MULTILINE)
    said = {int(code): names + text for code, names, text in rows}
    assert INTERRUPTED in said
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.SwarmError):
            assert f"`{error.__name__}`" in said[error.exit_code], error


def test_every_module_is_named_in_the_architecture_or_its_folder_is() -> None:
    text, package = (ROOT / "docs" / "architecture.md").read_text(), ROOT / "src" / "corolla"
    unnamed = [
        name
        for path in package.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
        and f"`{(name := path.relative_to(package).as_posix())}`" not in text
        and f"`{path.parent.relative_to(package).as_posix()}/`" not in _folders_told_as_one(text)
    ]
    assert not unnamed


def _folders_told_as_one(text: str) -> set[str]:
    """Those that have an entry in the list of files; headings and the table of layers name all of them."""
    entries = re.findall(r"^- .*$", text[text.index("## The files") :], re.MULTILINE)
    return set(re.findall(r"`(?:[a-z0-9_]+/)+`", "\n".join(entries)))


def test_modules_named_in_the_architecture_exist() -> None:
    named = re.findall(r"`((?:[a-z0-9_]+/)+[a-z0-9_]*(?:\.py)?)`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 60
    for path in named:
        places = (ROOT / path, ROOT / "src" / "corolla" / path)
        assert any(place.exists() for place in places), path
