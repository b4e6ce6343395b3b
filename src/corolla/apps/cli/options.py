"""Options that several commands share, so that they are called and checked the same everywhere."""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import click

from corolla.apps.cli.logs import FORMATS, LEVELS, set_up_logging
from corolla.apps.cli.settings import RunSettings
from corolla.errors import BadInput

PEERS_VARIABLE = "COROLLA_PEERS"
SWARM_KEY_VARIABLE = "COROLLA_SWARM_KEY"
LOG_FORMAT = "corolla.log_format"
"""Where the one option is kept for the other, in click's `Context.meta`."""

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Decorator = Callable[[Decorated], Decorated]


class HostPort(click.ParamType[str]):
    """`HOST:PORT`, with an IPv6 host in brackets; stays the text that was typed."""

    name = "host:port"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from corolla.net.libp2p.addresses import parse_host_port  # not for --help

        try:
            parse_host_port(value)
        except BadInput as wrong:
            self.fail(str(wrong), param, ctx)
        return value


class BlockSpan(click.ParamType[tuple[int, int]]):
    """`A:B`, half-open; whether the model has such blocks is for the server to say."""

    name = "a:b"

    def convert(
        self, value: str | tuple[int, int], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        matched = re.fullmatch(r"(\d{1,6}):(\d{1,6})", value)
        if matched is None:
            self.fail(
                f"{value!r} is not A:B, the first block and the one after the last (0:10 is ten blocks)", param, ctx
            )
        return int(matched[1]), int(matched[2])


def join_option(command: Decorated) -> Decorated:
    """`join`; and `--swarm-key`, which every command that meets a swarm needs and none has to pass on."""
    command = _swarm_key_option(command)
    return click.option(
        "--join",
        metavar="ADDR",
        multiple=True,
        envvar=PEERS_VARIABLE,
        show_envvar=True,
        help="Address of a peer of the swarm, as its `ready` line says it; repeatable.",
    )(command)


def identity_option(command: Decorated) -> Decorated:
    """`identity`."""
    return _identity_option()(command)


def client_identity_option(command: Decorated) -> Decorated:
    """`--identity` of commands that only ask: lists of peers (`--allow`) know them by it. Needs no passing on."""
    return _identity_option(expose_value=False, callback=_set_identity)(command)


def _identity_option(**how: Any) -> Decorator[Decorated]:
    return click.option(
        "--identity",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Key file that keeps this peer's id from start to start; made if there is none. Default: a new id.",
        **how,
    )


def _swarm_key_option(command: Decorated) -> Decorated:
    return click.option(
        "--swarm-key",
        metavar="FILE",
        multiple=True,
        type=click.Path(path_type=Path),
        envvar=SWARM_KEY_VARIABLE,
        show_envvar=True,
        expose_value=False,
        callback=_set_swarm_keys,
        help="Key of a private swarm, as `corolla key new` made it; repeatable: one in common is enough.",
    )(command)


def _allow_option(command: Decorated) -> Decorated:
    return click.option(
        "--allow",
        metavar="FILE",
        multiple=True,
        type=click.Path(path_type=Path),
        expose_value=False,
        callback=_set_allow,
        help="Answer only the peers in this file, one id a line; repeatable.",
    )(command)


def server_list_options(command: Decorated) -> Decorated:
    """`--allow-server`, `--block-server`, `--quant` of commands that look for a route; none needs passing on."""
    command = click.option(
        "--quant",
        type=click.Choice(["any", "none"]),
        default="any",
        show_default=True,
        expose_value=False,
        callback=_set_server_quantization,
        help="With none, use only servers that do not hold the weights in fewer bits.",
    )(command)
    for name, text in (
        ("--block-server", "Peer id of a server not to use; repeatable."),
        ("--allow-server", "Peer id of a server to use, and no others than these; repeatable."),
    ):
        command = click.option(
            name, metavar="PEER", multiple=True, expose_value=False, callback=_set_servers, help=text
        )(command)
    return command


def exact_option(command: Decorated) -> Decorated:
    """`--exact`, which needs no passing on."""
    return click.option(
        "--exact",
        is_flag=True,
        expose_value=False,
        callback=_set_exact,
        help="Bit for bit the same text when servers are lost, in every number format; replacing one takes longer.",
    )(command)


def listen_options(command: Decorated) -> Decorated:
    """`listen` and `announce`; and `--allow`, which needs no passing on."""
    command = _allow_option(command)
    command = click.option(
        "--announce",
        metavar="HOST:PORT",
        type=HostPort(),
        multiple=True,
        help="Address at which others reach this peer, where it is not the listening one; repeatable.",
    )(command)
    return click.option(
        "--listen",
        metavar="HOST:PORT",
        type=HostPort(),
        multiple=True,
        default=("127.0.0.1:0",),
        show_default=True,
        help="Address to listen on; port 0 takes a free one; repeatable.",
    )(command)


def json_option(command: Decorated) -> Decorated:
    return click.option("--json", "as_json", is_flag=True, help="Say the result as JSON.")(command)


def exit_with_parent_option(command: Decorated) -> Decorated:
    return click.option("--exit-with-parent", is_flag=True, hidden=True, help="Leave when standard input ends.")(
        command
    )


def sampling_options(command: Decorated) -> Decorated:
    """Of commands that generate: `dtype`, `max_new_tokens`, `temperature`, `top_p`, `seed`."""
    for option in (
        click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Makes sampling repeatable."),
        click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Sample from the likeliest part."),
        click.option("--temperature", type=click.FloatRange(0, min_open=True), help="Sample. Default: the likeliest."),
        click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
            default="auto",
            show_default=True,
            help="Number format of the local half and of what is sent; auto keeps the checkpoint's own.",
        ),
    ):
        command = option(command)
    return command


