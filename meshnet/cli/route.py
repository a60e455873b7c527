"""``meshnet route``: the route that a generation would take now, and why."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from meshnet.cli.mesh import ControlUrl, CredentialsDir, ModelArgument, ask, layers_text, to_json
from meshnet.cli.output import Json, console, print_json
from meshnet.v1 import route_service_pb2 as routes_pb2
from meshnet.v1 import types_pb2

__all__ = ["route"]

_ALTERNATIVES = 3


def route(
    model: ModelArgument,
    control: ControlUrl = None,
    credentials: CredentialsDir = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Id of a node not to use; may be repeated.")
    ] = None,
    region: Annotated[str, typer.Option(help="Region of the caller.")] = "",
    tokens: Annotated[int, typer.Option(min=0, help="KV-cache tokens to be expected.")] = 0,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="What each hop costs, other routes, and who is left out."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the route that a generation of MODEL would take now."""
    selected = ask(
        control,
        credentials,
        lambda client: client.explain_routes(
            f"models/{model}",
            exclude=exclude or (),
            region=region,
            expected_tokens=tokens,
            max_routes=_ALTERNATIVES if explain else 1,
        ),
    )
    if as_json:
        print_json(to_json(selected))
        return
    best = selected.routes[0]
    console.print(_explained(best) if explain else _hops(best))
    if explain:
        _print_reasons(selected)


def _hops(found: routes_pb2.Route) -> Table:
    table = Table("hop", "node", "layers", "address", box=None)
    for number, hop in enumerate(found.hops, start=1):
        table.add_row(
            str(number), hop.node.removeprefix("nodes/"), layers_text(hop.layers), hop.endpoint.uri
        )
    return table


def _explained(found: routes_pb2.Route) -> Table:
    table = Table(
        "hop", "node", "layers", box=None, title="milliseconds for one token", title_justify="left"
    )
    for name in ("compute", "queue", "cache", "link", "overhead", "total"):
        table.add_column(name, justify="right")
    for number, hop in enumerate(found.hops, start=1):
        cost = hop.cost
        total = cost.compute + cost.queue + cost.cache + cost.link + cost.overhead + cost.penalty
        table.add_row(
            str(number),
            hop.node.removeprefix("nodes/"),
            layers_text(hop.layers),
            _ms(cost.compute),
            _ms(cost.queue),
            _ms(cost.cache),
            _ms(cost.link) + ("" if cost.link_measured or cost.link == 0 else " (guess)"),
            _ms(cost.overhead),
            _ms(total),
        )
    return table


def _print_reasons(selected: routes_pb2.SelectRouteResponse) -> None:
    best, *others = selected.routes
    kind = types_pb2.RouteClass.Name(best.route_class).removeprefix("ROUTE_CLASS_")
    least = f"{_ms(best.cost)} ms a token is the least of all chains that cover the model"
    version = f"wire version {best.wire_version or 'any'}"
    lines = [f"{least}; {kind}; digest {best.model_digest[:16]}; {version}"]
    for other in others:
        nodes = " ".join(
            f"{h.node.removeprefix('nodes/')} {layers_text(h.layers)}," for h in other.hops
        )
        own = sum(hop.cost.penalty for hop in other.hops)
        lines.append(f"next: {nodes.removesuffix(',')}: {_ms(other.cost - own)} ms a token")
    if not others:
        lines.append("no other route")
    for left in selected.left_out:
        reason = left.reason.lower().replace("_", " ")
        lines.append(f"left out: {left.node.removeprefix('nodes/')}: {reason}")
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _ms(microseconds: int) -> str:
    return f"{microseconds / 1000:.1f}"
