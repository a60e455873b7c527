"""Who may call what: one table for both faces (pure).

What the table does not name, nobody may call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from meshnet.errors import Code, MeshError
from meshnet.identity import Identity, Role

__all__ = ["RULES", "Rule", "check_caller", "check_request"]


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may call a method.

    Attributes:
        roles: who; none, if callers without credentials may call it too.
        own: field of the request that names a node, where a node may only name itself.
        explain: who else may, if the request asks for an explanation alone.
    """

    roles: frozenset[Role] = frozenset()
    own: str = ""
    explain: frozenset[Role] = frozenset()


_NODE: Final = frozenset({Role.NODE})
_GATEWAY: Final = frozenset({Role.GATEWAY})
_ADMIN: Final = frozenset({Role.ADMIN})
_OPERATE: Final = frozenset({Role.OPERATE, *_ADMIN})
_READ: Final = frozenset({Role.READ, *_OPERATE})
_MESH: Final = _NODE | _GATEWAY
_ALL: Final = frozenset(Role)

_SERVICES: Final[Mapping[str, Mapping[str, Rule]]] = {
    "meshnet.v1.NodeService": {
        "RegisterNode": Rule(_NODE, own="node_id"),
        "Heartbeat": Rule(_NODE, own="name"),
        "GetNode": Rule(_MESH | _READ),
        "ListNodes": Rule(_MESH | _READ),
        "UpdateNode": Rule(_OPERATE),
        "DrainNode": Rule(_NODE | _OPERATE, own="name"),
        "DeregisterNode": Rule(_NODE | _OPERATE, own="name"),
        "WatchNodes": Rule(_MESH | _READ),
    },
    "meshnet.v1.RouteService": {
        "SelectRoute": Rule(_GATEWAY, explain=_READ),
        "GrantRoute": Rule(_GATEWAY),
        "GetGrantPolicy": Rule(_MESH | _READ),
        "WatchRoutes": Rule(_GATEWAY | _READ),
        "GetModel": Rule(_MESH | _READ),
        "ListModels": Rule(_MESH | _READ),
        "GetStatus": Rule(_MESH | _READ),
    },
    "meshnet.v1.EnrollmentService": {
        "Enroll": Rule(),
        "GetTrustBundle": Rule(),
        "RenewCertificate": Rule(_MESH | _READ),
        "CreateJoinToken": Rule(_ADMIN),
        "ListJoinTokens": Rule(_READ),
        "DeleteJoinToken": Rule(_ADMIN),
        "ListMembers": Rule(_READ),
        "DeleteMember": Rule(_ADMIN),
    },
    "meshnet.v1.OperatorService": {
        "CreateOperator": Rule(_ADMIN),
        "ListOperators": Rule(_ADMIN),
        "RevokeOperator": Rule(_ADMIN),
    },
    "meshnet.v1.ReferenceService": {
        "PutReference": Rule(_OPERATE),
        "ListReferences": Rule(_MESH | _READ),
        "DeleteReference": Rule(_OPERATE),
    },
    "grpc.health.v1.Health": {"Check": Rule(_ALL), "Watch": Rule(_ALL), "List": Rule(_ALL)},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": Rule(_ALL)},
}

RULES: Final[Mapping[str, Rule]] = {
    **{f"/{s}/{m}": rule for s, methods in _SERVICES.items() for m, rule in methods.items()},
    "/healthz": Rule(),
    "/metrics": Rule(_READ),
    "/openapi.json": Rule(_READ),
}
"""By ``/package.Service/Method``, and by path for what the JSON face answers itself."""


def check_caller(method: str, caller: Identity | None) -> None:
    """Refuse a caller whom no request of this method is open to.

    Args:
        method: as in `RULES`.
        caller: None for one without credentials.

    Raises:
        MeshError: UNAUTHENTICATED (CREDENTIALS_MISSING), who calls is to be known;
            PERMISSION_DENIED (ROLE_NOT_ALLOWED).
    """
    rule = RULES.get(method)
    if rule is None:
        raise MeshError(
            Code.PERMISSION_DENIED, f"{method[:200]} is open to nobody", reason="ROLE_NOT_ALLOWED"
        )
    if not rule.roles:
        return
    if caller is None:
        raise MeshError(
            Code.UNAUTHENTICATED,
            f"{method} needs credentials: a certificate of this mesh, or on the JSON face an "
            "operator's token; an operator makes them with: meshnet token create",
            reason="CREDENTIALS_MISSING",
        )
    if caller.role not in rule.roles | rule.explain:
        raise _denied(method, caller, rule.roles)


def check_request(method: str, caller: Identity | None, request: object) -> None:
    """Refuse a request that is not this caller's to make.

    Args:
        method: as in `RULES`.
        caller: None for one without credentials.
        request: a message; of methods whose rule says nothing of requests, anything.

    Raises:
        MeshError: as `check_caller`; PERMISSION_DENIED (NOT_OWN_NAME), a node speaks for
            another one.
    """
    check_caller(method, caller)
    rule = RULES[method]
    if caller is None or not rule.roles:
        return
    if caller.role not in rule.roles and not attrgetter("explain")(request):
        raise _denied(method, caller, rule.roles)
    if rule.own and caller.role is Role.NODE:
        named = str(attrgetter(rule.own)(request)).removeprefix("nodes/")
        if named != caller.name:
            raise MeshError(
                Code.PERMISSION_DENIED,
                f"node {caller.name!r} may speak for itself only, not for {named[:100]!r}",
                field=rule.own,
                reason="NOT_OWN_NAME",
            )


def _denied(method: str, caller: Identity, roles: frozenset[Role]) -> MeshError:
    expected = ", ".join(role.value for role in Role if role in roles)
    return MeshError(
        Code.PERMISSION_DENIED,
        f"{caller.role.value} {caller.name!r} may not call {method}: expected one of {expected}",
        reason="ROLE_NOT_ALLOWED",
    )