def logging_options(default: str) -> Decorator[Decorated]:
    """`--log-level`, `--log-format` and `--debug`, which set themselves up and never reach the command."""

    def decorate(command: Decorated) -> Decorated:
        level = click.option(
            "--log-level",
            type=click.Choice(LEVELS),
            default=default,
            show_default=True,
            expose_value=False,
            callback=lambda ctx, _param, value: set_up_logging(value, ctx.meta[LOG_FORMAT]),
            help="Least important events to log, on standard error.",
        )
        form = click.option(
            "--log-format",
            type=click.Choice(FORMATS),
            default="text",
            show_default=True,
            expose_value=False,
            is_eager=True,  # before the level, whose callback sets both
            callback=lambda ctx, _param, value: ctx.meta.update({LOG_FORMAT: value}),
            help="Log lines for people, or as JSON.",
        )
        debug = click.option(
            "--debug", is_flag=True, expose_value=False, callback=_set_debug, help="Show tracebacks of errors."
        )
        return level(form(debug(command)))

    return decorate


def _set_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    settings = ctx.find_root().obj
    if isinstance(settings, RunSettings):
        settings.debug = value


def _set_swarm_keys(ctx: click.Context, _param: click.Parameter, value: tuple[Path, ...]) -> None:
    settings = ctx.find_root().obj
    if isinstance(settings, RunSettings):
        settings.swarm_keys = value


def _set_allow(ctx: click.Context, _param: click.Parameter, value: tuple[Path, ...]) -> None:
    settings = ctx.find_root().obj
    if isinstance(settings, RunSettings):
        settings.allow = value


def _set_identity(ctx: click.Context, _param: click.Parameter, value: Path | None) -> None:
    settings = ctx.find_root().obj
    if isinstance(settings, RunSettings):
        settings.identity = value


def _set_servers(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> None:
    settings = ctx.find_root().obj
    if isinstance(settings, RunSettings):
        if param.name == "allow_server":
            settings.allow_servers = value
        else:
            settings.block_servers = value


def _set_exact(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    settings = ctx.find_root().obj
    if isinstance(settings, RunSettings):
        settings.exact = value


def _set_server_quantization(ctx: click.Context, _param: click.Parameter, value: str) -> None:
    settings = ctx.find_root().obj
    if isinstance(settings, RunSettings):
        settings.server_quantization = value


def split_addresses(join: Sequence[str]) -> tuple[str, ...]:
    """The addresses of `--join` or the variable, whether spaces or commas stand between them."""
    return tuple(address for text in join for address in text.replace(",", " ").split())


def require_peers(join: Sequence[str]) -> tuple[str, ...]:
    """The swarm's addresses. Raises BadInput, saying how to name some, when there are none."""
    addresses = split_addresses(join)
    if not addresses:
        raise BadInput(
            "no swarm named: pass --join ADDR (what `corolla serve` or `corolla bootstrap` printed after `addr=`), "
            f"or set {PEERS_VARIABLE}"
        )
    return addresses


class Size(click.ParamType[int]):
    """Bytes: a number, or one with KB, MB, GB or TB (thousands) or KiB, MiB, GiB or TiB (1024)."""

    name = "size"
    _UNITS: ClassVar[dict[str, int]] = {
        "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
        "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    }  # fmt: skip

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        matched = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)", value)
        if matched is None or matched[2].lower() not in self._UNITS:
            self.fail(f"{value!r} is not a size like 50GB or 20GiB", param, ctx)
        return int(float(matched[1]) * self._UNITS[matched[2].lower()])


def source_options(command: Decorated) -> Decorated:
    """Where a model may come from, as one `source` argument."""

    @functools.wraps(command)
    def with_source(
        *args: Any, revision: str | None, token: str | None, cache_dir: Path | None, max_disk: int | None, **kwargs: Any
    ) -> Any:
        from corolla.models.source_options import SourceOptions  # not for --help

        return command(*args, source=SourceOptions(revision, token, cache_dir, max_disk), **kwargs)

    options = (
        click.option("--revision", metavar="NAME", help="Branch, tag or commit of a hub's repository. Default: main."),
        click.option("--token", metavar="TOKEN", help="For gated repositories. Default: HF_TOKEN or the saved login."),
        click.option(
            "--cache-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
            help="Where downloads and conversions are kept.",
        ),
        click.option("--max-disk", type=Size(), metavar="SIZE", help="Most that they may take there, like 50GB."),
    )  # fmt: skip
    decorated: Any = with_source
    for option in reversed(options):
        decorated = option(decorated)
    return decorated
