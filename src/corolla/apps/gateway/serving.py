"""A gateway from start to end: joins the swarm, loads the models' local halves, answers until told to stop."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request

from corolla.apps.gateway.config import GatewayConfig
from corolla.apps.gateway.http_server import bind, serving, url_of
from corolla.apps.gateway.keys import ApiKey
from corolla.client.config import ClientConfig
from corolla.client.swarm import join_swarm
from corolla.errors import BadInput, SwarmError
from corolla.models.frugal import import_modeling
from corolla.models.source_options import SourceOptions
from corolla.models.transfer import TellSometimes, WhileWanted
from corolla.net.libp2p.addresses import HostPort
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.transport import open_transport
from corolla.swarm.announcement import ModelEntry

if TYPE_CHECKING:
    from corolla.apps.gateway.models import GatewayModel

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Which models, where from, and at which address."""

    models: Sequence[str]
    listen: HostPort
    source: SourceOptions
    dtype: str | None = None
    is_for_anyone: bool = False
    """Listening beyond this machine without keys was meant."""


def checked(options: GatewayOptions, config: GatewayConfig) -> None:
    """Raises BadInput for a gateway that strangers could use and nobody meant them to."""
    if options.listen.host in LOOPBACK or config.keys.by_hash or options.is_for_anyone:
        return
    raise BadInput(
        f"on {options.listen.host} anybody who reaches this machine could use the gateway: pass --api-keys FILE "
        "(`corolla key api NAME` makes a key), or --no-keys if that is what you want"
    )


async def run_gateway(
    options: GatewayOptions, config: GatewayConfig, client: ClientConfig, network: NetworkConfig,
    peers: Sequence[str], *, stop: asyncio.Event, on_ready: Callable[[str], None],
) -> None:  # fmt: skip
    """Serve until `stop` is set. Raises BadInput, NoPeers, or SwarmError when network or server end by themselves."""
    checked(options, config)
    async with AsyncExitStack() as stack:
        own = stack.enter_context(bind(options.listen))
        transport = await stack.enter_async_context(open_transport(network))
        is_left = threading.Event()  # a thread that downloads cannot be cancelled, and the process would wait for it
        stack.callback(is_left.set)
        # The daemon comes up and joins while torch is imported and the local halves are read.
        loading = asyncio.create_task(asyncio.to_thread(partial(load_while_wanted, options, is_left)))
        swarm = await stack.enter_async_context(join_swarm(transport, peers, client))
        models = await loading

        from corolla.apps.gateway.app import create_app
        from corolla.apps.gateway.gateway import Gateway
        from corolla.apps.gateway.observer import Observer
        from corolla.apps.gateway.pages import page_routes
        from corolla.apps.gateway.state import state_routes
        from corolla.apps.metrics.dht import DhtMetrics

        gateway = Gateway(swarm, models, config)
        stack.push_async_callback(gateway.close)
        gateway.metrics.registry.register(DhtMetrics("corolla_gateway", transport.dht_traffic))
        entries = [
            ModelEntry(name=name, fingerprint=model.served.fingerprint, num_blocks=model.served.num_blocks)
            for name, model in models.items()
        ]
        observer = Observer(transport, served=entries)
        keeper = asyncio.create_task(observer.keep_observed())
        stack.callback(keeper.cancel)
        pages = [*page_routes(), *state_routes(observer, gateway.traces, owner_of)]
        app = create_app(gateway, pages, lambda: observer.silent)
        server = await stack.enter_async_context(serving(app, own, head_timeout_s=config.body_timeout_s))
        on_ready(url_of(own))
        stopped = asyncio.create_task(stop.wait())
        stack.callback(stopped.cancel)
        lost = asyncio.create_task(transport.wait_lost())
        stack.callback(lost.cancel)
        await asyncio.wait((stopped, server, keeper, lost), return_when=asyncio.FIRST_COMPLETED)
        if lost.done() and not stop.is_set():
            raise SwarmError(f"the network daemon is gone: {lost.result()}")
        for ended, what in ((keeper, "watching the swarm"), (server, "the HTTP server")):
            if ended.done() and not stop.is_set():
                raise SwarmError(f"{what} ended by itself") from ended.exception()


def load_while_wanted(options: GatewayOptions, is_left: threading.Event) -> "dict[str, GatewayModel]":
    """Local halves by display name; a download is logged, and ended with SwarmError once `is_left` is set."""
    import_modeling()  # before anything imports transformers' models in its own way
    from corolla.apps.gateway.models import load_models

    progress = WhileWanted(TellSometimes(log.info), is_left)
    return load_models(options.models, dtype=options.dtype, source=options.source, progress=progress, say=log.info)


async def owner_of(request: Request) -> str:
    """Whose answers a caller may look into; the guard has asked for the key."""
    key: ApiKey = request.state.key
    return key.id
